"""The harness itself: whatever happens to a rank, the test hears of it at once and all of it."""

from __future__ import annotations

import os
import signal
import time

import pytest

from crossdock.dispatch.transports.base import Transport
from tests.harness.pool import Pools, RanksFailed


def whoami(transport: Transport, word: str) -> tuple[int, int, str, int]:
    return transport.rank, transport.world_size, word, os.getpid()


def raise_on_rank_one(transport: Transport) -> None:
    if transport.rank == 1:
        raise KeyError("lost my key")


def die_on_rank_one(transport: Transport) -> None:
    if transport.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_forever_here()


def hang_on_rank_one(transport: Transport) -> None:
    if transport.rank == 1:
        wait_forever_here()


def wait_forever_here() -> None:
    time.sleep(1000)


@pytest.fixture
def own_pools():
    pools = Pools()
    yield pools
    pools.close()


def test_results_come_in_rank_order_from_processes_that_stay(own_pools):
    first = own_pools.get(2).run(whoami, "hello")
    second = own_pools.get(2).run(whoami, "again")
    assert [result[:3] for result in first] == [(0, 2, "hello"), (1, 2, "hello")]
    assert [result[3] for result in first] == [result[3] for result in second]
    assert os.getpid() not in [result[3] for result in first]


def test_a_failure_shows_the_traceback_and_the_next_test_gets_a_fresh_pool(own_pools):
    with pytest.raises(RanksFailed, match="rank 1") as caught:
        own_pools.get(2).run(raise_on_rank_one)
    assert "lost my key" in str(caught.value)
    assert "in raise_on_rank_one" in str(caught.value)
    assert len(own_pools.get(2).run(whoami, "fresh")) == 2


def test_a_dead_rank_and_those_it_leaves_hanging_are_all_shown(own_pools, monkeypatch):
    monkeypatch.setattr("tests.harness.pool.GRACE_S", 0.5)
    pool = own_pools.get(2)
    pids = pool.pids
    started = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        pool.run(die_on_rank_one)
    assert time.monotonic() - started < 10
    assert "rank 1: died, exit code -9" in str(caught.value)
    assert "rank 0: did not answer" in str(caught.value)
    assert "in wait_forever_here" in str(caught.value)
    assert not any(alive(pid) for pid in pids)


def test_a_rank_that_hangs_is_reported_with_its_stack(own_pools):
    with pytest.raises(RanksFailed, match="rank 1: did not answer") as caught:
        own_pools.get(2).run(hang_on_rank_one, hang_s=1.0)
    assert "in wait_forever_here" in str(caught.value)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
