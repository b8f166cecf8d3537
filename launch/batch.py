"""A rank's tokens in one step, on the attention side and as it dispatches them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from crossdock.dispatch import Partition, pcp_chunks
from crossdock.dispatch.transports.base import Transport
from crossdock.launch.config import Job

__all__ = ["Batch", "make_batch", "make_batches"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Which tokens a rank holds and which of them it dispatches; the same in every step.

    Attributes:
        numbers: int64 [attention tokens]: each token's number within the step. A replicated token
            has the same number on every rank that holds it: its place among its owner's tokens.
        num_owned: T, tokens that this rank dispatches.
        total: Tokens that all ranks dispatch.
        partition: How the two relate; None where every token is its rank's own.
    """

    numbers: Tensor
    num_owned: int
    total: int
    partition: Partition | None

    @property
    def num_attention_tokens(self) -> int:
        """Tokens on the attention side."""
        return int(self.numbers.numel())

    def to_ep(self, attention: Tensor) -> Tensor:
        """Rows [T, ...] that this rank dispatches, of an attention-side tensor."""
        return self.partition.to_ep(attention) if self.partition else attention

    def from_ep(self, out: Tensor, transport: Transport) -> Tensor:
        """Results in attention order, replicated tokens included. Collective."""
        return self.partition.from_ep(out, transport) if self.partition else out


def make_batch(job: Job, rank: int) -> Batch:
    """The batch of one rank."""
    counts = job.config.run.batch.tokens_per_rank
    if counts is not None:
        return _plain_batch(counts, rank)
    return _partitioned_batch(_partitions(job), rank)


def make_batches(job: Job) -> list[Batch]:
    """The batches of all ranks."""
    ranks = range(job.topology.world_size)
    counts = job.config.run.batch.tokens_per_rank
    if counts is not None:
        return [_plain_batch(counts, rank) for rank in ranks]
    partitions = _partitions(job)
    return [_partitioned_batch(partitions, rank) for rank in ranks]


def _plain_batch(counts: list[int], rank: int) -> Batch:
    first = sum(counts[:rank])
    return Batch(
        numbers=torch.arange(first, first + counts[rank]),
        num_owned=counts[rank],
        total=sum(counts),
        partition=None,
    )


def _partitions(job: Job) -> list[Partition]:
    section, topology = job.config.run.batch, job.topology
    prefill = section.prefill or [[]] * topology.dp
    decode = section.decode or [0] * topology.dp
    return [
        Partition(
            topology,
            rank,
            prefill_lengths=prefill[topology.coordinates(rank).dp],
            num_decode=decode[topology.coordinates(rank).dp],
            sequence_parallel=job.config.parallel.sequence_parallel,
        )
        for rank in range(topology.world_size)
    ]


def _partitioned_batch(partitions: list[Partition], rank: int) -> Batch:
    mine = partitions[rank]
    offsets = torch.tensor([0] + [p.num_owned for p in partitions]).cumsum(0).tolist()
    number_of = torch.empty(sum(mine.prefill_lengths) + mine.num_decode, dtype=torch.int64)
    for other, partition in enumerate(partitions):
        if partition.coordinates.dp == mine.coordinates.dp:
            owned = partition.to_ep(_batch_places(partition))
            number_of[owned] = torch.arange(offsets[other], offsets[other + 1])
    return Batch(
        numbers=number_of[_batch_places(mine)],
        num_owned=mine.num_owned,
        total=offsets[-1],
        partition=mine,
    )


def _batch_places(partition: Partition) -> Tensor:
    """Place in its DP replica's batch (sequences, then decode) of each attention token."""
    places, start = [torch.empty(0, dtype=torch.int64)], 0
    for length in partition.prefill_lengths:
        chunks = pcp_chunks(length, partition.topology.pcp)
        places.append(start + chunks[partition.coordinates.pcp])
        start += length
    places.append(torch.arange(start, start + partition.num_decode))
    return torch.cat(places)
