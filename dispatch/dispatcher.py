"""What a user calls: dispatch and combine, at once or staged, and the life of their memory."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Self

from torch import Tensor

from crossdock.dispatch.agreement import (
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
from crossdock.dispatch.buckets import Bucket
from crossdock.dispatch.checks import Attempt, find_misfit
from crossdock.dispatch.choose_mover import mover_for
from crossdock.dispatch.config import DispatchConfig
from crossdock.dispatch.handle import Handle
from crossdock.dispatch.pending import Pending
from crossdock.dispatch.placement import ExpertPlacement
from crossdock.dispatch.rows import ReceivedRows
from crossdock.dispatch.settings import compare_settings, settings_of
from crossdock.dispatch.steps import Slot, Steps
from crossdock.dispatch.topology import Topology
from crossdock.dispatch.transports.base import Transport, in_words
from crossdock.dispatch.wire import WireFormat
from crossdock.scratch.errors import RankTimeout

__all__ = ["Dispatcher"]

logger = logging.getLogger(__name__)

_ALGORITHMS: dict[str, type[Algorithm]] = {"alltoall": AllToAll, "allgather": AllGather}


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
        slots: list[Slot] = []
        if problem is None:
            fixed = None if config.bucket == "grow" else config.bucket
            with Attempt(f"{num_slots} receive bucket(s) of {fixed} rows") as attempt:
                algorithm = _ALGORITHMS[config.algorithm](transport, self.placement)
                self._mover = mover_for(algorithm, self.wire, num_slots, config)
                slots = [Slot(Bucket(self._mover.allocate, fixed)) for _ in range(num_slots)]
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
        number = transport.ledger.num_dispatchers
        transport.ledger.num_dispatchers += 1
        self._steps = Steps(config, self._mover, slots, number)
        if config.bucket != "grow" or self._mover.symmetric:
            self._steps.growth.connect(range(num_slots))

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
        _, memory, handle = self._steps.depart(x, topk_idx, topk_weights, handle, staged=False)
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
        return self._steps.combine(y, handle, out, staged=False)()

    def dispatch_send(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        handle: Handle | None = None,
    ) -> Pending[tuple[ReceivedRows, Handle]]:
        """Begin a dispatch: everything but waiting for the rows. See :meth:`dispatch`."""
        work, memory, agreed = self._steps.depart(x, topk_idx, topk_weights, handle, staged=True)

        def finish() -> tuple[ReceivedRows, Handle]:
            with self.transport.moving():
                work.wait()
            return self._mover.receive(memory, agreed, debug=self.config.debug), agreed

        return self._steps.stage(finish, captured=agreed.captured)

    def combine_send(
        self, y: Tensor, handle: Handle, *, out: Tensor | None = None
    ) -> Pending[Tensor]:
        """Begin a combine: everything but waiting and summing. See :meth:`combine`."""
        finish = self._steps.combine(y, handle, out, staged=True)
        return self._steps.stage(finish, captured=handle.captured)

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
        self._steps.require_open()
        problem = None
        in_flight = [s.handle.step for s in self._steps.slots if s.handle is not None]
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
        self._steps.agree(Operation.LOCK, problem)
        self._steps.lock(pair_capacity)

    def unlock(self) -> None:
        """Allow growth again. Collective; makes every handle stale, and ends staged calls first."""
        self._steps.require_open()
        self._steps.finish_staged()
        self._steps.agree(Operation.UNLOCK)
        self._steps.unlock()

    def check(self) -> None:
        """Wait for what was replayed, and raise on all ranks what a graph could not. Collective.

        Eager steps raise at once, so without graphs it only finds ranks that are gone or elsewhere.

        Raises:
            RoutingError: A replayed step had bad ids or weights on some rank.
            CapacityError: A replayed step did not fit in what some rank locked.
            DisagreementError, PeerFailed, PeerClosed, RankTimeout: See the errors themselves.
        """
        self._steps.require_open()
        self._steps.agree(Operation.CHECK, self._mover.find_refusal())

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
            self._steps.end(Operation.ABORT, Problem(ProblemKind.FAILED, text))
        except RankTimeout:
            logger.warning("could not tell all ranks of %s", text, exc_info=True)

    def close(self) -> None:
        """End this dispatcher. Collective; a peer that still calls gets ``PeerClosed``.

        Does not wait where the transport is broken, and may be called again.
        """
        self._steps.end(Operation.CLOSE, None)

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
