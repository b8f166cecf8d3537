"""A rank's tokens in one step, on the attention side and as it dispatches them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from crossdock.dispatch import Partition, pcp_chunks
from crossdock.dispatch.transports.base import Transport
from crossdock.launch.config import Job

__all__ = ["Batch", "make_batch"]


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
    section, topology = job.config.run.batch, job.topology
    if section.tokens_per_rank is not None:
        counts = section.tokens_per_rank
        first = sum(counts[:rank])
        return Batch(
            numbers=torch.arange(first, first + counts[rank]),
            num_owned=counts[rank],
            total=sum(counts),
            partition=None,
        )
    prefill = section.prefill or [[]] * topology.dp
    decode = section.decode or [0] * topology.dp
    partitions = [
        Partition(
            topology,
            other,
            prefill_lengths=prefill[topology.coordinates(other).dp],
            num_decode=decode[topology.coordinates(other).dp],
            sequence_parallel=job.config.parallel.sequence_parallel,
        )
        for other in range(topology.world_size)
    ]
    offsets = torch.tensor([0] + [p.num_owned for p in partitions]).cumsum(0).tolist()
    dp = topology.coordinates(rank).dp
    number_of = torch.empty(sum(prefill[dp]) + decode[dp], dtype=torch.int64)
    for other, partition in enumerate(partitions):
        if topology.coordinates(other).dp == dp:
            owned = partition.to_ep(_batch_places(partition))
            number_of[owned] = torch.arange(offsets[other], offsets[other + 1])
    return Batch(
        numbers=number_of[_batch_places(partitions[rank])],
        num_owned=partitions[rank].num_owned,
        total=offsets[-1],
        partition=partitions[rank],
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
