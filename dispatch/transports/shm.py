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

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from crossdock.dispatch.agreement import mark_agreed
from crossdock.dispatch.onesided.board import Board
from crossdock.dispatch.onesided.signals import Counter
from crossdock.dispatch.onesided.transport import OneSidedTransport, SharedMemory
from crossdock.dispatch.transports.base import Done, Transport, Work
from crossdock.dispatch.transports.shm_memory import Memory, map_memory_of
from crossdock.dispatch.transports.shm_signals import FutexSignals
from crossdock.dispatch.transports.shm_table import Table
from crossdock.scratch.errors import CapacityError

__all__ = ["ShmTransport"]

logger = logging.getLogger(__name__)


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
        table = Table(self.rank, self.world_size)
        self._processes = table.meet(meeting)
        self._signals = FutexSignals(self, table, self._processes)
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

    def tell_failure(self, said: str) -> None:
        """Write it down, and wake all that wait for this rank."""
        self._signals.condemn_self(said)

    def heard(self) -> dict[int, str] | None:
        """What another rank wrote down."""
        return self._signals.verdict()

    def close(self) -> None:
        """Leave; a rank that still waits for this one learns it at once."""
        self._signals.leave()

    def reserve(self, num_bytes: int) -> None:
        """Take both outboxes, so that no exchange of rows has to; see the base."""
        for outbox in self._outboxes:
            outbox.reserve(num_bytes)

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

    def reserve(self, num_bytes: int) -> None:
        """Hold that many bytes, or raise MemoryError."""
        if num_bytes > self.memory.buffer.numel():
            self.memory = Memory(1 << (num_bytes - 1).bit_length())
            self.generation += 1

    def fill(self, rows: Tensor) -> bool:
        """Copy rows in; False if there is no memory for them."""
        num_bytes = rows.numel()
        try:
            self.reserve(num_bytes)
        except MemoryError:
            logger.warning("shm: no memory for %d bytes to send", num_bytes, exc_info=True)
            return False
        self.memory.buffer[:num_bytes].copy_(rows.view(-1))
        return True


def _require_memory(poor: list[int], what: str) -> None:
    ranks = tuple(rank for rank, is_poor in enumerate(poor) if is_poor)
    if ranks:
        raise mark_agreed(CapacityError(f"rank {ranks[0]} {what}", ranks=ranks))


def _prefix_sums(counts: list[int]) -> list[int]:
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return sums
