"""run_local: N ranks in one process, and what happens when one fails."""

from __future__ import annotations

import time
import traceback

import pytest

from crossdock.dispatch import Dispatcher, errors, run_local
from tests.dispatch.cases import all_steps, attempt, one_step, send, simple_case


def test_results_come_in_rank_order():
    seen = run_local(3, lambda transport: (transport.rank, transport.world_size, transport.name))
    assert seen == [(rank, 3, seen[0][2]) for rank in range(3)]


@pytest.mark.parametrize("world_size", [0, -1])
def test_no_ranks_is_refused(world_size):
    with pytest.raises(ValueError, match=str(world_size)):
        run_local(world_size, lambda transport: None)


def test_the_first_failure_is_raised_with_the_others_attached():
    def fail(transport):
        time.sleep(0.1 * transport.rank)
        raise KeyError(f"number {transport.rank}")

    with pytest.raises(KeyError, match="number 0") as caught:
        run_local(3, fail)
    told = "".join(traceback.format_exception(caught.value))
    assert "number 1" in told
    assert "number 2" in told


def test_a_rank_that_fails_outside_a_dispatcher_frees_those_that_wait():
    case = simple_case([(3, 4, 5)], timeout_s=60.0)

    def fail(transport):
        if transport.rank == 1:
            raise KeyError("before anything")
        all_steps(transport, case)

    started = time.monotonic()
    with pytest.raises(KeyError, match="before anything"):
        run_local(3, fail)
    assert time.monotonic() - started < 2


def test_a_rank_that_returns_early_frees_those_that_wait():
    case = simple_case([(3, 4, 5)], timeout_s=3.0)

    def leave(transport):
        return None if transport.rank == 1 else all_steps(transport, case)

    started = time.monotonic()
    with pytest.raises(errors.CrossdockError, match="1"):
        run_local(3, leave)
    assert time.monotonic() - started < 5


def test_a_rank_that_never_answers_is_named_and_the_transport_stays_broken():
    case = simple_case([(3, 4, 5)], timeout_s=0.5)

    def sleep_on_rank_one(transport):
        dispatcher = case.dispatcher(transport)
        one_step(dispatcher, transport, case, 0)
        if transport.rank == 1:
            time.sleep(1.5)
            return None
        tries = [
            attempt(lambda: send(dispatcher, case.batch(0, transport.rank), transport.device))
            for _ in range(2)
        ]
        tries.append(attempt(dispatcher.close))
        return tries

    for tries in run_local(3, sleep_on_rank_one)[::2]:
        first, again, close = tries
        assert isinstance(first.error, errors.RankTimeout), repr(first.error)
        assert first.error.ranks == (1,)
        assert first.seconds < 1.3
        assert isinstance(again.error, errors.RankTimeout)
        assert str(again.error) == str(first.error)
        assert again.seconds < 0.4
        assert close.error is None
        assert close.seconds < 0.4


def test_runs_do_not_share_anything():
    case = simple_case([(3, 4)])
    first, second = (run_local(2, lambda transport: all_steps(transport, case)) for _ in range(2))
    for steps, again in zip(first, second, strict=True):
        assert steps[0].out.equal(again[0].out)


def test_a_dispatcher_left_open_holds_nothing_up():
    case = simple_case([(3, 4)])

    def open_only(transport) -> bool:
        return isinstance(case.dispatcher(transport), Dispatcher)

    assert run_local(2, open_only) == [True, True]
