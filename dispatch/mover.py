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

from crossdock.dispatch.algorithms.base import Algorithm, ordered_sum
from crossdock.dispatch.buckets import BucketMemory
from crossdock.dispatch.handle import Handle
from crossdock.dispatch.routing import Routing
from crossdock.dispatch.staging import Staging
from crossdock.dispatch.transports.base import Work
from crossdock.dispatch.wire import WireFormat

__all__ = ["Load", "Mover", "PackedMover"]


class Load(NamedTuple):
    """What this rank is about to send.

    Attributes:
        rows: Packed rows uint8 [n, row_bytes], the payload alone [T, H], or results [n, H].
        extra: What goes with them: scales of a payload, or the place for what comes home.
    """

    rows: Tensor
    extra: Tensor | None = None


class Mover(ABC):
    """Takes rows to their ranks, and results home.

    Args:
        algorithm: Which rows leave, and which ids they carry.
        wire: Format of a row.
        num_slots: Steps that may be in flight.

    Attributes:
        connects: Whether ranks write to each other's memory, and must know where it is.
    """

    connects = False

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

    @abstractmethod
    def load(self, slot: int, x: Tensor, routing: Routing) -> Load:
        """Get ready to send tokens [T, H]; local."""

    @abstractmethod
    def send(self, load: Load, handle: Handle, memory: BucketMemory) -> Work:
        """Move rows into every rank's bucket; this rank's is ``memory``."""

    @abstractmethod
    def load_back(self, slot: int, y: Tensor, handle: Handle, memory: BucketMemory) -> Load:
        """Get ready to send results [C, H] of the rows in ``memory``; local."""

    @abstractmethod
    def send_back(self, load: Load, handle: Handle, out: Tensor) -> Callable[[], None]:
        """Begin to move results home.

        Returns:
            What waits for them and sums each token's into ``out`` [T, H].
        """

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

    def load(self, slot: int, x: Tensor, routing: Routing) -> Load:
        """Pack."""
        rows = self._staging[slot].take(len(routing.packed), self.wire.row_bytes, torch.uint8)
        self.wire.pack(rows, x, routing.ids, routing.weights, routing.packed)
        return Load(rows)

    def send(self, load: Load, handle: Handle, memory: BucketMemory) -> Work:
        """Blocks of packed rows straight into the bucket."""
        recv = memory.raw[: handle.plan.received[self.transport.rank]]
        return self.algorithm.send(load.rows, handle.plan, recv)

    def load_back(self, slot: int, y: Tensor, handle: Handle, memory: BucketMemory) -> Load:
        """Results are packed already; make room for those that come home."""
        rows = y[: handle.plan.received[self.transport.rank]].contiguous()
        home = self._staging[slot].take(len(handle.routing.tokens), y.shape[1], y.dtype)
        return Load(rows, home)

    def send_back(self, load: Load, handle: Handle, out: Tensor) -> Callable[[], None]:
        """Blocks of results, then their sum."""
        home, counts = load.extra, handle.plan.send_rows(self.transport.rank)
        assert home is not None
        work = self.algorithm.send_back(load.rows, handle.plan, home)

        def finish() -> None:
            work.wait()
            tokens = torch.split(handle.routing.tokens, counts)
            ordered_sum(torch.split(home, counts), tokens, out)

        return finish

    def release(self) -> None:
        """Give back what packed rows lay in."""
        self._staging.clear()


def _nothing() -> None:
    """All is done already."""
