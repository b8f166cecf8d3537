"""The protocol on the CPU: the kernels' own code, the movers' and the dispatcher's."""

from __future__ import annotations

import subprocess
import time
from dataclasses import replace

import pytest

from crossdock.dispatch.transports import nvshmem as transport_module
from crossdock.dispatch.transports.nvshmem import NvshmemTransport
from crossdock.scratch.errors import PeerFailed, RankTimeout
from tests.dispatch.cases import one_step, send, simple_case
from tests.dispatch.oracle import check_step
from tests.nvshmem import alone
from tests.nvshmem import ranks as checks
from tests.nvshmem.emulation import CPU, record_by_repeating


@pytest.mark.parametrize(
    "check",
    [
        checks.few_shapes_are_exact,
        checks.fp8_is_the_quantiser_s_bits,
        checks.fp8_of_extreme_numbers_is_the_quantiser_s_too,
        checks.a_handle_s_way_is_taken_again,
        checks.any_y_and_out_will_do,
        checks.bad_input_on_one_rank_is_everybody_s_error,
        checks.blocks_of_rows_travel_too,
        checks.eager_dispatches_need_no_exchange_between_hosts,
        checks.ranks_in_different_calls_all_hear_of_it_and_go_on,
        checks.a_rank_that_ends_is_named_by_those_that_dispatch,
        checks.growth_that_fails_on_one_rank_leaves_all_as_they_were,
        checks.a_step_too_large_for_a_lock_is_refused_everywhere,
        checks.two_dispatchers_and_two_slots_interleave,
        checks.ranks_with_different_slots_free_hear_of_it,
        checks.graphs_and_eager_steps_interleave,
        checks.a_graph_refuses_what_does_not_fit,
        checks.a_rank_that_misses_an_eager_step_is_named,
    ],
    ids=lambda check: check.__name__,
)
@pytest.mark.parametrize(
    "world_size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4, 8))]
)
def test_emulated(emulated, world_size, check):
    emulated(world_size, check)


@pytest.mark.parametrize("check", alone.CHECKS[:5], ids=lambda check: check.__name__)
def test_one_rank_needs_no_nvshmem(monkeypatch, emulated, check):
    monkeypatch.setattr(transport_module, "Runtime", alone.Runtime)
    emulated(1, check)


def a_dead_process_is_named(transport: NvshmemTransport) -> None:
    transport.look_for_dead("dispatch")
    ended = subprocess.Popen(["true"])
    ended.wait()
    transport._processes[1] = replace(transport._processes[1], pid=ended.pid)
    for _ in range(2):
        with pytest.raises(RankTimeout, match="rank 1 is dead"):
            transport.look_for_dead("dispatch")
    with pytest.raises(RankTimeout, match="rank 1 is dead"):
        transport.require_working()


def test_a_rank_whose_process_has_ended_is_not_waited_for(emulated):
    emulated(2, a_dead_process_is_named)


class Broken(Exception):
    pass


def a_rank_fails_before_its_kernels(transport: NvshmemTransport, launches: bool) -> None:
    """Others wait for it in vain: in kernels, or, without any, where the host polls."""
    case = simple_case([(9,) * 3] * 2, hidden=64, timeout_s=1.0 if launches else 20.0)
    dispatcher, batch = case.dispatcher(transport), case.batch(1, transport.rank)
    one_step(dispatcher, transport, case, 0)
    kernels = dispatcher._mover._kernels
    began = time.monotonic()
    if transport.rank == 1:
        kernels.route = raise_broken
        with pytest.raises(Broken):
            send(dispatcher, batch, transport.device)
    else:
        if not launches:
            kernels.route = kernels.rows = lambda *_: None
        with pytest.raises(PeerFailed, match="rank 1 failed: Broken: boom") as caught:
            send(dispatcher, batch, transport.device)
        assert caught.value.ranks == (1,)
        assert time.monotonic() - began < 10
        with pytest.raises(PeerFailed, match="boom"):
            dispatcher.check()
    dispatcher.close()


def raise_broken(*_: object) -> None:
    raise Broken("boom")


@pytest.mark.parametrize("launches", [True, False])
def test_a_rank_that_fails_in_its_move_is_heard_by_those_that_wait(emulated, launches):
    emulated(3, a_rank_fails_before_its_kernels, launches)


def a_capture_fails_after_a_staged_call(transport: NvshmemTransport) -> None:
    case = simple_case([(9,) * 3, (4, 0, 7)], hidden=64)
    with case.dispatcher(transport) as dispatcher:
        one_step(dispatcher, transport, case, 0)
        dispatcher.lock()

        def step() -> None:
            dispatcher.dispatch_send(*case.batch(0, transport.rank).to(CPU))
            raise Broken("after it")

        with pytest.raises(Broken):
            record_by_repeating(step)
        dispatcher.unlock()
        check_step(case, 1, transport.rank, one_step(dispatcher, transport, case, 1))


def test_unlock_waits_for_nothing_that_was_only_captured(emulated):
    emulated(3, a_capture_fails_after_a_staged_call)


def an_empty_step_follows_its_slot_s_last(transport: NvshmemTransport) -> None:
    case = simple_case([(0,) * 3, (9,) * 3], hidden=64)
    with case.dispatcher(transport) as dispatcher:
        rows, empty = send(dispatcher, case.batch(0, transport.rank), transport.device)
        dispatcher.combine(rows.y, empty)
        one_step(dispatcher, transport, case, 1)
        launches = []
        kernels = dispatcher._mover._kernels
        rows_kernel = kernels.rows

        def counted(*args: object) -> None:
            launches.append(args)
            rows_kernel(*args)

        kernels.rows = counted
        rows, again = dispatcher.dispatch(case.batch(0, transport.rank).x, handle=empty)
        assert len(launches) == 1  # its wait is for what others read of the step before
        assert (rows.num_rows, int(rows.num_pairs)) == (0, 0)
        assert (rows.topk_idx == -1).all()
        assert not rows.rows_per_expert.any()
        assert dispatcher.combine(rows.y, again).shape == (0, 64)


def test_a_step_without_rows_waits_for_its_slot_as_any_other(emulated):
    emulated(3, an_empty_step_follows_its_slot_s_last)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_shapes_are_exact(emulated, world_size):
    emulated(world_size, checks.rows_and_sums_are_exact)
