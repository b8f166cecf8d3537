"""Who writes where: exact places from the count matrix, no matter how bytes move.

A bucket holds its rows in ascending (source rank, token) order. So the first row of source s on
destination d is the sum of what sources below s send there, and a source's rows follow in token
order. Transports that move whole blocks take splits from here; transports that write row by row
take first places.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import numpy.typing as npt

__all__ = ["CountsOrFinder", "SlotPlan"]


CountsOrFinder = npt.NDArray[np.int64] | Callable[[], npt.NDArray[np.int64]]


class SlotPlan:
    """Places of all rows of one step.

    Args:
        counts: See below; or what finds them, if they are asked for.
        sums: [R], their sums over senders, if they are known.

    Attributes:
        received: [R] rows that each rank receives.
        total: Sum of ``sums``: 0 if nothing moves on any rank.
    """

    def __init__(self, counts: CountsOrFinder, sums: list[int] | None = None) -> None:
        self._given = counts
        self.received: list[int] = np.add.reduce(self.counts).tolist() if sums is None else sums
        self.total = sum(self.received)

    @cached_property
    def counts(self) -> npt.NDArray[np.int64]:
        """int64 [R, R], rows from (row index) to (column index); -1 where only the device knows."""
        return self._given() if callable(self._given) else self._given

    @cached_property
    def first(self) -> npt.NDArray[np.int64]:
        """int64 [R, R]: place in the bucket of (column) of the first row of (row index)."""
        first: npt.NDArray[np.int64] = self.counts.cumsum(0) - self.counts
        return first

    def pairs_to_hold(self, pairs: list[int]) -> list[int]:
        """[R] pairs for which each rank's experts need room, from the [R] that it receives."""
        return pairs

    def send_rows(self, rank: int) -> list[int]:
        """[R] rows that ``rank`` sends to each rank."""
        rows: list[int] = self.counts[rank].tolist()
        return rows

    def recv_rows(self, rank: int) -> list[int]:
        """[R] rows that ``rank`` receives from each rank."""
        rows: list[int] = self.counts[:, rank].tolist()
        return rows
