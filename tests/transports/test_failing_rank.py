"""A rank that fails after the ranks agreed and before its rows are out: nobody waits for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import pytest
import torch

from crossdock.dispatch import Dispatcher, connect, errors, run_local
from crossdock.dispatch.onesided import mover as onesided
from crossdock.dispatch.transports.base import Transport
from tests.dispatch.cases import Attempt, Case, attempt, fill_results, one_step, send, simple_case
from tests.harness.child import Seat
from tests.harness.pool import Pools
from tests.harness.ranks import Ranks
from tests.transports.mpi_job import MpiJob
from tests.transports.over import Over
from tests.transports.test_hierarchical import OverLevels

# Each rank sends to all, and the time limit is far off.
CASE = simple_case([(6, 9, 5, 8)] * 2, timeout_s=30.0, unrouted=0.0, debug=False)
THREE = simple_case([(6, 9, 5)] * 2, timeout_s=30.0, unrouted=0.0, debug=False)
VICTIM = 1
SOON_S = 4.0  # about one, but for two cores and four processes


class Broken(RuntimeError):
    """What no code expects."""


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    """Processes of their own: torch names new groups by how many a rank has, broken ones too."""
    pools = Pools()
    yield pools
    pools.close()


def fail_while_moving(transport: Transport, case: Case, half: str, level: str | None = None):
    """A good step, then one in which the victim fails in a half; two more calls; leaving."""
    dispatcher = case.dispatcher(transport)
    one_step(dispatcher, transport, case, 0)
    victim = transport.rank == VICTIM
    tries: list[Attempt] = []
    if half != "combine":
        with failing(transport, dispatcher, half, level, victim):
            tries.append(attempt(lambda: one_step(dispatcher, transport, case, 1)))
    else:
        rows, handle = send(dispatcher, case.batch(1, transport.rank), transport.device)
        fill_results(case, 1, transport.rank, rows)
        with failing(transport, dispatcher, half, level, victim):
            tries.append(attempt(lambda: dispatcher.combine(rows.y, handle).clone()))
    tries.append(attempt(lambda: one_step(dispatcher, transport, case, 0)))
    tries.append(attempt(lambda: case.dispatcher(transport)))
    tries.append(attempt(lambda: dispatcher.abort(ValueError("leaving"))))
    return tries


def failing(
    transport: Transport, dispatcher: Dispatcher, half: str, level: str | None, victim: bool
):
    def fail(*_: Any) -> None:
        raise Broken("boom")

    if not victim:
        return nullcontext()
    if half == "before dispatch":
        return patch.object(dispatcher._steps, "_make_room", fail)
    if level is not None:
        return patch.object(getattr(transport, level), "_all_to_all", fail)
    if transport.name == "shm":
        return patch.object(onesided, "gather_rows" if half == "dispatch" else "ordered_sum", fail)
    return patch.object(transport, "_all_to_all", fail)


def check(by_rank: list[list[Attempt]]) -> None:
    for rank, (step, again, anew, left) in enumerate(by_rank):
        assert left.error is None, repr(left.error)
        if rank == VICTIM:
            assert type(step.error) is Broken, repr(step.error)
        elif step.error is not None:
            check_told(step)
        for later in (again, anew):
            check_told(later)
        assert anew.seconds < 1  # of a timeout of 30
        assert sum(call.seconds for call in (step, again, anew, left)) < SOON_S


def check_told(seen: Attempt) -> None:
    assert type(seen.error) is errors.PeerFailed, repr(seen.error)
    assert seen.error.ranks == (VICTIM,), seen.error
    assert f"rank {VICTIM}" in str(seen.error)
    assert "Broken: boom" in str(seen.error)


# "before dispatch": when ranks have agreed on it, and no row is under way.
_HALVES = ["before dispatch", "dispatch", "combine"]
HALVES = pytest.mark.parametrize("half", _HALVES)


@HALVES
def test_threads(half):
    check(run_local(4, lambda transport: fail_while_moving(transport, CASE, half)))


@HALVES
def test_gloo(pools, half):
    check(Ranks("gloo", pools)(4, fail_while_moving, CASE, half))


@HALVES
def test_shared_memory(pools, half):
    check(Over("shm", pools)(4, fail_while_moving, CASE, half))


@pytest.mark.parametrize("level", ["inner", "outer"])
@pytest.mark.parametrize("inner", ["shm", "gloo"])
def test_two_levels(pools, inner, level):
    over = OverLevels(pools, inner=inner)
    check(over(4, 2, fail_while_moving, CASE, "dispatch", level))


def lose_the_way(transport: Transport, case: Case) -> Attempt:
    """The victim cannot reach what its node's other rank offers it."""
    dispatcher = case.dispatcher(transport)
    if transport.rank == VICTIM:
        transport.inner._map = refuse  # type: ignore[attr-defined]
    return attempt(lambda: one_step(dispatcher, transport, case, 0))


def refuse(*_: Any) -> None:
    raise MemoryError("too many open files")


def test_a_way_that_only_one_node_knows_to_be_shut(pools):
    over = OverLevels(pools, inner="shm")
    for rank, seen in enumerate(over(4, 2, lose_the_way, CASE)):
        on_its_node = rank < 2
        assert type(seen.error) is (errors.CapacityError if on_its_node else errors.PeerFailed)
        assert f"local rank {VICTIM} cannot reach" in str(seen.error)
        assert seen.seconds < SOON_S


def listen(transport: Transport) -> dict[int, str] | None:
    """What the others hear of the victim while they wait for something that is no exchange."""
    assert transport.heard() is None
    # Who is slow may hear of it in here already.
    attempt(lambda: transport.exchange(torch.zeros(1, dtype=torch.int64)))
    if transport.rank == VICTIM:
        attempt(lambda: break_in_a_move(transport))
        return None
    began = time.monotonic()
    while transport.heard() is None and time.monotonic() - began < SOON_S:
        time.sleep(0.05)
    heard = transport.heard()
    transport.break_with(heard or {}, "the test")
    return heard


def break_in_a_move(transport: Transport) -> None:
    with transport.moving():
        raise Broken("boom")


def check_heard(by_rank: list[dict[int, str] | None]) -> None:
    del by_rank[VICTIM]
    assert by_rank == [{VICTIM: "failed: Broken: boom"}] * len(by_rank)


@pytest.mark.parametrize("kind", ["local", "gloo", "shm"])
def test_who_does_not_exchange_hears_of_a_failure_if_it_asks(pools, kind):
    check_heard((Over if kind == "shm" else Ranks)(kind, pools)(3, listen))


def fail_by_mpi(seat: Seat, link: Connection, half: str | None) -> None:
    transport = connect("mpi")
    link.send(listen(transport) if half is None else fail_while_moving(transport, THREE, half))
    link.recv()


@pytest.mark.parametrize("half", [*_HALVES, None])
def test_mpi(mpirun, half):
    job = MpiJob(3, fail_by_mpi, half)
    try:
        by_rank = []
        for link in job.links:
            assert link.poll(20), job.output.read_text()
            by_rank.append(link.recv())
        (check if half else check_heard)(by_rank)
        for link in job.links:
            link.send("leave")
        assert job.process.wait(20) != 0
    finally:
        job.close()


def test_a_failure_that_cannot_be_put_in_words_is_told_all_the_same():
    class Silent(Exception):
        def __str__(self) -> str:
            raise KeyError

    def fail(transport: Transport):
        started = time.monotonic()

        def move() -> None:
            with transport.moving():
                if transport.rank == VICTIM:
                    raise Silent
                transport._meet("a move")  # type: ignore[attr-defined]

        seen = attempt(move)
        return seen, time.monotonic() - started

    for rank, (seen, seconds) in enumerate(run_local(3, fail)):
        assert type(seen.error).__name__ == ("Silent" if rank == VICTIM else "PeerFailed")
        assert seconds < SOON_S
