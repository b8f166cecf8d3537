"""Each token to the ranks that own one of its experts, once per rank."""

from __future__ import annotations

from torch import Tensor

from crossdock.dispatch.algorithms.base import Algorithm
from crossdock.dispatch.placement import ExpertPlacement
from crossdock.dispatch.routing import RouteTable, Routing
from crossdock.dispatch.slots import SlotPlan
from crossdock.dispatch.transports.base import Transport, Work

__all__ = ["AllToAll"]


class AllToAll(Algorithm):
    """Senders put local ids on the wire, so receivers have nothing to translate."""

    def __init__(self, transport: Transport, placement: ExpertPlacement) -> None:
        super().__init__(transport, placement)
        self._table = RouteTable(placement, transport.device)

    def route(self, topk_idx: Tensor, topk_weights: Tensor) -> Routing:
        """One row for each rank that owns an expert of the token."""
        return self._table.route(topk_idx, topk_weights)

    def send(self, packed: Tensor, plan: SlotPlan, recv: Tensor) -> Work:
        """Rows are packed by destination already."""
        rank = self.transport.rank
        return self.transport.all_to_all(packed, plan.send_rows(rank), recv, plan.recv_rows(rank))

    def localize(self, ids: Tensor, weights: Tensor) -> None:
        """Nothing to do."""
