"""The steps of one dispatcher: what ranks say, agree on and refuse on the way there and back.

    dispatch   check -> route -> pack -> agree (counts, limits) -> grow or refuse -> move
    combine    check -> agree -> move back -> sum in ascending rank order

Whatever can fail on one rank alone happens before the agreement, so its failure is everybody's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from crossdock.dispatch.agreement import (
    Agreement,
    Operation,
    Problem,
    ProblemKind,
    Record,
    agree,
)
from crossdock.dispatch.buckets import Bucket, BucketMemory
from crossdock.dispatch.checks import (
    Attempt,
    check_hidden_states,
    check_out,
    check_results,
    check_tokens,
    find_handle_problem,
    find_shortage,
)
from crossdock.dispatch.config import DTYPES, DispatchConfig
from crossdock.dispatch.growth import Growth
from crossdock.dispatch.handle import Handle
from crossdock.dispatch.mover import Agreed, Departure, Load, Mover
from crossdock.dispatch.pending import Pending
from crossdock.dispatch.refusals import (
    refuse_what_does_not_fit,
    require_one_dtype,
    require_one_slot,
)
from crossdock.dispatch.routing import Counts
from crossdock.dispatch.slots import SlotPlan
from crossdock.dispatch.transports.base import Done, Work
from crossdock.scratch.errors import LockedError

__all__ = ["Slot", "Steps"]

T = TypeVar("T")


@dataclass
class Slot:
    """Buffers of one step in flight."""

    bucket: Bucket
    handle: Handle | None = None


class Steps:
    """Dispatches and combines of a dispatcher, over its slots. What agrees is collective.

    Args:
        config: The dispatcher's.
        mover: Likewise.
        slots: Likewise.
        number: Of the dispatcher, equal on all ranks.

    Attributes:
        slots: Emptied when the dispatcher ends.
        growth: Of the slots' memory.
    """

    def __init__(
        self, config: DispatchConfig, mover: Mover, slots: Sequence[Slot], number: int
    ) -> None:
        self._config = config
        self._transport = mover.transport
        self._mover = mover
        self._number = number
        self.slots = list(slots)
        self._buckets = [slot.bucket for slot in slots]
        self.growth = Growth(self._buckets, mover, self.agree)
        self._pending: list[Pending[Any]] = []  # staged, and nobody has waited
        self._era = 0
        self._locked = False
        self._pair_limit = -1

    # ---- the two halves of a layer -------------------------------------------------------------

    def depart(
        self,
        x: Tensor,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        handle: Handle | None,
        *,
        staged: bool,
    ) -> tuple[Work, BucketMemory, Handle]:
        """Send; the rows on their way (there already unless staged), their memory, the handle."""
        self.require_open()
        captured = self._mover.is_capturing()
        index = self._free_slot()
        departure = self._prepare(
            index, x, topk_idx, topk_weights, handle, captured=captured, staged=staged
        )
        if departure.work is not None:
            assert index is not None and departure.agreed and departure.routing
            handle = self._new_handle(departure.agreed, departure.routing, x.shape[0])
            return departure.work, self._fill(index, handle), handle
        agreement = None
        if captured:
            handle = self._capture(index, departure, handle)
        elif departure.agreed is None:
            agreement = self._agree_on_dispatch(index, departure, x, handle)
        assert index is not None and departure.routing is not None and departure.load is not None
        with self._transport.moving():
            if departure.agreed is not None:
                handle = self._new_handle(departure.agreed, departure.routing, x.shape[0])
            elif agreement is not None:
                handle = self._make_room(index, departure.routing, x, handle, agreement)
            assert handle is not None
            memory = self._fill(index, handle)
            work: Work = Done()
            # All ranks know the total, so a step that moves nothing needs no exchange of rows. But
            # kernels of other ranks may still read the results of this slot's step before.
            if handle.plan.total or self._mover.symmetric:
                work = self._mover.send(departure.load, handle, memory, staged=staged)
            if not staged:
                work.wait()
        return work, memory, handle

    def combine(
        self, y: Tensor, handle: Handle, out: Tensor | None, *, staged: bool
    ) -> Callable[[], Tensor]:
        """Bring results home; what waits for them and sums. See the dispatcher's."""
        self.require_open()
        captured = self._mover.is_capturing()
        problem = self._find_handle_problem(handle, "combine", captured=captured, in_flight=True)
        if problem is None and handle.slot is not None:
            memory = self.slots[handle.slot].bucket.memory
            problem = check_results(y, memory.capacity, self._config, self._transport.device)
        if problem is None and out is not None:
            in_place = self._mover.connects and handle.slot is not None
            results = memory.y() if in_place else None
            problem = check_out(
                out, handle.num_tokens, self._config, self._transport.device, results
            )
        load = None
        if problem is None and handle.slot is not None:
            with Attempt("memory for the results that come home") as attempt:
                load = self._mover.load_back(handle.slot, y, handle, memory)
                if out is None:
                    out = y.new_empty(handle.num_tokens, y.shape[1], dtype=self._config.dtype)
            problem = attempt.problem
        agreement = None
        if not captured:
            agreement = self.agree(
                Operation.COMBINE,
                problem,
                subject=handle.step if isinstance(handle, Handle) else 0,
                values=(DTYPES.index(y.dtype) if problem is None else 0,),
            )
        elif problem is not None:
            raise problem.error(self._transport.rank)
        with self._transport.moving():
            if agreement is not None:
                require_one_dtype(agreement)
            assert load is not None and out is not None
            return self._move_back(load, handle, out, staged=staged)

    def stage(self, finish: Callable[[], T], *, captured: bool) -> Pending[T]:
        """What the user of a staged call waits by; its other half runs in :meth:`finish_staged`.

        Args:
            finish: The call's other half.
            captured: The call is recorded in a graph: nothing is on its way.
        """

        def finish_if_open() -> T:
            self.require_open()
            result = finish()
            if not captured:
                self._pending.remove(pending)
            return result

        pending = Pending(finish_if_open)
        if not captured:
            self._pending.append(pending)
        return pending

    def finish_staged(self) -> None:
        """Wait for what is on its way and nobody has waited for."""
        while self._pending:
            self._pending[0].wait()

    # ---- locking and ending --------------------------------------------------------------------

    def lock(self, pair_capacity: int | None) -> None:
        """Nothing grows from now on; see the dispatcher's."""
        # Every slot gets the capacity of the largest, and its y, so that nothing is taken later.
        rows = max(slot.bucket.capacity for slot in self.slots)
        self.growth.grow(range(len(self.slots)), rows, with_y=True)
        self._locked = True
        self._pair_limit = -1 if pair_capacity is None else pair_capacity
        self._mover.pair_limit = self._pair_limit

    def unlock(self) -> None:
        """Memory grows again, and every handle is stale."""
        self._locked = False
        self._pair_limit = self._mover.pair_limit = -1
        self._era += 1
        for slot in self.slots:
            slot.handle = None

    def end(self, operation: Operation, problem: Problem | None) -> None:
        """Tell the others, if they have not heard and can be told; let go of all memory."""
        ledger = self._transport.ledger
        if ledger.broken is None and self._number not in ledger.ended:
            self.agree(operation, problem)
        self.slots.clear()
        self._buckets.clear()
        self._pending.clear()
        self._mover.release()

    # ---- parts of a dispatch -------------------------------------------------------------------

    def _prepare(
        self,
        index: int | None,
        x: Tensor,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        handle: Handle | None,
        *,
        captured: bool,
        staged: bool,
    ) -> Departure:
        """Check, route and pack: all that can fail on this rank alone."""
        config, device = self._config, self._transport.device
        if handle is None:
            problem = check_tokens(x, topk_idx, topk_weights, config, device)
        elif topk_idx is not None or topk_weights is not None:
            problem = Problem(
                ProblemKind.ROUTING, "dispatch: a handle, or ids and weights, not both"
            )
        else:
            problem = self._find_handle_problem(handle, "dispatch", captured=captured)
            problem = problem or check_hidden_states(x, config, device, handle.num_tokens)
        if problem is None and index is None:
            problem = Problem(
                ProblemKind.CAPACITY,
                f"no free slot: {len(self.slots)} dispatched step(s) wait for their combine; "
                "combine first, or construct the Dispatcher with a larger num_slots",
            )
        if problem is not None:
            return Departure(problem)
        assert index is not None
        try:
            if handle is not None:
                load = self._mover.load(index, x, handle.routing)
                return Departure(routing=handle.routing, load=load)
            assert topk_idx is not None and topk_weights is not None
            return self._mover.prepare(
                index, x, topk_idx, topk_weights, captured=captured, staged=staged
            )
        except Exception as error:
            problem = find_shortage("memory for the rows to send", error)
            if problem is None:
                raise
            return Departure(problem)

    def _fill(self, index: int, handle: Handle) -> BucketMemory:
        """A step takes its slot: where its rows lie."""
        slot = self.slots[index]
        handle.slot, slot.handle = index, handle
        return slot.bucket.memory

    def _agree_on_dispatch(
        self, index: int | None, departure: Departure, x: Tensor, handle: Handle | None
    ) -> Agreement:
        problem, routing = departure.problem, departure.routing
        capacity = self.slots[index].bucket.capacity if index is not None else 0
        return self.agree(
            Operation.DISPATCH if handle is None else Operation.REDISPATCH,
            problem,
            subject=handle.step if isinstance(handle, Handle) else 0,
            num_tokens=len(x) if problem is None else 0,
            values=(capacity, index or 0, self._mover.held(index) if index is not None else 0),
            row_limit=capacity if self._locked or self._config.bucket != "grow" else -1,
            rows=routing.rows if routing is not None else None,
            pairs=routing.pairs if routing is not None else None,
        )

    def _make_room(
        self,
        index: int,
        routing: Counts,
        x: Tensor,
        handle: Handle | None,
        agreement: Agreement,
    ) -> Handle:
        """Refuse what cannot be, grow what has to; the handle of the step."""
        slots = agreement.values[:, 1].tolist()
        if self._mover.symmetric:
            require_one_slot(slots)
        if handle is None or handle.slot is not None:
            agreed = Agreed(
                agreement.sequence,
                self._mover.plan(agreement.rows),
                agreement.pairs.sum(0).tolist(),
                slots,
            )
            handle = self._new_handle(agreed, routing, len(x))
        received, outbox = handle.plan.received, self._mover.outbox_rows(handle.plan)
        pairs = handle.plan.pairs_to_hold(handle.pairs)
        refuse_what_does_not_fit(agreement, received, pairs, outbox, config=self._config)
        self.growth.reserve(index, handle, agreement)
        capacities = agreement.values[:, 0].tolist()
        needs = list(map(max, received, outbox))
        if any(rows > held for rows, held in zip(needs, capacities, strict=True)):
            rows = max(needs) if self._mover.symmetric else needs[self._transport.rank]
            self.growth.grow([index], rows)
        handle.slots = slots
        return handle

    def _new_handle(
        self, agreed: Agreed, routing: Counts, num_tokens: int, *, captured: bool = False
    ) -> Handle:
        return Handle(
            dispatcher=self._number,
            transport=self._transport,
            era=self._era,
            step=agreed.sequence,
            num_tokens=num_tokens,
            routing=routing,
            plan=agreed.plan,
            pairs=agreed.pairs,
            slots=agreed.slots,
            captured=captured,
        )

    def _capture(self, index: int | None, departure: Departure, handle: Handle | None) -> Handle:
        """Record a dispatch in a graph: nothing is asked of the host, so nothing can grow."""
        problem, routing, load = departure.problem, departure.routing, departure.load
        if problem is not None:
            raise problem.error(self._transport.rank)
        if not self._locked and self._config.bucket == "grow":
            raise LockedError(
                "dispatch is captured into a graph before lock(): the graph would keep addresses "
                "that may move; warm up, lock, then capture"
            )
        assert index is not None and routing is not None and load is not None
        if handle is None or handle.slot is not None:
            ranks = self._transport.world_size
            agreed = Agreed(
                self._transport.ledger.sequence,
                SlotPlan(np.full((ranks, ranks), -1)),
                [-1] * ranks,
                [index] * ranks,
            )
            handle = self._new_handle(agreed, routing, len(load.rows), captured=True)
        return handle

    # ---- parts of a combine --------------------------------------------------------------------

    def _move_back(
        self, load: Load, handle: Handle, out: Tensor, *, staged: bool
    ) -> Callable[[], Tensor]:
        finish_sum = None
        if handle.plan.total:
            finish_sum = self._mover.send_back(load, handle, out, staged=staged)
        assert handle.slot is not None
        slot = self.slots[handle.slot]
        handle.slot = None  # used up from here on; the slot itself is free when results are home

        def finish() -> Tensor:
            if finish_sum is not None:
                with self._transport.moving():
                    finish_sum()
            else:
                out.zero_()
            if slot.handle is handle:  # and not that of a later step
                slot.handle = None
            return out

        return finish

    # ---- small parts ---------------------------------------------------------------------------

    def agree(
        self,
        operation: Operation,
        problem: Problem | None = None,
        *,
        subject: int = 0,
        num_tokens: int = 0,
        values: tuple[int, ...] = (),
        rows: list[int] | None = None,
        pairs: list[int] | None = None,
        row_limit: int = -1,
    ) -> Agreement:
        """Exchange a record of this dispatcher; see ``Record``."""
        return agree(
            self._transport,
            Record(
                operation=operation,
                dispatcher=self._number,
                problem=problem,
                subject=subject,
                row_limit=row_limit,
                pair_limit=self._pair_limit,
                num_tokens=num_tokens,
                values=values,
                rows=rows,
                pairs=pairs,
            ),
        )

    def require_open(self) -> None:
        """Raise what broke the transport, or ended this dispatcher on some rank."""
        self._transport.require_working()
        ended = self._transport.ledger.ended.get(self._number)
        if ended is not None:
            raise ended.with_traceback(None)

    def _free_slot(self) -> int | None:
        for index, slot in enumerate(self.slots):
            if slot.handle is None:
                return index
        return None

    def _find_handle_problem(
        self, handle: Handle, call: str, *, captured: bool, in_flight: bool = False
    ) -> Problem | None:
        problem = find_handle_problem(
            handle,
            call,
            dispatcher=self._number,
            transport=self._transport,
            era=self._era,
            captured=captured,
        )
        if problem is None and in_flight and handle.slot is None:
            text = f"{call}: the handle of step {handle.step} is used up: one combine a dispatch"
            problem = Problem(ProblemKind.HANDLE, text)
        return problem
