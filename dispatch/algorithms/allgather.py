"""Every token to every rank; results by an ordered reduce-scatter. For small EP groups."""

from __future__ import annotations

import torch
from torch import Tensor

from crossdock.dispatch.algorithms.base import Algorithm
from crossdock.dispatch.placement import ExpertPlacement
from crossdock.dispatch.routing import RouteTable, Routing
from crossdock.dispatch.slots import SlotPlan
from crossdock.dispatch.transports.base import Transport, Work

__all__ = ["AllGather"]


class AllGather(Algorithm):
    """Global ids travel; each receiver keeps its own and drops the weights of the rest."""

    def __init__(self, transport: Transport, placement: ExpertPlacement) -> None:
        super().__init__(transport, placement)
        self._table = RouteTable(placement, transport.device)
        local = torch.cat([placement.expert_map(transport.rank), torch.tensor([-1])])
        self._local_id = local.to(transport.device, torch.int64)  # index -1 reads the last: -1

    def route(self, topk_idx: Tensor, topk_weights: Tensor) -> Routing:
        """Every token, with its global ids; results come home from every rank."""
        num_tokens, ranks = len(topk_idx), self.transport.world_size
        tokens = torch.arange(num_tokens, device=topk_idx.device)
        return Routing(
            packed=tokens,
            ids=topk_idx.to(torch.int32),
            weights=topk_weights,
            tokens=tokens.repeat(ranks),
            rows=[num_tokens] * ranks,
            pairs=self._table.count_pairs(topk_idx),
        )

    def send(self, packed: Tensor, plan: SlotPlan, recv: Tensor) -> Work:
        """Gather everybody's uneven tokens."""
        return self.transport.all_gather(packed, recv, plan.recv_rows(self.transport.rank))

    def localize(self, ids: Tensor, weights: Tensor) -> None:
        """Global ids become local ones; the weight of an expert elsewhere becomes 0."""
        ids.copy_(self._local_id[ids])
        weights.masked_fill_(ids < 0, 0.0)
