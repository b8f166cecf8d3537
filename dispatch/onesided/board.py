"""The board: a record of every rank, and the epochs that make its memory safe to use again.

Two pages of R records each, used in turn: exchange n writes page n % 2. A rank writes its record of
exchange n + 2 only after it has seen everybody's counter at n + 1, and a rank counts to n + 1 only
after it has copied page n. So no record is overwritten before all have read it, and no rank is ever
more than one exchange ahead. Epochs count every exchange, also those that end in an error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crossdock.dispatch.onesided.signals import Counter, Signals

__all__ = ["Board"]


class Board:
    """Exchange of records through memory that all ranks see.

    Args:
        pages: int64 [2, R, W], shared by all ranks; W is the length of the longest record.
        signals: Of the same ranks.
        rank: This rank.
    """

    def __init__(self, pages: Tensor, signals: Signals, rank: int) -> None:
        self._pages = pages.numpy()
        self._signals = signals
        self._rank = rank
        self._epoch = 0

    def exchange(self, record: Tensor) -> Tensor:
        """Give int64 [n] (n <= W, equal on all ranks), get int64 [R, n]."""
        self._epoch += 1
        page = self._pages[self._epoch % 2, :, : len(record)]
        page[self._rank] = record.numpy()
        self._signals.post(Counter.RECORDS, self._epoch)
        everybody = range(len(page))
        self._signals.wait(Counter.RECORDS, everybody, self._epoch, "the exchange of records")
        return torch.from_numpy(page.copy())
