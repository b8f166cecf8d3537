"""Counters through which ranks tell each other how far they are."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

__all__ = ["Counter", "Signals"]


class Counter(IntEnum):
    """What is counted; every rank has one 64-bit counter of each, which only it writes."""

    RECORDS = 0
    ROWS = 1


class Signals(Protocol):
    """Counters of all ranks, that only grow."""

    def post(self, counter: Counter, value: int) -> None:
        """Set this rank's counter, after all that this rank has written (a release)."""

    def wait(self, counter: Counter, ranks: Sequence[int], value: int, during: str) -> None:
        """Return once all ``ranks`` have counted to ``value``.

        What they wrote before is there then (an acquire).

        Raises:
            RankTimeout: Some did not get there.
        """
