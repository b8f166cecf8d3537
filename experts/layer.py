"""A mixture-of-experts layer across ranks: dispatch, experts, combine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from crossdock.dispatch.rows import ReceivedRows
from crossdock.scratch import WorkspaceManager

if TYPE_CHECKING:
    from crossdock.dispatch.dispatcher import Dispatcher

__all__ = ["Experts", "MoELayer"]


class Experts(Protocol):
    """What the layer asks of the experts; every worker of this package has it."""

    @property
    def workspace(self) -> WorkspaceManager:
        """What ``lock()`` locks."""

    def __call__(self, rows: ReceivedRows) -> Tensor:
        """Fills and returns ``rows.y``, or returns another [C, H] (combine then copies it)."""

    def pair_capacity(self) -> int:
        """Pairs that fit without growing; -1 while they may grow."""


class MoELayer:
    """``layer(x, topk_idx, topk_weights) -> out``; every rank of the EP group calls it.

    Args:
        dispatcher: Moves the rows.
        experts: Compute them, such as ``make_experts(...)``.
    """

    def __init__(self, dispatcher: Dispatcher, experts: Experts) -> None:
        self.dispatcher = dispatcher
        self.experts = experts

    def __call__(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        """[T, H] for x [T, H], topk_idx [T, K] and fp32 topk_weights [T, K].

        A failure of the experts on one rank is told to the others (``dispatcher.abort``), so that
        they raise ``PeerFailed`` instead of waiting.
        """
        rows, handle = self.dispatcher.dispatch(x, topk_idx, topk_weights)
        try:
            y = self.experts(rows)
        except BaseException as exc:
            self.dispatcher.abort(exc)
            raise
        out: Tensor = self.dispatcher.combine(y, handle)
        return out

    def lock(self) -> None:
        """Ends warm-up: from now on nothing grows. Collective."""
        self.experts.workspace.lock()
        try:
            self.dispatcher.lock(pair_capacity=self.experts.pair_capacity())
        except BaseException:
            self.experts.workspace.unlock()
            raise

    def unlock(self) -> None:
        """Allows growth again. Collective."""
        self.dispatcher.unlock()
        self.experts.workspace.unlock()
