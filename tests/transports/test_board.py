"""The board's epochs, with threads for ranks and sleep wherever it could hurt."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from crossdock.dispatch.onesided.board import Board
from crossdock.dispatch.onesided.signals import Counter


class SlowSignals:
    """Counters of one process' threads; posts and waits take a random while."""

    def __init__(self, rank: int, counts: list[int], changed: threading.Condition) -> None:
        self.rank, self.counts, self.changed = rank, counts, changed
        self.rng = random.Random(rank)

    def post(self, counter: Counter, value: int) -> None:
        self.nap()
        with self.changed:
            self.counts[self.rank] = value
            self.changed.notify_all()

    def wait(self, counter: Counter, ranks: Sequence[int], value: int, during: str) -> None:
        with self.changed:
            reached = self.changed.wait_for(lambda: all(self.counts[r] >= value for r in ranks), 10)
        assert reached
        ahead = max(self.counts) - value
        assert ahead <= 1, "a rank is more than one exchange ahead"
        self.nap()

    def nap(self) -> None:
        if self.rng.random() < 0.4:
            time.sleep(self.rng.random() * 0.003)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_no_record_is_overwritten_before_all_have_read_it(world_size):
    pages = torch.zeros(2, world_size, 8, dtype=torch.int64)
    counts, changed = [0] * world_size, threading.Condition()

    def live(rank: int) -> None:
        board = Board(pages, SlowSignals(rank, counts, changed), rank)
        for turn in range(60):
            words = 1 + turn % 8
            seen = board.exchange(torch.full((words,), 1000 * turn + rank))
            expected = 1000 * turn + torch.arange(world_size)
            assert torch.equal(seen, expected[:, None].expand(-1, words)), turn

    with ThreadPoolExecutor(world_size) as pool:
        for done in [pool.submit(live, rank) for rank in range(world_size)]:
            done.result()
