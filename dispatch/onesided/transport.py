"""What a one-sided transport can do beyond exchanging records and moving blocks of rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from crossdock.dispatch.transports.base import Transport

__all__ = ["OneSidedTransport", "SharedMemory"]


class SharedMemory(Protocol):
    """Memory of this rank that the others can reach.

    Attributes:
        buffer: uint8 [num_bytes], 64-byte aligned.
    """

    buffer: Tensor

    def settle(self) -> None:
        """Nobody else will ask for it any more: all have it, or none will."""


class OneSidedTransport(Transport):
    """A transport whose ranks write and read each other's memory."""

    @abstractmethod
    def allocate(self, num_bytes: int) -> SharedMemory:
        """Take shared memory; local.

        Raises:
            MemoryError: There is not as much.
        """

    @abstractmethod
    def share(
        self, offers: Sequence[tuple[SharedMemory, Sequence[int]]]
    ) -> list[list[tuple[Tensor, list[int]]]]:
        """Give every rank some memory and a few words about each piece, and get theirs. Collective.

        Args:
            offers: Memory of this rank and its words. As many pieces, with as many words (8 at
                most), on all ranks.

        Returns:
            For each piece, for each rank: its memory uint8 [its num_bytes], and its words.

        Raises:
            MemoryError: This rank cannot reach some other's. The others do not hear of it here.
            RankTimeout: A rank did not answer.
        """

    @abstractmethod
    def announce_rows(self) -> int:
        """Tell all ranks that what this one wrote to their memory in this step is there.

        Returns:
            The number of the step, equal on all ranks.
        """

    @abstractmethod
    def await_rows(self, ranks: Sequence[int], step: int) -> None:
        """Wait until the given ranks have announced the step; RankTimeout if they do not."""
