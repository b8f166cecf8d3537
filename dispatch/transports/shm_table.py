"""Where the words lie through which the ranks of the ``shm`` transport speak."""

from __future__ import annotations

import platform

import torch
from torch import Tensor

from crossdock.dispatch.agreement import (
    Operation,
    Problem,
    ProblemKind,
    Record,
    Words,
    agree,
    record_words,
)
from crossdock.dispatch.digest import digest_of
from crossdock.dispatch.onesided.signals import Counter
from crossdock.dispatch.transports.base import Transport
from crossdock.dispatch.transports.shm_memory import Memory, map_memory_of
from crossdock.dispatch.transports.watch import Process
from crossdock.scratch.errors import ConfigError, TransportUnavailable

__all__ = ["Table"]

_LINE = 8  # words of a cache line, so that no two ranks write to one
_TEXT_WORDS = 32


class Table:
    """The memory through which ranks speak: counters, verdicts and texts, and the board's pages.

    Rank 0 owns it. All words are int64.

    Attributes:
        words: The whole table.
        pages: int64 [2, R, W], for the board.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        verdict_words = -(-(world_size + 1) // _LINE) * _LINE
        self._left_at = len(Counter) * world_size * _LINE
        self._verdicts_at = self._left_at + world_size * _LINE
        self._verdict_words = verdict_words
        self._texts_at = self._verdicts_at + world_size * verdict_words
        self._pages_at = self._texts_at + world_size * _TEXT_WORDS
        self._num_words = self._pages_at + 2 * world_size * record_words(world_size)

    def meet(self, meeting: Transport) -> list[Process]:
        """Find the other ranks and map rank 0's table. Collective.

        Returns:
            Each rank's process.
        """
        this = Process.this()
        host = digest_of(this.host.encode())
        problem = None
        memory = Memory(0)
        if platform.machine() != "x86_64":
            problem = f"shm relies on the memory order of x86-64, and this is {platform.machine()}"
        elif self.rank == 0:
            try:
                memory = Memory(8 * self._num_words)
            except MemoryError as error:
                problem = str(error)
        mine = (host, this.pid, int(this.started), memory.fd)
        met = _agree_to_meet(meeting, problem, mine)
        hosts, pids, starts, fds = met[:, :4].T.tolist()
        processes = [Process(this.host, p, str(s)) for p, s in zip(pids, starts, strict=True)]
        problem = None
        if host != hosts[0]:
            problem = "on another host, or in another PID namespace, than rank 0"
        elif self.rank != 0:
            try:
                buffer = map_memory_of(pids[0], fds[0], 8 * self._num_words)
            except OSError as error:
                problem = f"cannot reach the memory of rank 0: {error}"
        else:
            buffer = memory.buffer
        _agree_to_meet(meeting, problem, ())
        memory.settle()
        self.words = buffer.view(torch.int64)
        pages = self.words[self._pages_at :]
        self.pages = pages.view(2, self.world_size, record_words(self.world_size))
        return processes

    def counter_at(self, counter: Counter, rank: int) -> int:
        """Index of a rank's counter."""
        return (counter * self.world_size + rank) * _LINE

    def left_at(self, rank: int) -> int:
        """Index of the word that says that a rank left."""
        return self._left_at + rank * _LINE

    def verdict_at(self, rank: int) -> slice:
        """Words [1 + R] of a rank's verdict: whether it has one, and the state of each rank."""
        begin = self._verdicts_at + rank * self._verdict_words
        return slice(begin, begin + 1 + self.world_size)

    def write_text(self, rank: int, text: str) -> None:
        """Put down what a rank has to say, as much of it as fits."""
        raw = text.encode(errors="backslashreplace")[: 8 * _TEXT_WORDS]
        self._text(rank)[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)

    def read_text(self, rank: int) -> str:
        """What a rank has put down."""
        return bytes(self._text(rank).tolist()).rstrip(b"\0").decode(errors="replace")

    def _text(self, rank: int) -> Tensor:
        begin = self._texts_at + rank * _TEXT_WORDS
        return self.words[begin : begin + _TEXT_WORDS].view(torch.uint8)


def _agree_to_meet(meeting: Transport, problem: str | None, words: tuple[int, ...]) -> Words:
    found = None if problem is None else Problem(ProblemKind.CONFIG, problem)
    record = Record(operation=Operation.CONSTRUCT, problem=found, values=words)
    try:
        return agree(meeting, record).values
    except ConfigError as error:
        raise TransportUnavailable(
            f"no shm: {error}. It joins CPU ranks of one x86-64 Linux host; across hosts use gloo, "
            "mpi or hierarchical",
            ranks=error.ranks,
        ) from error
