"""Buckets: powers of two, grown by need, never shrunk, refused alike on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from crossdock.dispatch import errors
from crossdock.dispatch.transports.base import Transport
from tests.dispatch.cases import (
    Attempt,
    Case,
    Step,
    all_steps,
    attempt,
    one_step,
    send,
    simple_case,
)
from tests.dispatch.oracle import check_step, check_steps


def to_rank_zero(*tokens: tuple[int, ...], **settings: Any) -> Case:
    """All tokens go to rank 0's only expert: its rows are the step's tokens."""
    world_size = len(tokens[0])
    return simple_case(tokens, num_experts=world_size, top_k=1, routing="one expert", **settings)


def next_pow2(rows: int) -> int:
    return 0 if rows == 0 else 1 << (rows - 1).bit_length()


def capacities(results: list, rank: int) -> list[int]:
    return [step.capacity for step in results[rank]]


def test_nothing_is_reserved_before_the_first_row(ranks):
    case = to_rank_zero((0, 0), (0, 0))
    assert [capacities(ranks(2, all_steps, case), rank) for rank in (0, 1)] == [[0, 0], [0, 0]]


def test_a_rank_that_receives_nothing_keeps_no_bucket(ranks):
    assert capacities(ranks(2, all_steps, to_rank_zero((5, 6))), 1) == [0]


def test_a_fresh_bucket_is_the_next_power_of_two(ranks):
    for tokens, capacity in (((1, 0), 1), ((1, 1), 2), ((3, 2), 8), ((8, 8), 16), ((9, 8), 32)):
        assert capacities(ranks(2, all_steps, to_rank_zero(tokens)), 0) == [capacity]


def test_a_bucket_grows_by_need_and_never_shrinks(ranks):
    case = to_rank_zero((1, 1), (4, 5), (0, 0), (1, 0), (8, 8), (9, 8))
    results = ranks(2, all_steps, case)
    assert capacities(results, 0) == [2, 16, 16, 16, 16, 32]
    check_steps(case, results)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=5))
@settings(max_examples=25)
def test_capacity_is_the_largest_need_so_far_rounded_up(local, tokens):
    results = local(2, all_steps, to_rank_zero(*tokens))
    largest = 0
    for need, capacity in zip(map(sum, tokens), capacities(results, 0), strict=True):
        largest = max(largest, need)
        assert capacity == next_pow2(largest)


@pytest.mark.parametrize("algorithm", ["alltoall", "allgather"])
def test_every_tensor_of_the_rows_has_the_buckets_length(ranks, algorithm):
    for lengths in ranks(2, lengths_of_rows, simple_case([(5, 6)], algorithm=algorithm)):
        assert len(set(lengths)) == 1


def lengths_of_rows(transport: Transport, case: Case) -> list[int]:
    with case.dispatcher(transport) as dispatcher:
        rows, handle = send(dispatcher, case.batch(0, transport.rank), transport.device)
        lengths = [
            len(tensor)
            for tensor in (rows.x, rows.topk_idx, rows.topk_weights, rows.source, rows.y)
        ]
        dispatcher.combine(rows.y, handle)
        return [*lengths, rows.capacity]


def past_the_end(transport: Transport, case: Case) -> list:
    with case.dispatcher(transport) as dispatcher:
        rows, handle = send(dispatcher, case.batch(0, transport.rank), transport.device)
        ids = rows.topk_idx[rows.num_rows :].tolist()
        dispatcher.combine(rows.y, handle)
        return ids


def test_ids_past_the_rows_are_minus_one(ranks):
    tails = ranks(2, past_the_end, to_rank_zero((5, 4)))
    assert tails == [[[-1]] * 7, []]


# ---- fixed buckets and locking --------------------------------------------------------------


def try_steps(
    transport: Transport,
    case: Case,
    lock_after: int | None = None,
    pair_capacity: dict[int, int] | None = None,
) -> list[Attempt]:
    """Every step of the case, each of which may fail; locks after step ``lock_after``."""
    with case.dispatcher(transport) as dispatcher:
        tries = []
        for step in range(case.num_steps):
            tries.append(attempt(lambda step=step: one_step(dispatcher, transport, case, step)))
            if step == lock_after:
                dispatcher.lock(pair_capacity=(pair_capacity or {}).get(transport.rank))
        return tries


def check_refused(tries: list[Attempt], *, rank: int, need: int, capacity: int, setting: str):
    """The same LockedError on every rank, at once, with all that a user must know."""
    assert len({str(seen.error) for seen in tries}) == 1, tries
    for seen in tries:
        assert type(seen.error) is errors.LockedError
        assert seen.error.ranks == (rank,)
        assert seen.seconds < 1
    message = str(tries[0].error)
    for part in (f"rank {rank}", str(need), str(capacity), setting):
        assert part in message, message


def check_good(case: Case, step: int, results: list[list[Attempt]]) -> None:
    for rank, tries in enumerate(results):
        assert tries[step].error is None, tries[step].error
        check_step(case, step, rank, tries[step].value)


def test_a_fixed_bucket_is_there_at_once_and_rounded_up(ranks):
    case = to_rank_zero((3, 2), (0, 0), bucket=100)
    results = ranks(2, all_steps, case)
    assert [capacities(results, rank) for rank in (0, 1)] == [[128, 128], [128, 128]]
    check_steps(case, results)


def test_a_fixed_bucket_refuses_one_row_more_on_every_rank(ranks):
    case = to_rank_zero((4, 4), (5, 4), (1, 1), (4, 4), bucket=8)
    results = ranks(2, try_steps, case)
    check_refused([tries[1] for tries in results], rank=0, need=9, capacity=8, setting="bucket")
    for step in (0, 2, 3):
        check_good(case, step, results)


@pytest.mark.parametrize("algorithm", ["alltoall", "allgather"])
def test_a_locked_bucket_refuses_on_every_rank_and_the_next_step_works(ranks, algorithm):
    case = to_rank_zero((4, 3, 0), (5, 4, 0), (4, 4, 0), (1, 0, 2), algorithm=algorithm)
    results = ranks(3, try_steps, case, 0)
    check_refused([tries[1] for tries in results], rank=0, need=9, capacity=8, setting="lock")
    for step in (0, 2, 3):
        check_good(case, step, results)
        assert results[0][step].value.capacity == 8


def test_the_rank_that_is_too_small_is_named_where_it_is_not_the_first(ranks):
    case = simple_case(
        [(4, 3), (5, 4), (4, 4)], num_experts=2, top_k=1, owner=[1, 0], routing="one expert"
    )
    results = ranks(2, try_steps, case, 0)
    check_refused([tries[1] for tries in results], rank=1, need=9, capacity=8, setting="lock")
    check_good(case, 2, results)


def test_pairs_beyond_one_ranks_capacity_are_refused_on_every_rank(ranks):
    """Rank 1's experts have scratch for 6 pairs; the others' may grow."""
    tokens = [(3, 3), (4, 3), (3, 3)]
    case = simple_case(
        tokens, num_experts=2, top_k=1, owner=[1, 0], routing="one expert", unrouted=0.0
    )
    results = ranks(2, try_steps, case, 0, {1: 6})
    check_refused([tries[1] for tries in results], rank=1, need=7, capacity=6, setting="pair")
    for step in (0, 2):
        check_good(case, step, results)


def test_a_need_equal_to_the_capacity_is_allowed(ranks):
    case = to_rank_zero((4, 4), (4, 4), (8, 0))
    results = ranks(2, try_steps, case, 0, {0: 8})
    for step in range(3):
        check_good(case, step, results)


def locked_before_the_first_row(transport: Transport, case: Case) -> list[Attempt]:
    with case.dispatcher(transport) as dispatcher:
        dispatcher.lock()
        return [
            attempt(lambda step=step: one_step(dispatcher, transport, case, step))
            for step in range(case.num_steps)
        ]


def test_a_dispatcher_locked_empty_takes_empty_steps_only(ranks):
    case = to_rank_zero((0, 0), (1, 0), (0, 0))
    results = ranks(2, locked_before_the_first_row, case)
    check_refused([tries[1] for tries in results], rank=0, need=1, capacity=0, setting="lock")
    for step in (0, 2):
        check_good(case, step, results)


def lock_and_unlock(transport: Transport, case: Case) -> list[Attempt]:
    with case.dispatcher(transport) as dispatcher:
        tries = [attempt(lambda: one_step(dispatcher, transport, case, 0))]
        dispatcher.lock()
        tries.append(attempt(lambda: one_step(dispatcher, transport, case, 1)))
        dispatcher.unlock()
        tries.append(attempt(lambda: one_step(dispatcher, transport, case, 2)))
        return tries


def test_an_unlocked_dispatcher_grows_again(ranks):
    case = to_rank_zero((1, 1), (5, 5), (5, 5))
    results = ranks(2, lock_and_unlock, case)
    assert all(type(tries[1].error) is errors.LockedError for tries in results)
    check_good(case, 2, results)
    assert results[0][2].value.capacity == 16


def impossible_bucket(transport: Transport) -> tuple[Attempt, Step]:
    huge = simple_case([(1, 1)], hidden=2**21, bucket=2**30)
    seen = attempt(lambda: huge.dispatcher(transport))
    case = to_rank_zero((3, 2))
    return seen, all_steps(transport, case)[0]


def test_a_fixed_bucket_that_no_machine_holds_is_refused_at_construction(ranks):
    results = ranks(2, impossible_bucket)
    for rank, (seen, good) in enumerate(results):
        assert type(seen.error) is errors.CapacityError, repr(seen.error)
        assert "bucket" in str(seen.error)
        assert seen.seconds < 1
        check_step(to_rank_zero((3, 2)), 0, rank, good)


def bad_pair_capacity(transport: Transport, value: object) -> tuple[Attempt, Step]:
    case = to_rank_zero((3, 2))
    with case.dispatcher(transport) as dispatcher:
        bad = value if transport.rank == 1 else 64
        seen = attempt(lambda: dispatcher.lock(pair_capacity=bad))
        return seen, one_step(dispatcher, transport, case, 0)


@pytest.mark.parametrize("value", [-1, 2.5, "many"])
def test_a_pair_capacity_that_makes_no_sense_raises_on_all_and_locks_nothing(ranks, value):
    results = ranks(2, bad_pair_capacity, value)
    for rank, (seen, good) in enumerate(results):
        assert isinstance(seen.error, errors.CrossdockError), repr(seen.error)
        assert seen.error.ranks == (1,)
        assert "pair_capacity" in str(seen.error)
        check_step(to_rank_zero((3, 2)), 0, rank, good)


# ---- growth that fails ----------------------------------------------------------------------


class NoMemoryFor(TorchFunctionMode):
    """On this thread, allocations of at least ``num_bytes`` fail."""

    ALLOCATE = frozenset({"empty", "zeros", "full", "empty_strided", "new_empty"})

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.num_bytes = num_bytes

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func.__name__ in self.ALLOCATE and made.untyped_storage().nbytes() >= self.num_bytes:
            raise torch.OutOfMemoryError(f"injected: no {made.untyped_storage().nbytes()} bytes")
        return made


def grow_without_memory(transport: Transport, case: Case, poor_rank: int) -> list[Attempt]:
    """Step 1 needs a larger bucket on rank 0, and ``poor_rank`` has no memory for one."""
    with case.dispatcher(transport) as dispatcher:
        tries = [attempt(lambda: one_step(dispatcher, transport, case, 0))]
        if transport.rank == poor_rank:
            with NoMemoryFor(64 * 1024):
                tries.append(attempt(lambda: one_step(dispatcher, transport, case, 1)))
        else:
            tries.append(attempt(lambda: one_step(dispatcher, transport, case, 1)))
        tries += [
            attempt(lambda step=step: one_step(dispatcher, transport, case, step))
            for step in (2, 3)
        ]
        return tries


@pytest.mark.parametrize("poor_rank", [0, 1, 2])
def test_growth_that_fails_on_one_rank_leaves_all_as_they_were(ranks, poor_rank):
    """Ranks 0 and 1 must grow; 0 only receives, 2 only sends, and one of them lacks the memory."""
    case = simple_case(
        [(1, 1, 1), (0, 30, 30), (1, 1, 0), (0, 30, 30)],
        num_experts=2,
        top_k=2,
        hidden=1024,
        owner=[0, 1],
        unrouted=0.0,
    )
    results = ranks(3, grow_without_memory, case, poor_rank)
    failed = [tries[1] for tries in results]
    assert len({str(seen.error) for seen in failed}) == 1
    for seen in failed:
        assert type(seen.error) is errors.CapacityError, repr(seen.error)
        assert seen.error.ranks == (poor_rank,)
        assert f"rank {poor_rank}" in str(seen.error)
        assert "bytes" in str(seen.error)
        assert seen.seconds < 1
    for step in (0, 2, 3):
        check_good(case, step, results)
    for rank in (0, 1):
        before, after, grown = (results[rank][step].value.capacity for step in (0, 2, 3))
        assert (before, after, grown) == (4, 4, 64)
