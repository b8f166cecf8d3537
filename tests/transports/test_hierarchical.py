"""Two levels: each token once to a node, sums within the node first, rows in the promised order."""

from __future__ import annotations

import random
import signal
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.dispatch.test_lost_ranks as lost
from crossdock.dispatch import connect, errors
from crossdock.dispatch.transports import shm_memory
from crossdock.dispatch.transports.base import Transport
from crossdock.dispatch.transports.hierarchical import node_blocks
from tests.dispatch.cases import (
    Attempt,
    Case,
    Step,
    all_steps,
    attempt,
    copy_rows,
    fill_results,
    one_step,
    send,
    simple_case,
)
from tests.dispatch.oracle import check_step, owner_of
from tests.dispatch.test_ragged import CORNERS, cases
from tests.harness.child import Seat
from tests.harness.lost import lone_ranks
from tests.harness.pool import HANG_S, Pools
from tests.transports.two_level import two_level_out


class OverLevels:
    """``over(world_size, ranks_per_node, fn, *args)``, nodes being blocks of the pool's ranks."""

    def __init__(self, pools: Pools, **kinds: str) -> None:
        self._pools, self._kinds = pools, kinds

    def __call__(self, world_size: int, ranks_per_node: int, fn, *args, hang_s=HANG_S):
        pool = self._pools.get(world_size, "gloo")
        options = self._kinds | {"ranks_per_node": ranks_per_node}
        return pool.run(call_over_levels, options, fn, *args, hang_s=hang_s)


def call_over_levels(pooled: Transport, options: dict[str, Any], fn, *args):
    transport = connect("hierarchical", **options)
    try:
        return fn(transport, *args)
    finally:
        transport.close()


@pytest.fixture(scope="session", params=["shm", "gloo"])
def levels(request, pools):
    """Over each inner transport."""
    return OverLevels(pools, inner=request.param)


@pytest.fixture(scope="session")
def shm_levels(pools):
    return OverLevels(pools, inner="shm")


def check_two_level(case: Case, ranks_per_node: int, by_rank: list[list[Step]]) -> None:
    """Rows as on every transport; sums as the oracle's two-level order has them, every bit."""
    for step in range(case.num_steps):
        out = two_level_out(case, step, ranks_per_node)
        for rank in range(case.world_size):
            seen = by_rank[rank][step]
            assert torch.equal(seen.out, out[rank]), (step, rank)
            check_step(case, step, rank, replace(seen, out=None))


@pytest.mark.parametrize("wire", ["payload", "fp8"])
@pytest.mark.parametrize("algorithm", ["alltoall", "allgather"])
@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
def test_rows_and_sums_are_exact(levels, ranks_per_node, algorithm, wire):
    tokens = [(33, 0, 17, 64), (5, 70, 0, 1), (0, 0, 0, 0), (12, 12, 12, 12)]
    case = simple_case(tokens, num_experts=10, top_k=4, hidden=136, algorithm=algorithm, wire=wire)
    check_two_level(case, ranks_per_node, levels(4, ranks_per_node, all_steps, case))


@pytest.mark.parametrize("ranks_per_node", [2, 3])
def test_six_ranks_as_two_or_three_nodes(shm_levels, ranks_per_node):
    case = simple_case([(9, 0, 14, 3, 8, 30), (1, 5, 0, 0, 2, 7)], num_experts=13, top_k=5)
    check_two_level(case, ranks_per_node, shm_levels(6, ranks_per_node, all_steps, case))


@pytest.mark.parametrize("algorithm", ["alltoall", "allgather"])
@pytest.mark.parametrize("name", [name for name, case in CORNERS.items() if case.world_size == 4])
def test_corner(shm_levels, name, algorithm):
    case = CORNERS[name]
    case = replace(case, config=replace(case.config, algorithm=algorithm))
    check_two_level(case, 2, shm_levels(4, 2, all_steps, case))


@given(case=cases(world_sizes=(4,)), ranks_per_node=st.sampled_from([1, 2, 4]))
@settings(max_examples=25)
def test_any_shape_is_exact(shm_levels, case, ranks_per_node):
    check_two_level(case, ranks_per_node, shm_levels(4, ranks_per_node, all_steps, case))


def test_a_node_without_experts(shm_levels):
    case = simple_case([(5, 6, 7, 8)], owner=[1, 1, 0, 0, 1, 0, 0, 1])
    check_two_level(case, 2, shm_levels(4, 2, all_steps, case))


def by_handle(transport: Transport, case: Case) -> list[Step]:
    """Step 0, then the tokens of step 1 along step 0's routing; two slots, combined last first."""
    with case.dispatcher(transport, num_slots=2) as dispatcher:
        first, handle = send(dispatcher, case.batch(0, transport.rank), transport.device)
        again = case.batch(1, transport.rank).x
        second, second_handle = dispatcher.dispatch(again, handle=handle)
        seen = [copy_rows(first), copy_rows(second)]
        for step, (rows, way) in ((1, (second, second_handle)), (0, (first, handle))):
            fill_results(case, step, transport.rank, rows)
            seen[step].out = dispatcher.combine(rows.y, way).clone()
        return seen


def test_dispatch_by_handle_goes_the_same_way(levels):
    class SameRouting(Case):
        def batch(self, step, rank):
            return replace(Case.batch(self, 0, rank), x=Case.batch(self, step, rank).x)

    base = simple_case([(6, 9, 0, 4)] * 2)
    seen = levels(4, 2, by_handle, base)
    same = SameRouting(**{name: getattr(base, name) for name in base.__dataclass_fields__})
    check_two_level(same, 2, seen)


# ---- bytes --------------------------------------------------------------------------------------


def bytes_of_a_dispatch(transport: Transport, case: Case) -> tuple[list[int], int]:
    with case.dispatcher(transport) as dispatcher:
        rows, handle = send(dispatcher, case.batch(0, transport.rank), transport.device)
        sent = list(transport.bytes_to)
        dispatcher.combine(rows.y.fill_(1.0), handle)
        return sent, dispatcher.wire.row_bytes


@pytest.mark.parametrize("ranks_per_node", [1, 2, 3])
def test_each_token_crosses_once_to_each_node(shm_levels, ranks_per_node):
    case = simple_case([(40, 0, 31, 25, 3, 60)], num_experts=24, top_k=6)
    seen = shm_levels(6, ranks_per_node, bytes_of_a_dispatch, case)
    for rank, (sent, row_bytes) in enumerate(seen):
        owner = owner_of(case.owner, case.batch(0, rank).topk_idx)
        nodes = torch.where(owner >= 0, owner // ranks_per_node, -1)
        mine = rank // ranks_per_node
        crossing = sum(
            int((nodes == node).any(dim=1).sum())
            for node in range(6 // ranks_per_node)
            if node != mine
        )
        across = [
            num_bytes for peer, num_bytes in enumerate(sent) if peer // ranks_per_node != mine
        ]
        assert sum(across) == crossing * row_bytes
        # Only to the rank of the same local index.
        for peer, num_bytes in enumerate(sent):
            if peer // ranks_per_node != mine and peer % ranks_per_node != rank % ranks_per_node:
                assert num_bytes == 0


# ---- nodes --------------------------------------------------------------------------------------


def test_nodes_of_different_sizes_are_refused():
    with pytest.raises(errors.ConfigError, match="as many ranks"):
        node_blocks([[0, 1, 2], [3]], None)


def test_ranks_dealt_out_in_turn_are_refused():
    with pytest.raises(errors.ConfigError, match="map-by slot"):
        node_blocks([[0, 2], [1, 3]], None)


def test_a_node_size_that_does_not_divide_is_refused():
    with pytest.raises(errors.ConfigError, match="ranks_per_node = 3"):
        node_blocks([[0, 1, 2, 3]], 3)


@pytest.mark.parametrize(("level", "name"), [("inner", "carrier pigeon"), ("outer", "shm")])
def test_a_level_that_cannot_be_is_refused(level, name):
    with pytest.raises(errors.ConfigError, match=level):
        connect("hierarchical", **{level: name})


def connect_on_hosts(pooled: Transport, hosts: list[str], case: Case) -> tuple[str, Any]:
    """Every rank says that it lives on the given host."""
    with patch("socket.gethostname", return_value=hosts[pooled.rank]):
        transport = connect("auto")
        try:
            levels = getattr(transport, "inner", transport).name
            return f"{transport.name} {levels}", all_steps(transport, case)
        finally:
            transport.close()


@pytest.mark.parametrize(
    ("hosts", "name"),
    [
        ("aabb", "hierarchical shm"),
        ("aaaa", "gloo gloo"),
        ("abcd", "gloo gloo"),
        ("aaab", "gloo gloo"),
        ("abab", "gloo gloo"),
    ],
)
def test_auto_uses_two_levels_where_hosts_have_as_many_ranks(pools, hosts, name):
    case = simple_case([(9, 3, 0, 7)])
    results = pools.get(4).run(connect_on_hosts, list(hosts), case)
    assert [seen for seen, _ in results] == [name] * 4
    if name.startswith("hierarchical"):
        check_two_level(case, 2, [steps for _, steps in results])


@pytest.mark.parametrize(("inner", "outer"), [("auto", "auto"), ("mpi", "mpi"), ("shm", "mpi")])
def test_both_levels_by_mpi(mpi_pools, inner, outer):
    case = simple_case([(9, 3, 0, 7), (0, 40, 2, 1)])
    options = {"inner": inner, "outer": outer, "ranks_per_node": 2}
    results = mpi_pools.call(4, steps_by_mpi, options, case)
    check_two_level(case, 2, [steps for _, steps in results])
    expected = "shm mpi" if inner == "auto" else f"{inner} {outer}"
    assert [names for names, _ in results] == [expected] * 4


def steps_by_mpi(comm: Any, options: dict[str, Any], case: Case) -> tuple[str, list[Step]]:
    transport = connect("hierarchical", group=comm, **options)
    try:
        return f"{transport.inner.name} {transport.outer.name}", all_steps(transport, case)
    finally:
        transport.close()


# ---- errors -------------------------------------------------------------------------------------


def one_bad_id(transport: Transport, case: Case, offender: int):
    with case.dispatcher(transport) as dispatcher:
        batch = case.batch(0, transport.rank)
        if transport.rank == offender:
            batch.topk_idx[0, 0] = 99
        seen = attempt(lambda: send(dispatcher, batch, transport.device))
        rows, handle = send(dispatcher, case.batch(1, transport.rank), transport.device)
        step = copy_rows(rows)
        fill_results(case, 1, transport.rank, rows)
        step.out = dispatcher.combine(rows.y, handle).clone()
        return seen, step


@pytest.mark.parametrize("offender", [0, 3])
def test_bad_input_on_one_rank_is_everybodys_error(shm_levels, offender):
    case = simple_case([(5, 6, 7, 8), (9, 0, 2, 3)])
    results = shm_levels(4, 2, one_bad_id, case, offender)
    assert len({str(seen.error) for seen, _ in results}) == 1
    for rank, (seen, good) in enumerate(results):
        assert type(seen.error) is errors.RoutingError
        assert seen.error.ranks == (offender,)
        check_step(case, 1, rank, replace(good, out=None))


def grow_in_want(transport: Transport, case: Case, poor_rank: int, half: str) -> list[Attempt]:
    """Step 1 needs more memory to pass rows on, in a half, and ``poor_rank`` cannot have it."""
    with case.dispatcher(transport) as dispatcher:
        tries = [attempt(lambda: one_step(dispatcher, transport, case, 0))]
        rows, handle = None, None
        if half == "combine":  # results of a wider dtype than the rows had
            rows, handle = send(dispatcher, case.batch(1, transport.rank), transport.device)
        available = 0 if transport.rank == poor_rank else 1 << 30
        with patch.object(shm_memory, "available_bytes", return_value=available):
            if rows is None:
                tries.append(attempt(lambda: one_step(dispatcher, transport, case, 1)))
            else:
                wide = torch.zeros(rows.capacity, rows.hidden)
                tries.append(attempt(lambda: dispatcher.combine(wide, handle)))
        if rows is not None:
            fill_results(case, 1, transport.rank, rows)
            dispatcher.combine(rows.y, handle)
        tries.append(attempt(lambda: one_step(dispatcher, transport, case, 1)))
        return tries


@pytest.mark.parametrize(("poor_rank", "half"), [(0, "dispatch"), (3, "dispatch"), (0, "combine")])
def test_rows_that_one_node_cannot_pass_on_are_refused_on_all(shm_levels, poor_rank, half):
    case = simple_case([(1, 1, 1, 1), (70, 90, 80, 90)], hidden=64)
    if half == "combine":  # all results are rank 0's
        tokens = [(1, 1, 1, 1), (33, 33, 33, 33)]
        case = simple_case(tokens, num_experts=4, top_k=1, hidden=1024, routing="one expert")
    results = shm_levels(4, 2, grow_in_want, case, poor_rank, half)
    failed = [tries[1] for tries in results]
    assert len({str(seen.error) for seen in failed}) == 1, failed
    for seen in failed:
        assert type(seen.error) is errors.CapacityError, repr(seen.error)
        assert seen.error.ranks == (poor_rank,)
    for tries in results:
        assert tries[0].error is None, repr(tries[0].error)
        assert tries[2].error is None, repr(tries[2].error)
    check_two_level(case, 2, [[tries[0].value, tries[2].value] for tries in results])


def test_many_steps_of_changing_sizes(shm_levels):
    rng = random.Random(11)
    tokens = [tuple(rng.choice([0, 1, 9, 50]) for _ in range(4)) for _ in range(30)]
    case = simple_case(tokens, hidden=40)
    check_two_level(case, 2, shm_levels(4, 2, all_steps, case))


# ---- lost ranks ---------------------------------------------------------------------------------


def live_on_levels(seat: Seat, link: Connection, inner: str, *args: Any) -> None:
    lost.open_transport = lambda _: connect("hierarchical", inner=inner, ranks_per_node=2)
    lost.CASE = simple_case([(6, 9, 5, 8), (4, 7, 3, 2)], timeout_s=lost.TIMEOUT_S)
    lost.live(seat, link, *args)


@pytest.mark.parametrize(
    ("inner", "number", "when"),
    [
        ("shm", signal.SIGKILL, "dispatch"),
        ("shm", signal.SIGSTOP, "combine"),
        ("gloo", signal.SIGSTOP, "dispatch"),
        ("shm", signal.SIGKILL, "any time"),
        ("shm", signal.SIGSTOP, "any time"),
        ("gloo", signal.SIGKILL, "any time"),
        ("gloo", signal.SIGSTOP, "any time"),
    ],
)
def test_a_lost_rank_is_named_on_both_nodes(monkeypatch, inner, number, when):
    def over(world_size, fn, *args, **options):
        return lone_ranks(4, live_on_levels, inner, *args, **options)

    monkeypatch.setattr(lost, "lone_ranks", over)
    lost.watch((2,), number, when)
