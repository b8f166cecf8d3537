"""What an algorithm decides: which rows leave, how they move, and which ids they carry."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from crossdock.dispatch.placement import ExpertPlacement
from crossdock.dispatch.routing import Routing
from crossdock.dispatch.slots import SlotPlan
from crossdock.dispatch.transports.base import Transport, Work

__all__ = ["Algorithm", "ordered_sum"]

_TOKENS_IN_CACHE = 128


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


def ordered_sum(home: Tensor, tokens: Tensor, rows: list[int], out: Tensor) -> None:
    """Sum the partial results of each token in fp32, in ascending rank order, rounded once.

    Args:
        home: [S, H] partial results by ascending (expert rank, token).
        tokens: int64 [S], token of each; a token stands at most once for each rank.
        rows: [R] rows from each rank.
        out: [T, H], overwritten; exactly 0 for a token with no rows.
    """
    # On the CPU a block of tokens is summed over all ranks while it lies in the cache.
    block = _TOKENS_IN_CACHE if out.device.type == "cpu" else max(len(out), 1)
    parts = [
        (part, index, _cuts(index, len(out), block))
        for part, index in zip(torch.split(home, rows), torch.split(tokens, rows), strict=True)
    ]
    for i, begin in enumerate(range(0, len(out), block)):
        target = out[begin : begin + block]
        total = torch.zeros(target.shape, dtype=torch.float32, device=out.device)
        for part, index, cuts in parts:
            here = slice(cuts[i], cuts[i + 1])
            total.index_add_(0, index[here] - begin, part[here].float())
        target.copy_(total)


def _cuts(index: Tensor, num_tokens: int, block: int) -> list[int]:
    """Where each block of tokens begins in an ascending index, and where the last one ends."""
    if num_tokens <= block:
        return [0, len(index)]
    edges = torch.arange(0, num_tokens + block, block, device=index.device)
    cuts: list[int] = torch.searchsorted(index, edges).tolist()
    return cuts


def _as_bytes(rows: Tensor) -> Tensor:
    return rows.view(torch.uint8)
