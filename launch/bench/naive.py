"""The naive way to the experts: a copy of a token for each expert, three exchanges of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from crossdock.dispatch.placement import ExpertPlacement
from crossdock.dispatch.transports.base import Transport

__all__ = ["NaiveDispatch"]


class NaiveDispatch:
    """What a first implementation does, on the same transport.

    Counts by one exchange; then hidden states, expert ids and weights of every (token, expert) pair
    travel by three all-to-alls, each into memory of its own.
    """

    def __init__(self, transport: Transport, placement: ExpertPlacement) -> None:
        self._transport = transport
        self._owner = placement.owner.to(transport.device)

    def __call__(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> list[Tensor]:
        """Hidden [n, H], ids [n, 1] and weights [n, 1] of the pairs of this rank's experts."""
        transport = self._transport
        experts = topk_idx.flatten()
        order = self._owner[experts].argsort(stable=True)
        tokens = order.div(topk_idx.shape[1], rounding_mode="floor")
        send_counts = torch.bincount(self._owner[experts], minlength=transport.world_size)
        counts = transport.exchange(send_counts.cpu())
        send_rows = counts[transport.rank].tolist()
        recv_rows = counts[:, transport.rank].tolist()
        received = []
        for rows in (x[tokens], experts[order, None], topk_weights.flatten()[order, None]):
            arrived = rows.new_empty(sum(recv_rows), rows.shape[1])
            transport.all_to_all(
                rows.view(torch.uint8), send_rows, arrived.view(torch.uint8), recv_rows
            ).wait()
            received.append(arrived)
        return received
