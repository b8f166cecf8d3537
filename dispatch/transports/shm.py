"""CPU ranks of one node, through memory that they share.

Records, counters and rows all lie in shared memory; nothing travels through a socket once the ranks
have found each other. A rank finds the others over a transport that is there already (gloo or MPI),
which it closes again.

Counters are aligned 8-byte words with one writer each. On x86-64 such stores and loads are atomic,
stores become visible in program order and loads happen in program order, so a reader that sees a
counter sees what its writer wrote before; only non-temporal stores, which a copy may use, need the
fence in ``post``. Other processors order less, and get ``TransportUnavailable``.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from crossdock.dispatch.agreement import (
    Operation,
    Problem,
    ProblemKind,
    Record,
    agree,
    mark_agreed,
    record_words,
)
from crossdock.dispatch.onesided.board import Board
from crossdock.dispatch.onesided.signals import Counter
from crossdock.dispatch.onesided.transport import OneSidedTransport, SharedMemory
from crossdock.dispatch.transports.base import Done, Transport, Work
from crossdock.dispatch.transports.shm_memory import (
    Memory,
    futex_wait,
    futex_wake,
    map_memory_of,
)
from crossdock.dispatch.transports.watch import Process
from crossdock.scratch.errors import CapacityError, ConfigError, TransportUnavailable

__all__ = ["ShmTransport"]

logger = logging.getLogger(__name__)

_LINE = 8  # words of a cache line, so that no two ranks write to one
_SLICE_S = 0.1  # between looks at what became of the ranks that are missing
_STATES = ("", "did not arrive", "closed its transport", "is dead (its process is gone)")
_STOPPED = len(_STATES)


class ShmTransport(OneSidedTransport):
    """Ranks of one node that write and read each other's memory.

    Args:
        meeting: A transport over the same ranks, used to find each other and then no more.
        timeout_s: Seconds after which a rank that does not answer is a RankTimeout.

    Raises:
        TransportUnavailable: Ranks are on several hosts or cannot reach each other's memory, or
            this is no x86-64 Linux.
    """

    name = "shm"

    def __init__(self, meeting: Transport, *, timeout_s: float) -> None:
        super().__init__(meeting.rank, meeting.world_size, torch.device("cpu"), timeout_s)
        table = _Table(self.rank, self.world_size)
        self._processes = table.meet(meeting)
        self._table = table
        self._signals = _FutexSignals(self, table, self._processes)
        self._board = Board(table.pages, self._signals, self.rank)
        self._steps = 0
        self._outboxes = [_Outbox(self.world_size), _Outbox(self.world_size)]
        self._swaps = 0

    # ---- what every transport does -------------------------------------------------------------

    def _exchange(self, record: Tensor) -> Tensor:
        return self._board.exchange(record)

    def _all_to_all(
        self, send: Tensor, send_rows: list[int], recv: Tensor, recv_rows: list[int]
    ) -> Work:
        starts = _prefix_sums(send_rows)
        self._swap(send, starts[:-1], recv, recv_rows)
        return Done()

    def _all_gather(self, send: Tensor, recv: Tensor, rows: list[int]) -> Work:
        self._swap(send, [0] * self.world_size, recv, rows)
        return Done()

    def close(self) -> None:
        """Leave; a rank that still waits for this one learns it at once."""
        self._signals.leave()

    # ---- what one-sided transports add ---------------------------------------------------------

    def allocate(self, num_bytes: int) -> Memory:
        """Take shared memory; see the base."""
        return Memory(num_bytes)

    def share(
        self, offers: Sequence[tuple[SharedMemory, Sequence[int]]]
    ) -> list[list[tuple[Tensor, list[int]]]]:
        """Offer memory to every rank and map theirs; see the base."""
        answers = []
        for memory, words in offers:
            assert isinstance(memory, Memory)
            offer = torch.tensor([memory.fd, memory.buffer.numel(), *words])
            answers.append(self.exchange(offer).tolist())
        # Only when all is exchanged may this rank fail alone.
        return [
            [
                (memory.buffer if rank == self.rank else self._map(rank, fd, num_bytes), theirs)
                for rank, (fd, num_bytes, *theirs) in enumerate(by_rank)
            ]
            for (memory, _), by_rank in zip(offers, answers, strict=True)
        ]

    def announce_rows(self) -> int:
        """Count one more step of rows written; see the base."""
        self._steps += 1
        self._signals.post(Counter.ROWS, self._steps)
        return self._steps

    def await_rows(self, ranks: Sequence[int], step: int) -> None:
        """Wait for their rows of a step; see the base."""
        self._signals.wait(Counter.ROWS, ranks, step, "the exchange of rows")

    # ---- blocks of rows, through an outbox -----------------------------------------------------

    def _swap(self, send: Tensor, starts: list[int], recv: Tensor, recv_rows: list[int]) -> None:
        """Put rows in this rank's outbox, and take from everybody's what is for this rank.

        Two outboxes take turns: one is filled again only when all ranks have come to the exchange
        after the one in which it was read. A new outbox is mapped by all before anyone goes on,
        because its owner may end as soon as it has what it came for.

        Args:
            send: uint8 [n, row_bytes].
            starts: [R] row of ``send`` at which the rows for each rank begin.
            recv: uint8 [sum(recv_rows), row_bytes].
            recv_rows: [R] rows from each rank.

        Raises:
            CapacityError: Some rank has no memory for its outbox, or cannot reach another's.
        """
        self._swaps += 1
        outbox = self._outboxes[self._swaps % 2]
        poor = not outbox.fill(send)
        memory = outbox.memory
        offer = [int(poor), memory.fd, outbox.generation, memory.buffer.numel(), *starts]
        offers = self.exchange(torch.tensor(offer)).tolist()
        _require_memory([poor for poor, *_ in offers], "has no memory for the rows that it sends")
        if any(generation != outbox.known[r] for r, (_, _, generation, *_) in enumerate(offers)):
            stuck = self._map_outboxes(outbox, offers)
            all_stuck = self.exchange(torch.tensor([int(stuck)]))[:, 0].tolist()
            if any(all_stuck):
                # All ranks forget alike, so that they agree on what is new the next time.
                self._outboxes[self._swaps % 2] = _Outbox(self.world_size)
            _require_memory(all_stuck, "cannot reach the rows that others send")
            memory.settle()
        parts = torch.split(recv, recv_rows)
        for part, theirs, (_, _, _, _, *begins) in zip(parts, outbox.buffers, offers, strict=True):
            begin = begins[self.rank] * send.shape[1]
            part.view(-1).copy_(theirs[begin : begin + part.numel()])

    def _map_outboxes(self, outbox: _Outbox, offers: list[list[int]]) -> bool:
        """Map what is new of the ranks' outboxes; whether that failed."""
        for rank, (_, fd, generation, num_bytes, *_) in enumerate(offers):
            if generation == outbox.known[rank]:
                continue
            try:
                own = rank == self.rank
                buffer = outbox.memory.buffer if own else self._map(rank, fd, num_bytes)
            except MemoryError:
                logger.warning("shm: no way to another rank's rows", exc_info=True)
                return True
            outbox.known[rank], outbox.buffers[rank] = generation, buffer
        return False

    def _map(self, rank: int, fd: int, num_bytes: int) -> Tensor:
        try:
            return map_memory_of(self._processes[rank].pid, fd, num_bytes)
        except OSError as error:
            raise MemoryError(f"cannot map {num_bytes} bytes of rank {rank}: {error}") from error


class _Outbox:
    """Rows that this rank offers, and the other ranks' outboxes of the same turn.

    Attributes:
        memory: Of this rank.
        generation: How often it was replaced.
        known: [R] generation of each rank's outbox that is mapped here.
        buffers: [R] what is mapped.
    """

    def __init__(self, world_size: int) -> None:
        self.memory = Memory(0)
        self.generation = 0
        self.known = [0] * world_size
        self.buffers = [self.memory.buffer] * world_size

    def fill(self, rows: Tensor) -> bool:
        """Copy rows in; False if there is no memory for them."""
        num_bytes = rows.numel()
        if num_bytes > self.memory.buffer.numel():
            try:
                self.memory = Memory(1 << (num_bytes - 1).bit_length())
            except MemoryError:
                logger.warning("shm: no memory for %d bytes to send", num_bytes, exc_info=True)
                return False
            self.generation += 1
        self.memory.buffer[:num_bytes].copy_(rows.view(-1))
        return True


def _require_memory(poor: list[int], what: str) -> None:
    ranks = tuple(rank for rank, is_poor in enumerate(poor) if is_poor)
    if ranks:
        raise mark_agreed(CapacityError(f"rank {ranks[0]} {what}", ranks=ranks))


class _Table:
    """The memory through which ranks speak: counters, who left, verdicts, and the board's pages.

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
        self._pages_at = self._verdicts_at + world_size * verdict_words
        self._num_words = self._pages_at + 2 * world_size * record_words(world_size)

    def meet(self, meeting: Transport) -> list[Process]:
        """Find the other ranks and map rank 0's table. Collective.

        Returns:
            Each rank's process.
        """
        this = Process.this()
        host = int.from_bytes(hashlib.sha256(this.host.encode()).digest()[:8], "little") >> 1
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
        hosts, pids, starts, fds = met[:, :4].t().tolist()
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


def _agree_to_meet(meeting: Transport, problem: str | None, words: tuple[int, ...]) -> Tensor:
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


class _FutexSignals:
    """Counters in the table; whoever waits for one sleeps on it."""

    def __init__(self, transport: Transport, table: _Table, processes: list[Process]) -> None:
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
        for rank in ranks:
            at = self._table.counter_at(counter, rank)
            while (seen := self._words[at]) < value:
                remaining = deadline - time.monotonic()
                if remaining > 0:
                    futex_wait(self._address(at), seen, min(_SLICE_S, remaining))
                if self._words[at] == seen:
                    self._heed_verdicts(during)
                    self._look_for_missing(counter, ranks, value, during, remaining <= 0)

    def leave(self) -> None:
        """Say that this rank will not come any more, and wake all that wait for it."""
        rank = self._transport.rank
        self._set(self._table.left_at(rank), 1)
        for counter in Counter:
            futex_wake(self._address(self._table.counter_at(counter, rank)))

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
        found = {}
        for rank in behind:
            if self._words[self._table.left_at(rank)]:
                found[rank] = _STATES.index("closed its transport")
                continue
            trouble = self._processes[rank].trouble()
            if trouble is None:
                found |= {rank: _STATES.index("did not arrive")} if late else {}
            elif trouble.startswith("is dead"):
                found[rank] = len(_STATES) - 1
            elif late:
                found[rank] = _STOPPED
        # Whoever came meanwhile is not lost.
        found = {
            r: state
            for r, state in found.items()
            if self._words[self._table.counter_at(counter, r)] < value
        }
        if found:
            states = [found.get(rank, 0) for rank in range(self._transport.world_size)]
            verdict = self._table.verdict_at(self._transport.rank)
            for at, state in zip(range(verdict.start + 1, verdict.stop), states, strict=True):
                self._words[at] = state
            self._set(verdict.start, 1)
            self._heed_verdicts(during)

    def _heed_verdicts(self, during: str) -> None:
        """Raise what any rank, this one included, has found out."""
        for judge in range(self._transport.world_size):
            verdict = self._table.verdict_at(judge)
            if self._words[verdict.start]:
                states = self._words[verdict].tolist()[1:]
                missing = {
                    rank: self._describe(rank, state) for rank, state in enumerate(states) if state
                }
                raise self._transport.break_with(missing, during)

    def _describe(self, rank: int, state: int) -> str:
        if state == _STOPPED:
            return f"is stopped (process {self._processes[rank].pid})"
        return _STATES[state]


def _prefix_sums(counts: list[int]) -> list[int]:
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return sums
