"""Rows and sums are the oracle's, every bit, over every transport."""

from __future__ import annotations

import pytest
import torch

from tests.dispatch.cases import ragged, simple_case
from tests.gpus import checks
from tests.gpus.fleet import Crew, Fleet, on
from tests.gpus.reference import TracedCase

SETTINGS = [
    {"wire": wire, "algorithm": algorithm}
    for wire in ("payload", "fp8")
    for algorithm in ("alltoall", "allgather")
]


def is_direct(fleet: Fleet) -> bool:
    return fleet.transport == "nvshmem"


def shape_of(fleet: Fleet) -> dict[str, int]:
    """The layer on GPUs; on CPUs something that takes no time."""
    if fleet.device == "cpu":
        return {"num_experts": 20, "top_k": 4, "hidden": 136}
    return {"num_experts": 256, "top_k": 8, "hidden": 7168}


def most_of(fleet: Fleet) -> int:
    return 40 if fleet.device == "cpu" else 96


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(s.values()))
@on()
def test_ragged_steps(crew: Crew, fleet: Fleet, seed, settings):
    case = ragged(fleet.size, seed=seed, most=most_of(fleet), **shape_of(fleet), **settings)
    crew(checks.steps_are_right, case)


@on()
def test_other_dtypes_and_shapes(crew: Crew, fleet: Fleet, seed):
    for settings in (
        {"dtype": torch.float16, "hidden": 1032},
        {"dtype": torch.float32, "hidden": 8, "idx_dtype": torch.int32},
        {"num_experts": 1, "top_k": 1},
        {"routing": "one expert"},
        {"routing": "none"},
        {"owner": [fleet.last] * 10},
    ):
        crew(checks.steps_are_right, ragged(fleet.size, seed=seed, most=50, **settings))


@on()
def test_ranks_without_tokens(crew: Crew, fleet: Fleet, seed):
    only_last = (0,) * fleet.last + (17,)
    tokens = [only_last, (0,) * fleet.size, (9,) + (0,) * fleet.last, only_last]
    case = simple_case(tokens, seed=seed, **shape_of(fleet))
    received = crew(checks.steps_are_right, case)
    assert all(rows[1] == 0 for rows in received)


@pytest.mark.parametrize("wire", ["payload", "fp8"])
@pytest.mark.parametrize("trace", ["e64", "e256"])
@on()
def test_recorded_routing(crew: Crew, fleet: Fleet, seed, trace, wire):
    crew(checks.steps_are_right, traced(fleet, seed, trace, wire))


@on()
def test_one_way_taken_twice(crew: Crew, fleet: Fleet, seed):
    case = ragged(fleet.size, seed=seed, steps=1, most=most_of(fleet), **shape_of(fleet))
    crew(checks.a_handle_s_way_is_taken_again, case)


@on()
def test_forty_steps_of_random_sizes(crew: Crew, fleet: Fleet, seed):
    many_steps(crew, fleet, seed, 40)


@pytest.mark.slow
@on()
def test_a_thousand_steps_of_random_sizes(crew: Crew, fleet: Fleet, seed):
    assert min(many_steps(crew, fleet, seed, 1000)) > 0


@pytest.mark.parametrize("wire", ["payload", "fp8"])
@on(only=is_direct)
def test_captured_ragged_steps(crew: Crew, fleet: Fleet, seed, wire):
    most = most_of(fleet)
    tokens = [(most,) * fleet.size, *ragged(fleet.size, seed=seed, most=most - 1).tokens]
    case = simple_case(tokens, seed=seed, wire=wire, debug=False, **shape_of(fleet))
    crew(checks.captured_steps_are_right, case)


@pytest.mark.parametrize("wire", ["payload", "fp8"])
@pytest.mark.parametrize("trace", ["e64", "e256"])
@on(only=is_direct)
def test_captured_recorded_routing(crew: Crew, fleet: Fleet, seed, trace, wire):
    case = traced(fleet, seed, trace, wire, debug=False)
    crew(checks.captured_steps_are_right, case)


def many_steps(crew: Crew, fleet: Fleet, seed: int, num_steps: int) -> list[int]:
    case = simple_case([(3 * most_of(fleet),) * fleet.size], seed=seed, **shape_of(fleet))
    return crew(checks.steps_of_random_sizes, case, num_steps, hang_s=240)


def traced(fleet: Fleet, seed: int, trace: str, wire: str, **settings) -> TracedCase:
    most, num_experts = most_of(fleet), int(trace[1:])
    tokens = [(most,) * fleet.size, tuple(most * (rank % 3) // 2 for rank in range(fleet.size))]
    hidden = shape_of(fleet)["hidden"]
    settings |= {"num_experts": num_experts, "top_k": 8, "hidden": hidden, "wire": wire}
    plain = simple_case(tokens, seed=seed, unrouted=0.02, **settings)
    return TracedCase(**vars(plain), trace=trace)
