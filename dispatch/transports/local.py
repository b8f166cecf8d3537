"""N ranks in one process, on threads: the whole protocol without processes or a network."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch
from torch import Tensor

from crossdock.dispatch.transports.base import (
    DEFAULT_TIMEOUT_S,
    FAILED,
    Done,
    Transport,
    Work,
    in_words,
)
from crossdock.scratch.errors import ConfigError, PeerFailed, RankTimeout

__all__ = ["LocalTransport", "run_local"]

T = TypeVar("T")


@dataclass
class _Meeting:
    """A board on which every rank leaves one thing per round and reads everybody's."""

    world_size: int
    condition: threading.Condition = field(default_factory=threading.Condition)
    rounds: list[int] = field(default_factory=list)
    board: list[dict[int, object]] = field(default_factory=list)
    left: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rounds = [0] * self.world_size
        # A rank leaves the thing of round n+1 only after all left theirs of round n, so two rounds
        # are in use at once.
        self.board = [{}, {}]

    def all_of(self, rank: int, thing: object, timeout_s: float) -> list[object] | dict[int, str]:
        """Everybody's things in rank order, or what is known of the ranks that did not come."""
        deadline = time.monotonic() + timeout_s
        with self.condition:
            current = self.rounds[rank]
            self.rounds[rank] += 1
            board = self.board[current % 2]
            if len(board) == self.world_size:
                board.clear()
            board[rank] = thing
            if len(board) == self.world_size:
                self.condition.notify_all()
            while not all(done > current for done in self.rounds):
                missing = [r for r in range(self.world_size) if self.rounds[r] <= current]
                gone = {r: how for r, how in self.left.items() if r in missing}
                failed = [r for r, how in gone.items() if how.startswith(FAILED)]
                if failed:  # the first; the others may have failed because of it
                    return {failed[0]: gone[failed[0]]}
                if gone:
                    return gone
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self.condition.wait(remaining):
                    missing = [r for r in range(self.world_size) if self.rounds[r] <= current]
                    if missing:
                        return dict.fromkeys(missing, "did not arrive")
            return [board[r] for r in range(self.world_size)]

    def leave(self, rank: int, how: str) -> None:
        with self.condition:
            self.left.setdefault(rank, how)
            self.condition.notify_all()


class LocalTransport(Transport):
    """One of N ranks that are threads of this process; made by :func:`run_local`."""

    name = "local"

    def __init__(
        self, rank: int, meeting: _Meeting, device: torch.device, timeout_s: float
    ) -> None:
        super().__init__(rank, meeting.world_size, device, timeout_s)
        self._meeting = meeting

    def _exchange(self, record: Tensor) -> Tensor:
        records = self._meet("the exchange of records", record)
        return torch.stack(cast("list[Tensor]", records))

    def _all_to_all(
        self, send: Tensor, send_rows: list[int], recv: Tensor, recv_rows: list[int]
    ) -> Work:
        offers = self._meet("the exchange of rows", torch.split(send, send_rows))
        parts = cast("list[tuple[Tensor, ...]]", offers)
        torch.cat([offered[self.rank] for offered in parts], out=recv)
        self._meet("the end of the exchange of rows")
        return Done()

    def _all_gather(self, send: Tensor, recv: Tensor, rows: list[int]) -> Work:
        offers = self._meet("the gather of rows", send)
        torch.cat(cast("list[Tensor]", offers), out=recv)
        self._meet("the end of the gather of rows")
        return Done()

    def tell_failure(self, said: str) -> None:
        """Leave, and say why."""
        self._meeting.leave(self.rank, said)

    def heard(self) -> dict[int, str] | None:
        """The first that said that it failed."""
        with self._meeting.condition:
            left = self._meeting.left.items()
            return next(({rank: how} for rank, how in left if how.startswith(FAILED)), None)

    def close(self) -> None:
        """Leave; a rank that still waits for this one learns it at once."""
        self._meeting.leave(self.rank, "closed its transport")

    def _meet(self, during: str, thing: object = None) -> list[object]:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # peers read on their own stream
        met = self._meeting.all_of(self.rank, thing, self.timeout_s)
        if isinstance(met, dict):
            raise self.break_with(met, during)
        return met


def run_local(
    world_size: int,
    fn: Callable[[LocalTransport], T],
    *,
    device: str | torch.device = "cpu",
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> list[T]:
    """Run ``fn(transport)`` as N ranks on threads of this process.

    Args:
        world_size: N, ranks to start.
        fn: What each rank runs.
        device: Where the ranks' rows live.
        timeout_s: Seconds after which a rank that does not answer is a RankTimeout.

    Returns:
        What each rank returned, in rank order.

    Raises:
        ConfigError: ``world_size`` is no whole number above 0.
        Exception: The first failure of any rank; the others' are its notes and its ``peers``
            attribute, a tuple of (rank, exception).
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ConfigError(f"world_size = {world_size!r}: a whole number above 0")
    meeting = _Meeting(world_size)
    failures: list[tuple[int, BaseException]] = []
    lock = threading.Lock()

    def rank_main(rank: int) -> T | None:
        transport = LocalTransport(rank, meeting, torch.device(device), timeout_s)
        try:
            result = fn(transport)
        except BaseException as error:
            with lock:
                failures.append((rank, error))
            meeting.leave(rank, f"{FAILED}: {in_words(error)}")
            return None
        meeting.leave(rank, "returned")
        return result

    with ThreadPoolExecutor(world_size, thread_name_prefix="crossdock-rank") as pool:
        results = list(pool.map(rank_main, range(world_size)))
    if failures:
        raise _first_cause(failures)
    return results  # type: ignore[return-value]


def _first_cause(failures: list[tuple[int, BaseException]]) -> BaseException:
    """The failure that came first, a cause before its consequences on other ranks."""

    def consequence(failure: tuple[int, BaseException]) -> bool:
        rank, error = failure
        named = error.ranks if isinstance(error, PeerFailed | RankTimeout) else ()
        return bool(named) and rank not in named

    rank, first = next((f for f in failures if not consequence(f)), failures[0])
    others = tuple(f for f in failures if f[1] is not first)
    first.add_note(f"raised on rank {rank}")
    for other, error in others:
        first.add_note(f"rank {other}: {in_words(error)}")
    first.peers = others  # type: ignore[attr-defined]
    return first
