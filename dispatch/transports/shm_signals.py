"""Waiting for other ranks on counters in shared memory, and finding out who is missing.

A rank that waits looks again and again for a moment, and lets others run in between: most waits
are shorter than it takes to be woken. Then it sleeps on the counter itself: a futex is woken by the
write that it waits for, and the kernel compares the counter before it puts anyone to sleep, so no
wake-up is lost.

Whoever finds out that a rank is missing writes it down, and the others take its word, so that all
name the same rank although they wait in different places.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from enum import IntEnum

from crossdock.dispatch.onesided.signals import Counter
from crossdock.dispatch.transports.base import Transport
from crossdock.dispatch.transports.shm_memory import futex_wait, futex_wake
from crossdock.dispatch.transports.shm_table import Table
from crossdock.dispatch.transports.watch import Process

__all__ = ["FutexSignals"]

_LINGER_NS = 100_000  # about twice what it takes to be woken
_SLICE_S = 0.1  # between looks at what became of the ranks that are missing


class State(IntEnum):
    """What is known of a rank."""

    PRESENT = 0
    LATE = 1
    CLOSED = 2
    DEAD = 3
    STOPPED = 4
    FAILED = 5


class FutexSignals:
    """Counters in the table; whoever waits for one sleeps on it."""

    def __init__(self, transport: Transport, table: Table, processes: list[Process]) -> None:
        self._transport = transport
        self._table = table
        self._processes = processes
        self._words = memoryview(table.words.numpy())  # type: ignore[arg-type]
        self._fence = threading.Lock()

    def post(self, counter: Counter, value: int) -> None:
        """Set this rank's counter and wake who waits for it."""
        self._set(self._table.counter_at(counter, self._transport.rank), value)

    def wait(self, counter: Counter, ranks: Sequence[int], value: int, during: str) -> None:
        """Wait for other ranks' counters, and for no longer than the transport's timeout."""
        self._heed_verdicts(during)
        deadline = time.monotonic() + self._transport.timeout_s
        lingers_until = time.perf_counter_ns() + _LINGER_NS
        for rank in ranks:
            at = self._table.counter_at(counter, rank)
            while self._words[at] < value and time.perf_counter_ns() < lingers_until:
                os.sched_yield()
            while (seen := self._words[at]) < value:
                remaining = deadline - time.monotonic()
                if remaining > 0:
                    futex_wait(self._address(at), seen, min(_SLICE_S, remaining))
                if self._words[at] == seen:
                    self._heed_verdicts(during)
                    self._look_for_missing(counter, ranks, value, during, remaining <= 0)

    def leave(self) -> None:
        """Say that this rank will not come any more, and wake all that wait for it."""
        self._set(self._table.left_at(self._transport.rank), 1)
        self._wake_all()

    def condemn_self(self, said: str) -> None:
        """Say that this rank failed, and how, and wake all that wait for it."""
        rank = self._transport.rank
        self._table.write_text(rank, said)
        self._condemn({rank: State.FAILED})
        self._wake_all()

    def verdict(self) -> dict[int, str] | None:
        """Who is missing, or failed, if any rank, this one included, has found out."""
        for judge in range(self._transport.world_size):
            verdict = self._table.verdict_at(judge)
            if self._words[verdict.start]:
                states = self._words[verdict].tolist()[1:]
                return {rank: self._describe(rank, s) for rank, s in enumerate(states) if s}
        return None

    def _wake_all(self) -> None:
        for counter in Counter:
            futex_wake(self._address(self._table.counter_at(counter, self._transport.rank)))

    def _set(self, at: int, value: int) -> None:
        # Taking a lock is a locked instruction, which non-temporal stores do not pass either.
        with self._fence:
            pass
        self._words[at] = value
        futex_wake(self._address(at))

    def _address(self, at: int) -> int:
        return self._table.words.data_ptr() + 8 * at  # the low half: x86-64 is little-endian

    def _look_for_missing(
        self, counter: Counter, ranks: Sequence[int], value: int, during: str, late: bool
    ) -> None:
        """Raise for ranks that will not come, and for all that did not come once it is ``late``."""
        behind = [r for r in ranks if self._words[self._table.counter_at(counter, r)] < value]
        found = {rank: self._state_of(rank, late) for rank in behind}
        # Whoever came meanwhile is not lost.
        found = {
            rank: state
            for rank, state in found.items()
            if state and self._words[self._table.counter_at(counter, rank)] < value
        }
        if found:
            self._condemn(found)
            self._heed_verdicts(during)

    def _condemn(self, found: dict[int, State]) -> None:
        verdict = self._table.verdict_at(self._transport.rank)
        for rank, at in enumerate(range(verdict.start + 1, verdict.stop)):
            self._words[at] = found.get(rank, State.PRESENT)
        self._set(verdict.start, 1)

    def _heed_verdicts(self, during: str) -> None:
        missing = self.verdict()
        if missing is not None:
            raise self._transport.break_with(missing, during)

    def _state_of(self, rank: int, late: bool) -> State:
        """Why a rank is missing; PRESENT if it may still come."""
        if self._words[self._table.left_at(rank)]:
            return State.CLOSED
        trouble = self._processes[rank].trouble()
        if trouble is None:
            return State.LATE if late else State.PRESENT
        if trouble.startswith("is dead"):
            return State.DEAD
        return State.STOPPED if late else State.PRESENT  # it may be continued

    def _describe(self, rank: int, state: int) -> str:
        process = f"process {self._processes[rank].pid}"
        return {
            State.LATE: "did not arrive",
            State.CLOSED: "closed its transport",
            State.DEAD: f"is dead ({process} is gone)",
            State.STOPPED: f"is stopped ({process})",
            State.FAILED: self._table.read_text(rank),
        }[State(state)]
