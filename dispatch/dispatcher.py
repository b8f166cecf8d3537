"""Dispatch and combine: check, route, agree, grow, move.

    dispatch   check -> route -> pack -> agree (counts, limits) -> grow or refuse -> move -> unpack
    combine    check -> agree -> move back -> sum in ascending rank order

Whatever can fail on one rank alone happens before the agreement, so its failure is everybody's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
from torch import Tensor

from crossdock.dispatch.agreement import (
    Agreement,
    Operation,
    Problem,
    ProblemKind,
    Record,
    agree,
    mark_agreed,
)
from crossdock.dispatch.algorithms.allgather import AllGather
from crossdock.dispatch.algorithms.alltoall import AllToAll
from crossdock.dispatch.algorithms.base import Algorithm
from crossdock.dispatch.buckets import Bucket, BucketMemory
from crossdock.dispatch.checks import (
    Attempt,
    check_hidden_states,
    check_out,
    check_results,
    check_tokens,
    find_handle_problem,
    find_misfit,
    find_shortage,
)
from crossdock.dispatch.choose_mover import mover_for
from crossdock.dispatch.config import DTYPES, DispatchConfig
from crossdock.dispatch.growth import Growth
from crossdock.dispatch.handle import Handle
from crossdock.dispatch.mover import Agreed, Departure, Load
from crossdock.dispatch.pending import Pending
from crossdock.dispatch.placement import ExpertPlacement
from crossdock.dispatch.refusals import (
    refuse_what_does_not_fit,
    require_one_dtype,
    require_one_slot,
)
from crossdock.dispatch.routing import Counts
from crossdock.dispatch.rows import ReceivedRows
from crossdock.dispatch.settings import compare_settings, settings_of
from crossdock.dispatch.slots import SlotPlan
from crossdock.dispatch.topology import Topology
from crossdock.dispatch.transports.base import Done, Transport, Work, in_words
from crossdock.dispatch.wire import WireFormat
from crossdock.scratch.errors import LockedError, RankTimeout

__all__ = ["Dispatcher"]

logger = logging.getLogger(__name__)

_ALGORITHMS: dict[str, type[Algorithm]] = {"alltoall": AllToAll, "allgather": AllGather}


@dataclass
class _Slot:
    """Buffers of one step in flight."""

    bucket: Bucket
    handle: Handle | None = None


class Dispatcher:
    """Sends tokens to the ranks that own their experts, and brings results home. Collective.

    Args:
        config: Settings; the same on all ranks.
        transport: Of the EP group. Several dispatchers may share one.
        topology: The rank grid; by default one node of data parallel ranks.
        placement: Who owns which expert; linear by default.
        num_slots: Steps that may be in flight (dispatched and not yet combined).

    Raises:
        DisagreementError: Ranks differ in a setting; names it, the ranks and their values.
        ConfigError: Settings that do not fit together on some rank.
    """

    def __init__(
        self,
        config: DispatchConfig,
        transport: Transport,
        *,
        topology: Topology | None = None,
        placement: ExpertPlacement | None = None,
        num_slots: int = 1,
    ) -> None:
        ranks = transport.world_size
        self.config = config
        self.transport = transport
        self.topology = topology or Topology(ranks_per_node=ranks, dp=ranks)
        self.placement = placement or ExpertPlacement.linear(config.num_experts, ranks)
        self.num_local_experts = self.placement.num_local_experts(transport.rank)
        self.wire = WireFormat(
            hidden=config.hidden,
            top_k=config.top_k,
            dtype=config.dtype,
            fp8=config.wire == "fp8",
        )
        transport.require_working()
        transport.set_timeout(config.timeout_s)
        problem = find_misfit(config, self.topology, self.placement, transport, num_slots)
        self._slots: list[_Slot] = []
        self._staged: dict[str, None] = {}  # calls that nobody has waited for, in order
        if problem is None:
            fixed = None if config.bucket == "grow" else config.bucket
            with Attempt(f"{num_slots} receive bucket(s) of {fixed} rows") as attempt:
                self._algorithm = _ALGORITHMS[config.algorithm](transport, self.placement)
                self._mover = mover_for(self._algorithm, self.wire, num_slots, config)
                self._slots = [_Slot(Bucket(self._mover.allocate, fixed)) for _ in range(num_slots)]
            problem = attempt.problem
        agreement = agree(
            transport,
            Record(
                operation=Operation.CONSTRUCT,
                problem=problem,
                values=(
                    settings_of(config, self.topology, self.placement, num_slots)
                    if problem is None
                    else ()
                ),
            ),
        )
        different = compare_settings(agreement.values)
        if different is not None:
            raise mark_agreed(different)
        self._id = transport.ledger.num_dispatchers
        transport.ledger.num_dispatchers += 1
        self._era = 0
        self._locked = False
        self._pair_limit = -1
        buckets = [slot.bucket for slot in self._slots]
        self._growth = Growth(buckets, self._mover, self.wire, self._agree)
        if config.bucket != "grow" or self._mover.symmetric:
            self._growth.connect(range(num_slots))

    # ---- the two halves of a layer -------------------------------------------------------------

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        handle: Handle | None = None,
    ) -> tuple[ReceivedRows, Handle]:
        """Send tokens to the owners of their experts. Collective.

        Args:
            x: [T, H] hidden states in the config's dtype. T may differ from rank to rank and from
                step to step, and may be 0.
            topk_idx: int32 or int64 [T, K] global expert ids, -1 for none; distinct in a token.
            topk_weights: fp32 [T, K]; ignored where the id is -1.
            handle: Instead of ids and weights: take the same way as an earlier step of this
                dispatcher, for another ``x``. Nothing is counted again.

        Returns:
            The rows that this rank received, and the handle for their way back.

        Raises:
            RoutingError: Bad tensors, ids or weights on some rank.
            HandleError: A stale or foreign handle on some rank.
            LockedError: The step does not fit in what some rank locked; nothing has moved.
            CapacityError: No free slot, or memory that some rank could not take.
            NotImplementedError: An input requires grad.
            DisagreementError, PeerFailed, PeerClosed, RankTimeout: See the errors themselves.
        """
        _, memory, handle = self._depart(x, topk_idx, topk_weights, handle, staged=False)
        return self._mover.receive(memory, handle, debug=self.config.debug), handle

    def combine(self, y: Tensor, handle: Handle, *, out: Tensor | None = None) -> Tensor:
        """Bring results home and sum each token's, in fp32 and ascending rank order. Collective.

        Args:
            y: [C, H] one result a received row; ``rows.y`` is sent without a copy. bf16, fp16 or
                fp32, the same on all ranks.
            handle: Of the dispatch. Its slot is free when this returns.
            out: [T, H] to write to, outside of ``rows``; a fresh tensor otherwise.

        Returns:
            [T, H] in the config's dtype; 0 for a token without experts (with ``allgather``: where
            the caller wrote 0 for rows without a local expert, as our experts do).

        Raises:
            RoutingError: ``y`` or ``out`` of wrong shape, dtype or device on some rank.
            HandleError: A handle that is stale, used up, or another dispatcher's.
            DisagreementError, PeerFailed, PeerClosed, RankTimeout: See the errors themselves.
        """
        return self._combine(y, handle, out, staged=False).wait()

    def dispatch_send(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        handle: Handle | None = None,
    ) -> Pending[tuple[ReceivedRows, Handle]]:
        """Begin a dispatch: everything but waiting for the rows. See :meth:`dispatch`."""
        work, memory, agreed = self._depart(x, topk_idx, topk_weights, handle, staged=True)
        call = f"dispatch_send of step {agreed.step}"
        self._staged[call] = None

        def finish() -> tuple[ReceivedRows, Handle]:
            with self.transport.moving():
                work.wait()
            self._staged.pop(call, None)
            return self._mover.receive(memory, agreed, debug=self.config.debug), agreed

        return Pending(finish)

    def combine_send(
        self, y: Tensor, handle: Handle, *, out: Tensor | None = None
    ) -> Pending[Tensor]:
        """Begin a combine: everything but waiting and summing. See :meth:`combine`."""
        pending = self._combine(y, handle, out, staged=True)
        call = f"combine_send of step {handle.step}"
        self._staged[call] = None

        def finish() -> Tensor:
            result = pending.wait()
            self._staged.pop(call, None)
            return result

        return Pending(finish)

    def _depart(
        self,
        x: Tensor,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        handle: Handle | None,
        *,
        staged: bool,
    ) -> tuple[Work, BucketMemory, Handle]:
        """Send; the rows on their way (there already unless staged), their memory, the handle."""
        self._require_open()
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
        with self.transport.moving():
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

    def _fill(self, index: int, handle: Handle) -> BucketMemory:
        """A step takes its slot: where its rows lie."""
        slot = self._slots[index]
        handle.slot, slot.handle = index, handle
        return slot.bucket.memory

    def _agree_on_dispatch(
        self, index: int | None, departure: Departure, x: Tensor, handle: Handle | None
    ) -> Agreement:
        problem, routing = departure.problem, departure.routing
        capacity = self._slots[index].bucket.capacity if index is not None else 0
        return self._agree(
            Operation.DISPATCH if handle is None else Operation.REDISPATCH,
            problem,
            subject=handle.step if isinstance(handle, Handle) else 0,
            num_tokens=len(x) if problem is None else 0,
            values=(capacity, index or 0, self._mover.held(index) if index is not None else 0),
            row_limit=capacity if self._locked or self.config.bucket != "grow" else -1,
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
                self._mover.plan(agreement.rows.numpy()),
                agreement.pairs.sum(0).tolist(),
                slots,
            )
            handle = self._new_handle(agreed, routing, len(x))
        received, outbox = handle.plan.received, self._mover.outbox_rows(handle.plan)
        pairs = handle.plan.pairs_to_hold(handle.pairs)
        refuse_what_does_not_fit(agreement, received, pairs, outbox, config=self.config)
        self._growth.reserve(index, handle, agreement)
        capacities = agreement.values[:, 0].tolist()
        needs = list(map(max, received, outbox))
        if any(rows > held for rows, held in zip(needs, capacities, strict=True)):
            rows = max(needs) if self._mover.symmetric else needs[self.transport.rank]
            self._growth.grow([index], rows)
        handle.slots = slots
        return handle

    def _combine(
        self, y: Tensor, handle: Handle, out: Tensor | None, *, staged: bool
    ) -> Pending[Tensor]:
        self._require_open()
        captured = self._mover.is_capturing()
        problem = self._find_handle_problem(handle, "combine", captured=captured, in_flight=True)
        if problem is None and handle.slot is not None:
            memory = self._slots[handle.slot].bucket.memory
            problem = check_results(y, memory.capacity, self.config, self.transport.device)
        if problem is None and out is not None:
            in_place = self._mover.connects and handle.slot is not None
            results = memory.y() if in_place else None
            problem = check_out(out, handle.num_tokens, self.config, self.transport.device, results)
        load = None
        if problem is None and handle.slot is not None:
            with Attempt("memory for the results that come home") as attempt:
                load = self._mover.load_back(handle.slot, y, handle, memory)
                if out is None:
                    out = y.new_empty(handle.num_tokens, y.shape[1], dtype=self.config.dtype)
            problem = attempt.problem
        agreement = None
        if not captured:
            agreement = self._agree(
                Operation.COMBINE,
                problem,
                subject=handle.step if isinstance(handle, Handle) else 0,
                values=(DTYPES.index(y.dtype) if problem is None else 0,),
            )
        elif problem is not None:
            raise problem.error(self.transport.rank)
        with self.transport.moving():
            if agreement is not None:
                require_one_dtype(agreement)
            assert load is not None and out is not None
            return Pending(self._move_back(load, handle, out, staged=staged))

    # ---- locking and ending --------------------------------------------------------------------

    def lock(self, pair_capacity: int | None = None) -> None:
        """End of warm-up: from now on no bucket grows. Collective.

        Args:
            pair_capacity: (row, local expert) pairs that this rank's experts hold, from
                ``experts.pair_capacity()``; None where they do not limit a step.

        Raises:
            HandleError: A step is in flight.
            ConfigError: ``pair_capacity`` is no whole number of 0 or more.
            CapacityError: Some rank could not take the memory of all its slots.
        """
        self._require_open()
        problem = None
        in_flight = [s.handle.step for s in self._slots if s.handle is not None]
        if in_flight:
            problem = Problem(
                ProblemKind.HANDLE, f"lock: step {in_flight[0]} is in flight; combine it first"
            )
        elif pair_capacity is not None and (
            type(pair_capacity) is not int or not 0 <= pair_capacity < 2**63
        ):
            problem = Problem(
                ProblemKind.CONFIG,
                f"lock(pair_capacity={pair_capacity!r}): the pairs that this rank's experts hold, "
                "0 or more, or None (lock the experts' workspace first)",
            )
        self._agree(Operation.LOCK, problem)
        # Every slot gets the capacity of the largest, and its y, so that nothing is taken later.
        self._growth.grow(
            range(len(self._slots)), max(s.bucket.capacity for s in self._slots), with_y=True
        )
        self._locked = True
        self._pair_limit = -1 if pair_capacity is None else pair_capacity
        self._mover.pair_limit = self._pair_limit

    def unlock(self) -> None:
        """Allow growth again. Collective; makes every handle stale.

        Raises:
            HandleError: A staged call has not been waited for on some rank.
        """
        self._require_open()
        problem = None
        for call in self._staged:
            text = f"unlock: {call} is on its way; wait() for it first"
            problem = Problem(ProblemKind.HANDLE, text)
            break
        self._agree(Operation.UNLOCK, problem)
        self._locked = False
        self._pair_limit = self._mover.pair_limit = -1
        self._era += 1
        for slot in self._slots:
            slot.handle = None

    def check(self) -> None:
        """Wait for what was replayed, and raise on all ranks what a graph could not. Collective.

        Eager steps raise at once, so without graphs it only finds ranks that are gone or elsewhere.

        Raises:
            RoutingError: A replayed step had bad ids or weights on some rank.
            CapacityError: A replayed step did not fit in what some rank locked.
            DisagreementError, PeerFailed, PeerClosed, RankTimeout: See the errors themselves.
        """
        self._require_open()
        self._agree(Operation.CHECK, self._mover.find_refusal())

    def release_captured(self) -> None:
        """Let go of outgrown memory that graphs hold; they must not be replayed again."""
        self._mover.release_captured()

    def abort(self, error: BaseException) -> None:
        """Tell the others that this rank failed between two calls; their next call raises.

        Called by the ``with`` block when an exception leaves it. Does nothing where the others know
        already, or where the transport is broken.

        Args:
            error: What happened; its type and text are what peers see.
        """
        text = in_words(error)
        try:
            self._end(Operation.ABORT, Problem(ProblemKind.FAILED, text))
        except RankTimeout:
            logger.warning("could not tell all ranks of %s", text, exc_info=True)

    def close(self) -> None:
        """End this dispatcher. Collective; a peer that still calls gets ``PeerClosed``.

        Does not wait where the transport is broken, and may be called again.
        """
        self._end(Operation.CLOSE, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort(error)

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
        config, device = self.config, self.transport.device
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
                f"no free slot: {len(self._slots)} dispatched step(s) wait for their combine; "
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

    def _new_handle(
        self, agreed: Agreed, routing: Counts, num_tokens: int, *, captured: bool = False
    ) -> Handle:
        return Handle(
            dispatcher=self._id,
            transport=self.transport,
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
            raise problem.error(self.transport.rank)
        if not self._locked and self.config.bucket == "grow":
            raise LockedError(
                "dispatch is captured into a graph before lock(): the graph would keep addresses "
                "that may move; warm up, lock, then capture"
            )
        assert index is not None and routing is not None and load is not None
        if handle is None or handle.slot is not None:
            ranks = self.transport.world_size
            agreed = Agreed(
                self.transport.ledger.sequence,
                SlotPlan(np.full((ranks, ranks), -1)),
                [-1] * ranks,
                [index] * ranks,
            )
            handle = self._new_handle(agreed, routing, len(load.rows), captured=True)
        return handle

    def _move_back(
        self, load: Load, handle: Handle, out: Tensor, *, staged: bool
    ) -> Callable[[], Tensor]:
        finish_sum = None
        if handle.plan.total:
            finish_sum = self._mover.send_back(load, handle, out, staged=staged)
        assert handle.slot is not None
        slot = self._slots[handle.slot]
        handle.slot = None  # used up from here on; the slot itself is free when results are home

        def finish() -> Tensor:
            if finish_sum is not None:
                with self.transport.moving():
                    finish_sum()
            else:
                out.zero_()
            if slot.handle is handle:  # and not a later step's, after unlock()
                slot.handle = None
            return out

        return finish

    # ---- small parts ---------------------------------------------------------------------------

    def _agree(
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
        return agree(
            self.transport,
            Record(
                operation=operation,
                dispatcher=self._id,
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

    def _free_slot(self) -> int | None:
        for index, slot in enumerate(self._slots):
            if slot.handle is None:
                return index
        return None

    def _find_handle_problem(
        self, handle: Handle, call: str, *, captured: bool, in_flight: bool = False
    ) -> Problem | None:
        problem = find_handle_problem(
            handle,
            call,
            dispatcher=self._id,
            transport=self.transport,
            era=self._era,
            captured=captured,
        )
        if problem is None and in_flight and handle.slot is None:
            text = f"{call}: the handle of step {handle.step} is used up: one combine a dispatch"
            problem = Problem(ProblemKind.HANDLE, text)
        return problem

    def _require_open(self) -> None:
        self.transport.require_working()
        ended = self.transport.ledger.ended.get(self._id)
        if ended is not None:
            raise ended.with_traceback(None)

    def _end(self, operation: Operation, problem: Problem | None) -> None:
        ledger = self.transport.ledger
        if ledger.broken is None and self._id not in ledger.ended:
            self._agree(operation, problem)
        self._slots = []
        self._mover.release()
