"""What an algorithm decides: which rows leave, how they move, and which ids they carry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from crossdock.dispatch.blocks import token_blocks
from crossdock.dispatch.placement import ExpertPlacement
from crossdock.dispatch.routing import Routing
from crossdock.dispatch.slots import SlotPlan
from crossdock.dispatch.transports.base import Transport, Work

__all__ = ["Algorithm", "ordered_sum"]


class Algorithm(ABC):
    """One way to bring tokens to experts. The way home is the same for all.

    Args:
        transport: Moves the rows.
        placement: Who owns which expert.
    """

    def __init__(self, transport: Transport, placement: ExpertPlacement) -> None:
        self.transport = transport
        self.placement = placement

    @abstractmethod
    def route(self, topk_idx: Tensor, topk_weights: Tensor) -> Routing:
        """Rows that leave this rank, for valid int64 [T, K] ids and fp32 [T, K] weights."""

    @abstractmethod
    def send(self, packed: Tensor, plan: SlotPlan, recv: Tensor) -> Work:
        """Move packed rows uint8 [n, row_bytes] into ``recv`` [rows received, row_bytes]."""

    @abstractmethod
    def localize(self, ids: Tensor, weights: Tensor) -> None:
        """Turn received ids int64 [n, K] and weights [n, K] into this rank's own, in place."""

    def send_back(self, y: Tensor, plan: SlotPlan, home: Tensor) -> Work:
        """Move results the way that their rows came.

        Args:
            y: [rows received, H], contiguous.
            plan: Of the dispatch.
            home: [rows sent, H] in y's dtype, written by ascending (expert rank, token).
        """
        rank = self.transport.rank
        return self.transport.all_to_all(
            _as_bytes(y), plan.recv_rows(rank), _as_bytes(home), plan.send_rows(rank)
        )


def ordered_sum(parts: Sequence[Tensor], tokens: Sequence[Tensor], out: Tensor) -> None:
    """Sum the partial results of each token in fp32, in the order of the parts, rounded once.

    On the CPU a block of tokens at a time, so that sums stay in the cache: several times faster,
    and the same bits.

    Args:
        parts: [n_r, H] partial results of each rank, by ascending token.
        tokens: int64 [n_r], token of each; ascending, and at most once in a part.
        out: [T, H], overwritten; exactly 0 for a token with no rows.
    """
    num_tokens, hidden = out.shape
    total = None
    for start, end, cuts in token_blocks(num_tokens, 4 * hidden, tokens, out.device):
        if total is None:  # the first block is the largest
            total = out.new_empty(end - start, hidden, dtype=torch.float32)
        sums = total[: end - start].zero_()
        for part, index, cut in zip(parts, tokens, cuts, strict=True):
            if cut.start < cut.stop:
                sums.index_add_(0, index[cut] - start, part[cut].float())
        out[start:end].copy_(sums)


def _as_bytes(rows: Tensor) -> Tensor:
    return rows.view(torch.uint8)
