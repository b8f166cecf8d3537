"""Finding out who is missing: collectives do not say, so ranks publish how far they got.

Nothing is published while all goes well. A rank that has waited for a while writes the number of
the step it waits in to the launcher's store, and so does a rank whose collective failed; whoever
did not come that far is missing. On this host the process table tells the dead and the stopped from
the slow. The first to find out writes it down, and the others take its word.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from crossdock.dispatch.digest import digest_of

if TYPE_CHECKING:
    from crossdock.dispatch.transports.base import Transport

__all__ = ["Notices", "Process", "Watch", "gather_processes"]

T = TypeVar("T")

_VERDICT = "verdict"
_STORE_S = 1.0  # a store that does not answer within this is as lost as its host


@dataclass(frozen=True)
class Process:
    """Where a rank runs.

    Attributes:
        host: Name of the machine and its process namespace.
        pid: Process id there.
        started: Start time in clock ticks, which tells a reused id.
    """

    host: str
    pid: int
    started: str

    @classmethod
    def this(cls) -> Process:
        """The calling process."""
        namespace = os.readlink("/proc/self/ns/pid")
        return cls(f"{socket.gethostname()} {namespace}", os.getpid(), _stat("self")[1])

    def trouble(self) -> str | None:
        """What is wrong with it, if it runs on this host and something is."""
        if self.host != Process.this().host:
            return None
        try:
            state, started = _stat(str(self.pid))
        except (FileNotFoundError, ProcessLookupError):
            return f"is dead (process {self.pid} is gone)"
        if started != self.started or state in "ZXx":
            return f"is dead (process {self.pid} is gone)"
        if state in "Tt":
            return f"is stopped (process {self.pid}, state {state})"
        return None


def _stat(pid: str) -> tuple[str, str]:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return fields[0], fields[19]


def gather_processes(transport: Transport) -> list[Process]:
    """Where each rank runs, as far as that is this host. Collective."""
    this = Process.this()
    host = digest_of(this.host.encode())
    said = transport.exchange(torch.tensor([host, this.pid, int(this.started)])).tolist()
    return [
        Process(this.host if there == host else "another host", pid, str(started))
        for there, pid, started in said
    ]


class Notices(Protocol):
    """What ranks let each other know outside of their collectives; torch's stores are such."""

    def set(self, key: str, value: str, /) -> object:
        """Let all ranks know a value."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are known here."""

    def get(self, key: str, /) -> bytes:
        """A known key's value."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> object:
        """Set an unknown key (``expected`` is "")."""


class Watch:
    """Publishes this rank's step when it waits long, and names the ranks that never came.

    Args:
        store: Shared by the ranks; keys are this transport's own.
        rank: This rank.
        processes: Where each rank runs.
    """

    def __init__(self, store: Notices, rank: int, processes: list[Process]) -> None:
        self._store = store
        self._rank = rank
        self._processes = processes
        self._reachable = True
        self._beat = 0
        self._first_trouble: dict[int, str] = {}

    def publish(self, step: int) -> None:
        """Say that this rank waits in ``step``, again and again while it does."""
        self._beat += 1
        said = f"{step} {self._beat}"
        self._ask(lambda: self._store.set(str(self._rank), said), None)

    def verdict(self) -> dict[int, str] | None:
        """Who is missing, if another rank has found out."""

        def read() -> dict[int, str] | None:
            if not self._store.check([_VERDICT]):
                return None
            return {int(r): state for r, state in json.loads(self._store.get(_VERDICT)).items()}

        return self._ask(read, None)

    def has_dead(self) -> bool:
        """Whether a rank of this host is dead, so that waiting for all ranks is in vain."""
        return any(state.startswith("is dead") for state in self._in_trouble().values())

    def find_missing(self, step: int, grace_s: float) -> dict[int, str]:
        """Name the ranks that did not come to ``step``, and tell the others.

        Args:
            step: Step that this rank has waited in.
            grace_s: Seconds to let ranks publish that came late.

        Returns:
            Rank -> what is known of it. Empty if all ranks are there (the network failed, then).
        """
        known = self.verdict()
        if known is not None:  # a rank that failed has said so, and may be gone since
            return known
        deadline = time.monotonic() + grace_s
        found, before = self.look(), {}
        if not found:
            self.publish(step)
            before = self._said()
        while not found:
            known = self.verdict()
            if known is not None:
                return known
            if not self._reachable:
                return self._beside_the_store()
            if time.monotonic() >= deadline:
                found = dict.fromkeys(self._behind(step, before), "did not arrive")
                break
            time.sleep(0.05)
            self.publish(step)
            found = self.look()
        return self.condemn(found)

    def condemn(self, found: dict[int, str]) -> dict[int, str]:
        """Tell the others who is missing, unless somebody has already; what holds from now on."""
        text = json.dumps(found)
        self._ask(lambda: self._store.compare_set(_VERDICT, "", text), None)
        return self.verdict() or found

    def look(self) -> dict[int, str]:
        """Ranks of this host that are dead or stopped; the first to be so while they are.

        A rank that gives up and leaves is a consequence, not the cause.
        """
        now = self._in_trouble()
        still = {rank: now[rank] for rank in self._first_trouble if rank in now}
        self._first_trouble = still or now
        return self._first_trouble

    def _in_trouble(self) -> dict[int, str]:
        states = ((rank, process.trouble()) for rank, process in enumerate(self._processes))
        return {rank: state for rank, state in states if state is not None}

    def _beside_the_store(self) -> dict[int, str]:
        """The ranks of rank 0's host, where launchers put the store, if that is another host."""
        first, here = self._processes[0].host, self._processes[self._rank].host
        if first == here:
            return {}
        lost = [rank for rank, process in enumerate(self._processes) if process.host == first]
        return dict.fromkeys(lost, "is out of reach (the store on its host does not answer)")

    def _behind(self, step: int, before: dict[int, str]) -> list[int]:
        """Ranks that did not come to ``step`` and do not wait elsewhere: no beat since ``before``.

        Ranks may wait one step apart, since a step can fail for some before others have left it.
        """
        now = self._said()
        behind = [
            rank
            for rank in range(len(self._processes))
            if rank != self._rank and int(now.get(rank, "-1").split()[0]) < step
        ]
        return [rank for rank in behind if now.get(rank) == before.get(rank)] or behind

    def _said(self) -> dict[int, str]:
        """What each rank published last, if anything."""

        def read() -> dict[int, str]:
            ranks = (r for r in range(len(self._processes)) if self._store.check([str(r)]))
            return {rank: self._store.get(str(rank)).decode() for rank in ranks}

        return self._ask(read, {})

    def _ask(self, question: Callable[[], T], otherwise: T) -> T:
        """Ask the store, but do not wait for one whose host is lost."""
        if not self._reachable:
            return otherwise
        answer: list[T] = []

        def ask() -> None:
            try:
                answer.append(question())
            except (RuntimeError, OSError):
                self._reachable = False

        thread = threading.Thread(target=ask, daemon=True, name="crossdock-watch")
        thread.start()
        thread.join(_STORE_S)
        if thread.is_alive():
            self._reachable = False
        return answer[0] if answer else otherwise


def slice_of(limit_s: float) -> timedelta:
    """How long to wait before publishing, and between looks at the verdict."""
    return timedelta(seconds=min(0.5, limit_s / 8))


def grace_of(limit_s: float) -> float:
    """Share of a time limit, in seconds, that is kept for finding out who is missing."""
    return min(2.0, limit_s / 4)
