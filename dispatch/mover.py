"""How one dispatcher's rows get to their ranks, and results home, over one kind of transport.

Each half has two parts: ``load`` is all that can fail on this rank alone and comes before the
agreement; ``send`` comes after it, when everybody knows every count.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from crossdock.dispatch.agreement import Problem
from crossdock.dispatch.algorithms.base import Algorithm, ordered_sum
from crossdock.dispatch.buckets import BucketMemory
from crossdock.dispatch.handle import Handle
from crossdock.dispatch.routing import Counts, Routing, find_problem
from crossdock.dispatch.rows import ReceivedRows
from crossdock.dispatch.slots import CountsOrFinder, SlotPlan
from crossdock.dispatch.staging import Staging
from crossdock.dispatch.transports.base import Work
from crossdock.dispatch.unpack import unpack
from crossdock.dispatch.wire import WireFormat

__all__ = ["Agreed", "Departure", "Load", "Mover", "PackedMover"]


class Load(NamedTuple):
    """What this rank is about to send.

    Attributes:
        rows: Packed rows uint8 [n, row_bytes], the payload alone [T, H], or results [n, H].
        extra: What goes with them: scales of a payload, or the place for what comes home.
        call: Number of the call in which kernels have exchanged the step's counts, if they did so
            in a call.
    """

    rows: Tensor
    extra: Tensor | None = None
    call: int = 0


class Agreed(NamedTuple):
    """A dispatch that ranks agreed on without an exchange between hosts.

    Attributes:
        sequence: Number of the call.
        plan: Places of the rows, for which there is room on all ranks.
        pairs: [R] pairs that each rank receives.
        slots: [R] the slot that each rank chose.
    """

    sequence: int
    plan: SlotPlan
    pairs: list[int]
    slots: list[int]


class Departure(NamedTuple):
    """A dispatch before any row moves: a problem, or what leaves and where to.

    Attributes:
        problem: What is wrong on this rank.
        routing: Which rows leave.
        load: What they are.
        agreed: If the hosts need not exchange records.
        work: Rows that are under way already, if they are.
    """

    problem: Problem | None = None
    routing: Counts | None = None
    load: Load | None = None
    agreed: Agreed | None = None
    work: Work | None = None


class Mover(ABC):
    """Takes rows to their ranks, and results home.

    Args:
        algorithm: Which rows leave, and which ids they carry.
        wire: Format of a row.
        num_slots: Steps that may be in flight.

    Attributes:
        connects: Whether ranks write to each other's memory, and must know where it is.
        symmetric: Whether all ranks' buckets have to be as large as the largest.
        pair_limit: Pairs that this rank's experts hold, -1 if they may grow; for steps that only
            the device judges.
    """

    connects = False
    symmetric = False
    pair_limit = -1

    def __init__(self, algorithm: Algorithm, wire: WireFormat, num_slots: int) -> None:
        self.algorithm = algorithm
        self.transport = algorithm.transport
        self.wire = wire
        self.num_slots = num_slots

    @abstractmethod
    def allocate(self, capacity: int) -> BucketMemory:
        """Take the memory of a receive bucket; local."""

    def connect(self, memories: Sequence[tuple[int, BucketMemory]]) -> Callable[[], None]:
        """Let all ranks reach new memory of slots. Collective where :attr:`connects`.

        Args:
            memories: Slot and memory; as many on all ranks.

        Returns:
            What puts it to use, once all ranks have said that they reached it.
        """
        return _nothing

    def is_capturing(self) -> bool:
        """Whether calls are being recorded in a graph, so that nothing may ask the host."""
        return False

    def route(self, topk_idx: Tensor, topk_weights: Tensor) -> tuple[Problem | None, Counts | None]:
        """What is wrong with ids and weights [T, K], or else which rows leave; local."""
        problem = find_problem(topk_idx, topk_weights, self.algorithm.placement.num_experts)
        if problem is not None:
            return problem, None
        return None, self.algorithm.route(topk_idx.long(), topk_weights)

    def prepare(
        self,
        slot: int,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        *,
        captured: bool,
        staged: bool,
    ) -> Departure:
        """Check ids and weights, find the way of tokens [T, H], and get ready to send them; local.

        Args:
            slot: For the rows that come.
            x: Tokens.
            topk_idx: [T, K].
            topk_weights: [T, K].
            captured: Whether the step is recorded in a graph.
            staged: Whether the caller waits for rows later.
        """
        problem, routing = self.route(topk_idx, topk_weights)
        load = None if routing is None else self.load(slot, x, routing)
        return Departure(problem, routing, load)

    def plan(self, rows: CountsOrFinder, sums: list[int] | None = None) -> SlotPlan:
        """Places of a step's rows.

        Args:
            rows: int64 [R, R], of each rank to each, or what finds them.
            sums: [R], sums over senders, if they are known.
        """
        return SlotPlan(rows, sums)

    def outbox_rows(self, plan: SlotPlan) -> list[int]:
        """[R] rows of a step that each rank keeps beside its bucket, in memory for as many."""
        return [0] * self.transport.world_size

    def held(self, slot: int) -> int:
        """Rows for which a slot has memory beside its bucket, where that takes an agreement."""
        return 0

    def needs(self, handle: Handle, num_tokens: list[int]) -> list[int]:
        """[R] such rows that each rank needs for a step, computed alike on all ranks.

        Args:
            handle: Of the step.
            num_tokens: [R] tokens of each rank.
        """
        return [0] * self.transport.world_size

    def reserve(self, slot: int, rows: int) -> None:  # noqa: B027 - most need none
        """Take the memory for such rows; local."""

    @abstractmethod
    def load(self, slot: int, x: Tensor, routing: Counts) -> Load:
        """Get ready to send tokens [T, H]; local."""

    @abstractmethod
    def send(self, load: Load, handle: Handle, memory: BucketMemory, *, staged: bool) -> Work:
        """Move rows into every rank's bucket; this rank's is ``memory``.

        Args:
            load: What this rank sends.
            handle: Of the step.
            memory: Of this rank's slot.
            staged: Whether something may run before the work is waited for.
        """

    def receive(self, memory: BucketMemory, handle: Handle, *, debug: bool) -> ReceivedRows:
        """The rows in ``memory``, after :meth:`send`'s work has ended; NaN beside if ``debug``."""
        return unpack(memory, handle, self.wire, self.algorithm, debug=debug)

    @abstractmethod
    def load_back(self, slot: int, y: Tensor, handle: Handle, memory: BucketMemory) -> Load:
        """Get ready to send results [C, H] of the rows in ``memory``; local."""

    @abstractmethod
    def send_back(
        self, load: Load, handle: Handle, out: Tensor, *, staged: bool
    ) -> Callable[[], None]:
        """Begin to move results home; ``staged`` as in :meth:`send`.

        Returns:
            What waits for them and sums each token's into ``out`` [T, H].
        """

    def find_refusal(self) -> Problem | None:
        """Why a step that a graph replayed was refused, if this rank is to blame."""
        return None

    def release_captured(self) -> None:  # noqa: B027 - most have none
        """Let go of outgrown memory that graphs held."""

    @abstractmethod
    def release(self) -> None:
        """Let go of memory; the dispatcher has ended."""


class PackedMover(Mover):
    """Over transports that move blocks: rows leave packed by destination, results come packed."""

    def __init__(self, algorithm: Algorithm, wire: WireFormat, num_slots: int) -> None:
        super().__init__(algorithm, wire, num_slots)
        self._staging = [Staging(self.transport.device) for _ in range(num_slots)]

    def allocate(self, capacity: int) -> BucketMemory:
        """Memory of this rank's own."""
        return BucketMemory(capacity, self.wire, self.transport.device)

    def load(self, slot: int, x: Tensor, routing: Counts) -> Load:
        """Pack."""
        assert isinstance(routing, Routing)
        rows = self._staging[slot].take(len(routing.packed), self.wire.row_bytes, torch.uint8)
        self.wire.pack(rows, x, routing.ids, routing.weights, routing.packed)
        return Load(rows)

    def send(self, load: Load, handle: Handle, memory: BucketMemory, *, staged: bool) -> Work:
        """Blocks of packed rows straight into the bucket."""
        recv = memory.raw[: handle.plan.received[self.transport.rank]]
        return self.algorithm.send(load.rows, handle.plan, recv)

    def load_back(self, slot: int, y: Tensor, handle: Handle, memory: BucketMemory) -> Load:
        """Results are packed already; make room for those that come home."""
        rows = y[: handle.plan.received[self.transport.rank]].contiguous()
        home = self._staging[slot].take(len(_routing(handle).tokens), y.shape[1], y.dtype)
        return Load(rows, home)

    def send_back(
        self, load: Load, handle: Handle, out: Tensor, *, staged: bool
    ) -> Callable[[], None]:
        """Blocks of results, then their sum."""
        home, counts = load.extra, handle.plan.send_rows(self.transport.rank)
        assert home is not None
        work = self.algorithm.send_back(load.rows, handle.plan, home)

        def finish() -> None:
            work.wait()
            tokens = torch.split(_routing(handle).tokens, counts)
            ordered_sum(torch.split(home, counts), tokens, out)

        return finish

    def release(self) -> None:
        """Give back what packed rows lay in."""
        self._staging.clear()


def _routing(handle: Handle) -> Routing:
    assert isinstance(handle.routing, Routing)
    return handle.routing


def _nothing() -> None:
    """All is done already."""
