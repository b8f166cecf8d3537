"""Who writes where: exact places from the count matrix, no matter how bytes move.

A bucket holds its rows in ascending (source rank, token) order. So the first row of source s on
destination d is the sum of what sources below s send there, and a source's rows follow in token
order. Transports that move whole blocks take splits from here; transports that write row by row
take first places.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

__all__ = ["SlotPlan"]


class SlotPlan:
    """Places of all rows of one step.

    Args:
        counts: int64 [R, R], rows from (row index) to (column index); all -1 where only the device
            knows.
        sums: [R], its sums over senders, if they are known.

    Attributes:
        counts: As given.
        received: [R] rows that each rank receives.
        total: Sum of ``sums``: 0 if nothing moves on any rank.
    """

    def __init__(self, counts: npt.NDArray[np.int64], sums: list[int] | None = None) -> None:
        self.counts = counts
        self.received: list[int] = np.add.reduce(counts).tolist() if sums is None else sums
        self.total = sum(self.received)

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
