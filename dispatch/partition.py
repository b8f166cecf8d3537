"""Attention layout <-> the tokens that each rank dispatches, under DP, PCP and SP.

Attention side of rank (dp, pcp, tp): for every prefill sequence of its DP replica, chunks r and
2 * pcp - 1 - r of the sequence (r its PCP coordinate), then all decode tokens of the replica. All
TP ranks hold the same tokens. Ownership removes the copies: a decode token belongs to one PCP
rank, and what a PCP rank owns is sliced over its TP ranks, or is TP rank 0's without sequence
parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from crossdock.dispatch.agreement import Operation, Problem, ProblemKind, Record, agree
from crossdock.dispatch.digest import digest_of
from crossdock.dispatch.topology import Topology
from crossdock.dispatch.transports.base import Transport
from crossdock.scratch.errors import ConfigError, DisagreementError

__all__ = ["Partition", "pcp_chunks"]


def pcp_chunks(length: int, pcp: int) -> list[Tensor]:
    """Token positions of one prefill sequence on each PCP rank.

    The sequence is cut into 2 * pcp chunks of length // (2 * pcp) tokens, the first
    length % (2 * pcp) of them one longer; rank r holds chunks r and 2 * pcp - 1 - r, which evens
    out causal attention's work.

    Args:
        length: Tokens of the sequence, 0 or more.
        pcp: Prefill context parallel size.

    Returns:
        pcp int64 vectors of positions, in the order in which the rank holds them.

    Raises:
        ConfigError: ``length`` below 0 or ``pcp`` below 1.
    """
    _require_whole("length", length, least=0)
    _require_whole("pcp", pcp, least=1)
    base, extra = divmod(length, 2 * pcp)
    sizes = [base + (chunk < extra) for chunk in range(2 * pcp)]
    chunks = torch.split(torch.arange(length), sizes)
    return [torch.cat([chunks[r], chunks[2 * pcp - 1 - r]]) for r in range(pcp)]


class Partition:
    """Which attention tokens this rank dispatches, and how results get back to all that need them.

    Args:
        topology: The rank grid.
        rank: This EP rank.
        prefill_lengths: Tokens of each prefill sequence of this rank's DP replica.
        num_decode: Decode tokens of this rank's DP replica.
        sequence_parallel: Slice tokens over TP ranks, ceil(n / tp) each; otherwise TP rank 0
            dispatches them all.

    Attributes:
        num_attention_tokens: Tokens this rank holds on the attention side.
        num_owned: T, tokens this rank dispatches.

    Raises:
        ConfigError: A length that is no whole number of 0 or more.
    """

    def __init__(
        self,
        topology: Topology,
        rank: int,
        *,
        prefill_lengths: Sequence[int] = (),
        num_decode: int = 0,
        sequence_parallel: bool = False,
    ) -> None:
        for i, length in enumerate(prefill_lengths):
            _require_whole(f"prefill_lengths[{i}]", length, least=0)
        _require_whole("num_decode", num_decode, least=0)
        self.topology = topology
        self.rank = rank
        self.coordinates = topology.coordinates(rank)
        self.prefill_lengths = tuple(prefill_lengths)
        self.num_decode = num_decode
        self.sequence_parallel = sequence_parallel
        self._num_prefill = [
            sum(_num_chunk_tokens(length, topology.pcp, r) for length in self.prefill_lengths)
            for r in range(topology.pcp)
        ]
        self.num_attention_tokens = self._num_prefill[self.coordinates.pcp] + num_decode
        self._owned = self._owned_by(self.coordinates.pcp, self.coordinates.tp)
        self.num_owned = int(self._owned.numel())

    def to_ep(self, attention: Tensor) -> Tensor:
        """Rows [num_owned, ...] of an attention-side tensor [num_attention_tokens, ...].

        Raises:
            ValueError: The tensor has another number of tokens.
        """
        if attention.shape[:1] != (self.num_attention_tokens,):
            raise ValueError(
                f"attention-side tensor of shape {tuple(attention.shape)}: this rank holds "
                f"{self.num_attention_tokens} tokens"
            )
        if self.num_owned == self.num_attention_tokens:
            return attention
        return attention.index_select(0, self._owned.to(attention.device))

    def from_ep(self, out: Tensor, transport: Transport) -> Tensor:
        """Bring the results of owned tokens to every rank that holds the tokens. Collective.

        Args:
            out: [num_owned, ...] results of the tokens that ``to_ep`` gave.
            transport: The EP group's transport.

        Returns:
            [num_attention_tokens, ...], in attention order.

        Raises:
            RoutingError: ``out`` has another number of tokens, on any rank.
            DisagreementError: Ranks of one DP replica have different batches, or ranks have
                results of different width.
        """
        if self.topology.pcp == 1 and self.topology.tp == 1 and len(out) == self.num_owned:
            return out
        out = out.contiguous()
        width = math.prod(out.shape[1:])
        row_bytes = width * out.element_size()
        self._agree(out, row_bytes, transport)

        with transport.moving():
            received, places = self._gather(
                out.view(self.num_owned, width).view(torch.uint8), transport
            )
        attention = out.new_empty(self.num_attention_tokens, *out.shape[1:])
        by_row = attention.view(self.num_attention_tokens, width).view(torch.uint8)
        by_row.index_copy_(0, places.to(out.device), received)
        return attention

    def _gather(self, mine: Tensor, transport: Transport) -> tuple[Tensor, Tensor]:
        """Rows [n, row_bytes] from this DP replica's ranks, and the attention index of each.

        Args:
            mine: uint8 [num_owned, row_bytes].
            transport: The EP group's transport.
        """
        group = [
            self.topology.rank_of(dp=self.coordinates.dp, pcp=pcp, tp=tp)
            for pcp in range(self.topology.pcp)
            for tp in range(self.topology.tp)
        ]
        send_rows, recv_rows = [0] * transport.world_size, [0] * transport.world_size
        parts, places = [], []
        decode = self._owned >= self._num_prefill[self.coordinates.pcp]
        num_decode_owned = int(decode.sum())
        for rank in group:
            same_pcp = self.topology.coordinates(rank).pcp == self.coordinates.pcp
            # Decode tokens follow prefill tokens in the owned order, on every rank.
            parts.append(mine if same_pcp else mine[self.num_owned - num_decode_owned :])
            send_rows[rank] = len(parts[-1])
            index = self._arriving_from(rank)
            recv_rows[rank] = len(index)
            places.append(index)
        received = mine.new_empty(sum(recv_rows), mine.shape[1])
        transport.all_to_all(torch.cat(parts), send_rows, received, recv_rows).wait()
        return received, torch.cat(places)

    def _owned_by(self, pcp: int, tp: int) -> Tensor:
        """Attention indices, on a rank of ``pcp``, of the tokens that (pcp, tp) owns."""
        num_prefill = self._num_prefill[pcp]
        decode = torch.arange(self.num_decode)[pcp :: self.topology.pcp]
        owned = torch.cat([torch.arange(num_prefill), num_prefill + decode])
        if self.topology.tp == 1:
            return owned
        if not self.sequence_parallel:
            return owned if tp == 0 else owned[:0]
        share = -(-len(owned) // self.topology.tp)
        return owned[tp * share : (tp + 1) * share]

    def _arriving_from(self, rank: int) -> Tensor:
        """Attention indices, on this rank, of the rows that ``rank`` sends here."""
        _, pcp, tp = self.topology.coordinates(rank)
        owned = self._owned_by(pcp, tp)
        if pcp == self.coordinates.pcp:
            return owned
        decode = owned[owned >= self._num_prefill[pcp]] - self._num_prefill[pcp]
        return decode + self._num_prefill[self.coordinates.pcp]

    def _agree(self, out: Tensor, row_bytes: int, transport: Transport) -> None:
        problem = None
        if len(out) != self.num_owned:
            problem = Problem(
                ProblemKind.ROUTING,
                f"from_ep: results for {len(out)} tokens, but this rank owns {self.num_owned}",
            )
        batch = repr((self.prefill_lengths, self.num_decode, self.sequence_parallel))
        digest = digest_of(batch.encode())
        agreement = agree(
            transport,
            Record(
                operation=Operation.GATHER_ATTENTION,
                problem=problem,
                subject=row_bytes,
                values=(digest,),
            ),
        )
        digests = agreement.values[:, 0].reshape(self.topology.dp, -1)
        differ = np.flatnonzero((digests != digests[:, :1]).any(1))
        if len(differ):
            dp = int(differ[0])
            ranks = tuple(range(dp * digests.shape[1], (dp + 1) * digests.shape[1]))
            raise agreement.error(
                DisagreementError(
                    f"from_ep: ranks {ranks[0]} to {ranks[-1]} are DP replica {dp} but have "
                    "different prefill_lengths, num_decode or sequence_parallel",
                    ranks=ranks,
                )
            )


def _num_chunk_tokens(length: int, pcp: int, rank: int) -> int:
    base, extra = divmod(length, 2 * pcp)
    return 2 * base + (rank < extra) + (2 * pcp - 1 - rank < extra)


def _require_whole(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} = {value!r}: a whole number of {least} or more")
