"""Slots and handles: which step's memory lives where, and until when."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from crossdock.dispatch import errors
from crossdock.dispatch.transports.base import Transport
from tests.dispatch.cases import (
    Attempt,
    Case,
    attempt,
    copy_rows,
    fill_results,
    finish_step,
    one_step,
    send,
    simple_case,
)
from tests.dispatch.oracle import check_step

CASE = simple_case([(6, 9), (4, 0), (11, 3)])


def check_same_error(tries: list[Attempt], kind: type[Exception]) -> None:
    for seen in tries:
        assert isinstance(seen.error, kind), repr(seen.error)
        assert seen.seconds < 1
    assert len({(type(seen.error), str(seen.error)) for seen in tries}) == 1, tries


def no_free_slot(transport: Transport) -> tuple:
    with CASE.dispatcher(transport) as dispatcher:
        rows, handle = send(dispatcher, CASE.batch(0, transport.rank), transport.device)
        seen = copy_rows(rows)
        refused = attempt(lambda: send(dispatcher, CASE.batch(1, transport.rank), transport.device))
        fill_results(CASE, 0, transport.rank, rows)
        seen.out = dispatcher.combine(rows.y, handle).cpu().clone()
        return refused, seen, one_step(dispatcher, transport, CASE, 1)


def test_a_dispatch_without_a_free_slot_is_refused_and_harms_nothing(ranks):
    results = ranks(2, no_free_slot)
    check_same_error([result[0] for result in results], errors.CrossdockError)
    assert "slot" in str(results[0][0].error)
    for rank, (_, first, second) in enumerate(results):
        check_step(CASE, 0, rank, first)
        check_step(CASE, 1, rank, second)


def two_in_flight(transport: Transport, order: tuple[int, int], algorithm: str) -> list:
    case = simple_case([(6, 9), (4, 0), (11, 3)], algorithm=algorithm)
    with case.dispatcher(transport, num_slots=2) as dispatcher:
        flying = [
            send(dispatcher, case.batch(step, transport.rank), transport.device) for step in (0, 1)
        ]
        seen = [copy_rows(rows) for rows, _ in flying]
        for step, (rows, _) in enumerate(flying):
            fill_results(case, step, transport.rank, rows)
        for step in order:
            rows, handle = flying[step]
            seen[step].out = dispatcher.combine(rows.y, handle).cpu().clone()
        return [*seen, one_step(dispatcher, transport, case, 2)]


@pytest.mark.parametrize("algorithm", ["alltoall", "allgather"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_slots_hold_two_steps_combined_in_either_order(ranks, order, algorithm):
    case = simple_case([(6, 9), (4, 0), (11, 3)], algorithm=algorithm)
    for rank, steps in enumerate(ranks(2, two_in_flight, order, algorithm)):
        for step, seen in enumerate(steps):
            check_step(case, step, rank, seen)


def by_handle(transport: Transport, case: Case) -> list:
    """Step 0, then the tokens of step 1 along step 0's routing, twice."""
    with case.dispatcher(transport) as dispatcher:
        rows, handle = send(dispatcher, case.batch(0, transport.rank), transport.device)
        steps = [finish_step(dispatcher, case, 0, rows, handle)]
        for step in (1, 2):
            x = case.batch(step, transport.rank).x.to(transport.device)
            rows, handle = dispatcher.dispatch(x, handle=handle)
            steps.append(finish_step(dispatcher, case, step, rows, handle))
        return steps


class SameRouting(Case):
    """Every step is routed as the first was."""

    def batch(self, step, rank):
        first = Case.batch(self, 0, rank)
        return (
            first
            if step == 0
            else type(first)(
                x=Case.batch(self, step, rank).x,
                topk_idx=first.topk_idx,
                topk_weights=first.topk_weights,
            )
        )


@pytest.mark.parametrize("wire", ["payload", "fp8"])
@pytest.mark.parametrize("algorithm", ["alltoall", "allgather"])
def test_dispatch_by_handle_routes_other_tokens_the_same_way(ranks, algorithm, wire):
    base = simple_case([(6, 9)] * 3, algorithm=algorithm, wire=wire)
    case = SameRouting(**{name: getattr(base, name) for name in base.__dataclass_fields__})
    for rank, steps in enumerate(ranks(2, by_handle, case)):
        for step, seen in enumerate(steps):
            check_step(case, step, rank, seen)


def misuse(transport: Transport, kind: str, rank: int) -> tuple[Attempt, object]:
    """``rank`` misuses a handle (the others call as they should), then all do a good step."""
    mine = transport.rank == rank
    device = transport.device
    with CASE.dispatcher(transport) as other, CASE.dispatcher(transport) as dispatcher:
        foreign_rows, foreign = send(other, CASE.batch(0, transport.rank), device)
        rows, handle = send(dispatcher, CASE.batch(0, transport.rank), device)
        y = rows.y.fill_(1.0)
        if kind == "combine with another dispatcher's handle":
            seen = attempt(lambda: dispatcher.combine(y, foreign if mine else handle))
        elif kind == "combine twice":
            dispatcher.combine(y, handle)
            again = attempt(lambda: dispatcher.combine(torch.zeros_like(y), handle))
            other.combine(foreign_rows.y.fill_(1.0), foreign)
            return again, one_step(dispatcher, transport, CASE, 1)
        elif kind == "combine y of the wrong hidden":
            wrong = torch.zeros(len(y), y.shape[1] + 1, dtype=y.dtype, device=device)
            seen = attempt(lambda: dispatcher.combine(wrong if mine else y, handle))
        elif kind == "combine y of the wrong length":
            wrong = torch.zeros(len(y) + 1, y.shape[1], dtype=y.dtype, device=device)
            seen = attempt(lambda: dispatcher.combine(wrong if mine else y, handle))
        elif kind == "combine something else":
            seen = attempt(lambda: dispatcher.combine(None if mine else y, handle))
        elif kind == "combine with None for a handle":
            seen = attempt(lambda: dispatcher.combine(y, None if mine else handle))
        elif kind == "combine into out of the wrong shape":
            out = torch.empty(1, 1, dtype=y.dtype, device=device) if mine else None
            seen = attempt(lambda: dispatcher.combine(y, handle, out=out))
        elif kind == "combine into out among the results":
            out = y[: handle.num_tokens] if mine else None
            seen = attempt(lambda: dispatcher.combine(y, handle, out=out))
        elif kind == "combine y of another dtype than the peers":
            seen = attempt(lambda: dispatcher.combine(y.float() if mine else y, handle))
        elif kind == "combine y of a dtype that is none":
            seen = attempt(lambda: dispatcher.combine(y.long() if mine else y, handle))
        # The step is still in flight: the right call works.
        dispatcher.combine(rows.y.fill_(1.0), handle)
        other.combine(foreign_rows.y.fill_(1.0), foreign)
        return seen, one_step(dispatcher, transport, CASE, 1)


@pytest.mark.parametrize(
    "kind",
    [
        "combine with another dispatcher's handle",
        "combine twice",
        "combine y of the wrong hidden",
        "combine y of the wrong length",
        "combine something else",
        "combine with None for a handle",
        "combine into out of the wrong shape",
        "combine y of a dtype that is none",
    ],
)
def test_a_misused_handle_raises_on_every_rank_and_the_step_can_be_finished(ranks, kind):
    results = ranks(2, misuse, kind, 1)
    check_same_error([seen for seen, _ in results], errors.RoutingError)
    for rank, (_, good) in enumerate(results):
        check_step(CASE, 1, rank, good)
    if kind != "combine twice":
        assert results[0][0].error.ranks == (1,)


def test_results_of_different_dtypes_disagree(ranks):
    results = ranks(2, misuse, "combine y of another dtype than the peers", 1)
    check_same_error([seen for seen, _ in results], errors.DisagreementError)
    for rank, (_, good) in enumerate(results):
        check_step(CASE, 1, rank, good)


def stale(transport: Transport, kind: str) -> tuple[Attempt, object]:
    """Every rank dispatches or combines by a handle that is stale."""
    batch = CASE.batch(0, transport.rank)
    x = batch.x.to(transport.device)
    with CASE.dispatcher(transport) as dispatcher, CASE.dispatcher(transport) as other:
        rows, handle = send(dispatcher, batch, transport.device)
        dispatcher.combine(rows.y.fill_(1.0), handle)
        if kind == "dispatch after unlock":
            dispatcher.lock()
            dispatcher.unlock()
            seen = attempt(lambda: dispatcher.dispatch(x, handle=handle))
        elif kind == "dispatch by another dispatcher's handle":
            seen = attempt(lambda: other.dispatch(x, handle=handle))
        elif kind == "dispatch after close":
            dispatcher.close()
            seen = attempt(lambda: dispatcher.dispatch(x, handle=handle))
            return seen, one_step(other, transport, CASE, 1)
        return seen, one_step(dispatcher, transport, CASE, 1)


@pytest.mark.parametrize(
    "kind",
    ["dispatch after unlock", "dispatch by another dispatcher's handle", "dispatch after close"],
)
def test_a_stale_handle_is_refused_and_the_next_step_works(ranks, kind):
    results = ranks(2, stale, kind)
    for seen, _ in results:
        assert isinstance(seen.error, errors.CrossdockError), repr(seen.error)
        assert seen.seconds < 1
    for rank, (_, good) in enumerate(results):
        check_step(CASE, 1, rank, good)


def with_a_step_in_flight(transport: Transport, operation: str) -> tuple[Attempt, Attempt, object]:
    with CASE.dispatcher(transport) as dispatcher:
        if operation == "unlock":
            one_step(dispatcher, transport, CASE, 0)
            dispatcher.lock()
        rows, handle = send(dispatcher, CASE.batch(1, transport.rank), transport.device)
        seen = copy_rows(rows)
        refused = attempt(getattr(dispatcher, operation))
        fill_results(CASE, 1, transport.rank, rows)
        combined = attempt(lambda: dispatcher.combine(rows.y, handle).cpu().clone())
        seen.out = combined.value
        return refused, combined, seen


@pytest.mark.parametrize("operation", ["lock", "unlock"])
def test_a_step_in_flight_is_finished_or_refused_but_never_lost(ranks, operation):
    """Either lock and unlock wait for it (an error, and combine works), or its handle is stale."""
    results = ranks(2, with_a_step_in_flight, operation)
    if results[0][0].error is not None:
        check_same_error([refused for refused, _, _ in results], errors.CrossdockError)
        for rank, (_, combined, seen) in enumerate(results):
            assert combined.error is None, repr(combined.error)
            check_step(CASE, 1, rank, seen)
    else:
        check_same_error([combined for _, combined, _ in results], errors.RoutingError)


def unlocked_while_rank_1_has_not_waited(
    transport: Transport, half: str
) -> tuple[object, Attempt, object]:
    """The step that was on its way, a combine by its handle, and a step after the unlock."""
    device = transport.device
    with CASE.dispatcher(transport) as dispatcher:
        batch = CASE.batch(1, transport.rank)
        pending = dispatcher.dispatch_send(*batch.to(device))
        if half == "combine":
            rows, handle = pending.wait()
            seen = copy_rows(rows)
            fill_results(CASE, 1, transport.rank, rows)
            pending = dispatcher.combine_send(rows.y, handle)
        if transport.rank != 1:
            pending.wait()
        dispatcher.unlock()
        result = pending.wait()
        if half == "dispatch":
            rows, handle = result
            seen = copy_rows(rows)
        else:
            seen.out = result.cpu().clone()
        refused = attempt(lambda: dispatcher.combine(rows.y, handle))
        return seen, refused, one_step(dispatcher, transport, CASE, 2)


@pytest.mark.parametrize("half", ["dispatch", "combine"])
def test_unlock_waits_for_staged_calls(ranks, half):
    results = ranks(2, unlocked_while_rank_1_has_not_waited, half)
    check_same_error([refused for _, refused, _ in results], errors.HandleError)
    for rank, (seen, _, good) in enumerate(results):
        assert (seen.out is None) == (half == "dispatch")
        check_step(CASE, 1, rank, seen)
        check_step(CASE, 2, rank, good)


def armed_again_before_its_combine_is_home(transport: Transport) -> list[object]:
    """One handle in two slots; unlock, and two steps that need both."""
    with CASE.dispatcher(transport, num_slots=2) as dispatcher:
        batch = CASE.batch(1, transport.rank)
        rows, handle = send(dispatcher, batch, transport.device)
        fill_results(CASE, 1, transport.rank, rows)
        first = dispatcher.combine_send(rows.y, handle)
        rows, handle = dispatcher.dispatch(batch.to(transport.device)[0], handle=handle)
        fill_results(CASE, 1, transport.rank, rows)
        second = dispatcher.combine_send(rows.y, handle)
        first.wait()
        dispatcher.unlock()
        two = [send(dispatcher, CASE.batch(s, transport.rank), transport.device) for s in (0, 2)]
        second.wait()
        return [
            finish_step(dispatcher, CASE, step, *flying)
            for step, flying in zip((0, 2), two, strict=True)
        ]


def test_a_handle_armed_again_is_waited_for_each_time(ranks):
    for rank, outs in enumerate(ranks(2, armed_again_before_its_combine_is_home)):
        for step, seen in zip((0, 2), outs, strict=True):
            check_step(CASE, step, rank, seen)


def waited_for_after_close(transport: Transport, half: str) -> Attempt:
    dispatcher = CASE.dispatcher(transport)
    pending = dispatcher.dispatch_send(*CASE.batch(1, transport.rank).to(transport.device))
    if half == "combine":
        rows, handle = pending.wait()
        pending = dispatcher.combine_send(rows.y.fill_(1.0), handle)
    dispatcher.close()
    return attempt(pending.wait)


@pytest.mark.parametrize("half", ["dispatch", "combine"])
def test_what_is_waited_for_after_close_is_refused(ranks, half):
    for seen in ranks(2, waited_for_after_close, half):
        assert isinstance(seen.error, errors.PeerClosed), repr(seen.error)
        assert seen.seconds < 1


def x_of_other_length(transport: Transport) -> tuple[Attempt, object]:
    batch = CASE.batch(0, transport.rank)
    with CASE.dispatcher(transport) as dispatcher:
        rows, handle = send(dispatcher, batch, transport.device)
        dispatcher.combine(rows.y.fill_(1.0), handle)
        x = batch.x[1:] if transport.rank == 1 else batch.x
        seen = attempt(lambda: dispatcher.dispatch(x.to(transport.device), handle=handle))
        return seen, one_step(dispatcher, transport, CASE, 1)


def test_dispatch_by_handle_wants_as_many_tokens_as_before(ranks):
    results = ranks(2, x_of_other_length)
    check_same_error([seen for seen, _ in results], errors.RoutingError)
    assert results[0][0].error.ranks == (1,)
    for rank, (_, good) in enumerate(results):
        check_step(CASE, 1, rank, good)


def wrongly_by_handle(transport: Transport, kind: str) -> tuple[Attempt, object]:
    """Rank 1 says something else than the plain dispatch by handle of the others."""
    batch = CASE.batch(0, transport.rank)
    x, topk_idx, topk_weights = batch.to(transport.device)
    with CASE.dispatcher(transport) as dispatcher:
        rows, handle = send(dispatcher, batch, transport.device)
        dispatcher.combine(rows.y.fill_(1.0), handle)
        calls = {
            "a handle and ids": lambda: dispatcher.dispatch(
                x, topk_idx, topk_weights, handle=handle
            ),
            "no handle at all": lambda: dispatcher.dispatch(x, handle="the last one"),
        }
        call = calls[kind] if transport.rank == 1 else lambda: dispatcher.dispatch(x, handle=handle)
        seen = attempt(call)
        return seen, one_step(dispatcher, transport, CASE, 1)


@pytest.mark.parametrize("kind", ["a handle and ids", "no handle at all"])
def test_dispatch_wants_either_a_handle_or_ids(ranks, kind):
    results = ranks(2, wrongly_by_handle, kind)
    check_same_error([seen for seen, _ in results], errors.RoutingError)
    assert results[0][0].error.ranks == (1,)
    for rank, (_, good) in enumerate(results):
        check_step(CASE, 1, rank, good)


def different_handles(transport: Transport, operation: str) -> Attempt:
    """Both ranks call the same operation, each with the handle of another step."""
    device = transport.device
    with CASE.dispatcher(transport, num_slots=2) as dispatcher:
        flying = [send(dispatcher, CASE.batch(s, transport.rank), device) for s in (0, 1)]
        pick = transport.rank
        if operation == "combine":
            rows, handle = flying[pick]
            return attempt(lambda: dispatcher.combine(rows.y.fill_(1.0), handle))
        for rows, handle in flying:
            dispatcher.combine(rows.y.fill_(1.0), handle)
        x = CASE.batch(pick, transport.rank).x.to(device)
        return attempt(lambda: dispatcher.dispatch(x, handle=flying[pick][1]))


@pytest.mark.parametrize("operation", ["combine", "dispatch"])
def test_ranks_that_mean_different_steps_disagree(ranks, operation):
    check_same_error(ranks(2, different_handles, operation), errors.DisagreementError)


def combine_begun_twice(transport: Transport) -> tuple[Attempt, Any]:
    with CASE.dispatcher(transport) as dispatcher:
        rows, handle = send(dispatcher, CASE.batch(0, transport.rank), transport.device)
        fill_results(CASE, 0, transport.rank, rows)
        pending = dispatcher.combine_send(rows.y, handle)
        seen = attempt(lambda: dispatcher.combine_send(rows.y, handle))
        pending.wait()
        return seen, one_step(dispatcher, transport, CASE, 1)


def test_a_combine_that_has_begun_is_the_only_one(ranks):
    results = ranks(2, combine_begun_twice)
    check_same_error([result[0] for result in results], errors.HandleError)
    for rank, (_, good) in enumerate(results):
        check_step(CASE, 1, rank, good)


def warmed_up_in_inference_mode(transport: Transport) -> Any:
    with CASE.dispatcher(transport) as dispatcher:
        with torch.inference_mode(transport.rank == 1):
            one_step(dispatcher, transport, CASE, 0)
        return one_step(dispatcher, transport, CASE, 1)


def test_memory_taken_in_inference_mode_serves_outside_of_it(ranks):
    for rank, good in enumerate(ranks(2, warmed_up_in_inference_mode)):
        check_step(CASE, 1, rank, good)
