"""A rank that is killed or stopped: the rest name it in time, and can leave.

Nobody kills the survivors here, as a launcher's agent would.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import pytest

from crossdock.dispatch import Dispatcher, errors
from crossdock.dispatch.transports.base import Transport
from tests.dispatch.cases import attempt, send, simple_case
from tests.harness.child import Seat, open_transport
from tests.harness.lost import LoneRank, lone_ranks

TIMEOUT_S = 2.0
SLACK_S = 1.5  # two cores, four processes
EXIT_S = 2.5
CASE = simple_case([(6, 9, 5), (4, 7, 3)], timeout_s=TIMEOUT_S)


@dataclass(frozen=True, kw_only=True)
class Loss:
    """How a survivor lost its peers: the first error, then what later calls did."""

    error: BaseException
    raised_at: float  # time.monotonic, one clock for all processes of a machine
    later: list[tuple[str, BaseException | None, float]]


def live(seat: Seat, link: Connection, victims: tuple[int, ...], number: int, when: str) -> None:
    """Work until a peer is lost; victims send themselves the signal at the given point."""
    transport = open_transport(seat)
    fate = number if seat.rank in victims else 0
    started = attempt(lambda: start(transport, link, fate if when == "construction" else 0))
    if started.error is not None:
        tell(link, transport, None, started.error)
        return
    dispatcher = started.value
    lost = attempt(lambda: work(dispatcher, transport, link, fate, when))
    tell(link, transport, dispatcher, lost.error)


def start(transport: Transport, link: Connection, fate: int) -> Dispatcher:
    meet_fate(link, fate)
    return CASE.dispatcher(transport)


def work(
    dispatcher: Dispatcher, transport: Transport, link: Connection, fate: int, when: str
) -> None:
    for step in range(1_000_000):
        ripe = fate if step == 3 else 0
        if when == "close" and step == 3:
            meet_fate(link, fate)
            dispatcher.close()
            raise AssertionError("closed together with a lost rank")
        meet_fate(link, ripe if when == "dispatch" else 0)
        rows, handle = send(dispatcher, CASE.batch(step % 2, transport.rank), transport.device)
        meet_fate(link, ripe if when == "combine" else 0)
        dispatcher.combine(rows.y.fill_(1.0), handle)
        if when == "any time" and step == 3:
            link.send(("busy", time.monotonic()))


def meet_fate(link: Connection, number: int) -> None:
    if number:
        link.send(("gone", time.monotonic()))
        os.kill(os.getpid(), number)


def tell(
    link: Connection,
    transport: Transport,
    dispatcher: Dispatcher | None,
    error: BaseException | None,
) -> None:
    raised_at = time.monotonic()
    calls = {"another dispatcher": lambda: CASE.dispatcher(transport)}
    if dispatcher is not None:
        batch = CASE.batch(0, transport.rank)
        calls |= {
            "dispatch": lambda: send(dispatcher, batch, transport.device),
            "lock": dispatcher.lock,
            "close": dispatcher.close,
        }
    calls["close transport"] = transport.close
    later = []
    for name, call in calls.items():
        seen = attempt(call)
        later.append((name, seen.error, seen.seconds))
    link.send(Loss(error=error, raised_at=raised_at, later=later))
    link.recv()  # stay until every survivor has said whom it lost


def check_loss(loss: Loss, victims: tuple[int, ...], gone_at: float) -> None:
    assert isinstance(loss.error, errors.RankTimeout), repr(loss.error)
    assert loss.error.ranks == victims, loss.error
    for victim in victims:
        assert str(victim) in str(loss.error)
    assert loss.raised_at - gone_at < TIMEOUT_S + SLACK_S
    for name, error, seconds in loss.later:
        assert seconds < 0.5, f"{name} took {seconds} s"
        if name.startswith("close"):
            assert error is None, f"{name}: {error!r}"
        else:
            assert isinstance(error, errors.RankTimeout), f"{name}: {error!r}"
            assert error.ranks == victims, name


def watch(
    victims: tuple[int, ...],
    number: int,
    when: str,
    *,
    rank0_hosts_store: bool = False,
) -> None:
    with lone_ranks(3, live, victims, number, when, rank0_hosts_store=rank0_hosts_store) as ranks:
        if when == "any time":
            for rank in ranks:
                assert rank.receive()[0] == "busy"
            for victim in victims:
                os.kill(ranks[victim].process.pid, number)
            gone_at = time.monotonic()
        else:
            gone_at = max(ranks[victim].receive()[1] for victim in victims)
        survivors = [rank for rank in ranks if rank.seat.rank not in victims]
        for rank in survivors:
            check_loss(rank.receive(TIMEOUT_S + 10), victims, gone_at)
        check_exit(survivors)


def check_exit(survivors: list[LoneRank]) -> None:
    for rank in survivors:
        rank.link.send("leave")
    for rank in survivors:
        assert rank.seconds_to_exit(2 * EXIT_S) < EXIT_S
        assert rank.process.exitcode == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("when", ["construction", "dispatch", "combine", "close"])
def test_a_lost_rank_is_named_and_the_rest_can_leave(number, when):
    watch((1,), number, when)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_lost_at_no_particular_moment(number):
    watch((2,), number, "any time")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_losing_rank_zero_and_the_store_it_hosts(number):
    watch((0,), number, "dispatch", rank0_hosts_store=True)


def test_two_lost_ranks_are_both_named():
    watch((0, 2), signal.SIGSTOP, "dispatch")


def sleep_in_experts(seat: Seat, link: Connection) -> None:
    """Rank 1 computes for longer than the timeout: alive, and still lost to the others."""
    transport = open_transport(seat)
    dispatcher = CASE.dispatcher(transport)
    rows, handle = send(dispatcher, CASE.batch(0, transport.rank), transport.device)
    rows.y.fill_(1.0)
    if seat.rank == 1:
        link.send(("gone", time.monotonic()))
        time.sleep(TIMEOUT_S + 1)
    lost = attempt(lambda: dispatcher.combine(rows.y, handle))
    tell(link, transport, dispatcher, lost.error)


def test_a_rank_that_comes_back_too_late_is_named_and_raises_too():
    with lone_ranks(3, sleep_in_experts) as ranks:
        gone_at = ranks[1].receive()[1]
        for rank in (ranks[0], ranks[2]):
            check_loss(rank.receive(TIMEOUT_S + 10), (1,), gone_at)
        late = ranks[1].receive(2 * TIMEOUT_S + 10)
        assert isinstance(late.error, errors.CrossdockError), repr(late.error)
        check_exit(ranks)
