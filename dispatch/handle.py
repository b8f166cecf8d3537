"""What combine needs to find the way back, and a later dispatch to take the same way again."""

from __future__ import annotations

from dataclasses import dataclass

from crossdock.dispatch.routing import Counts
from crossdock.dispatch.slots import SlotPlan

__all__ = ["Handle"]


@dataclass(kw_only=True, eq=False, slots=True)
class Handle:
    """The way of one step's rows. Opaque: give it to ``combine`` or ``dispatch(handle=)``.

    Attributes:
        dispatcher: Number of the dispatcher that made it.
        transport: The transport of that dispatcher, by identity.
        era: Unlock begins a new one, which makes older handles stale.
        step: Number of the exchange that agreed on it, equal on all ranks.
        num_tokens: T, tokens of this rank.
        routing: Which tokens left, and where to.
        plan: Places of the rows.
        pairs: [R] pairs that each rank received.
        slots: [R] the slot that holds the rows on each rank.
        slot: This rank's, while the step is in flight; None once combined.
        captured: Whether the step was recorded in a graph; the host does not know its counts then.
    """

    dispatcher: int
    transport: object
    era: int
    step: int
    num_tokens: int
    routing: Counts
    plan: SlotPlan
    pairs: list[int]
    slots: list[int]
    slot: int | None = None
    captured: bool = False

    def __repr__(self) -> str:
        state = "in flight" if self.slot is not None else "combined"
        return f"Handle(step={self.step}, num_tokens={self.num_tokens}, {state})"
