"""The protocol on the CPU: the kernels' own code, the movers' and the dispatcher's."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest

from crossdock.dispatch.transports import nvshmem as transport_module
from crossdock.dispatch.transports.nvshmem import NvshmemTransport
from crossdock.scratch.errors import RankTimeout
from tests.nvshmem import alone
from tests.nvshmem import ranks as checks


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


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_shapes_are_exact(emulated, world_size):
    emulated(world_size, checks.rows_and_sums_are_exact)
