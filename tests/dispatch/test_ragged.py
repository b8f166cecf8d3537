"""Any number of tokens, experts, ranks and columns: the grid, thinned by hypothesis."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.dispatch import DispatchConfig
from tests.dispatch.cases import Case, all_steps, linear_owner, simple_case
from tests.dispatch.oracle import check_steps

EXAMPLES = 120
RANKS = [1, 2, 3, 4, 7]
TOKENS = [0, 0, 1, 2, 5, 17, 40]
HIDDEN = [1, 8, 129, 2048]


@st.composite
def cases(draw, world_sizes=tuple(RANKS)) -> Case:
    world_size = draw(st.sampled_from(world_sizes))
    num_experts = draw(st.one_of(st.integers(1, 9), st.sampled_from([16, 61, 64])))
    owner = draw(
        st.one_of(
            st.just(linear_owner(num_experts, world_size)),
            st.just(tuple(e % world_size for e in range(num_experts))),
            st.tuples(*[st.integers(0, world_size - 1)] * num_experts),
        )
    )
    step = st.tuples(*[st.sampled_from(TOKENS)] * world_size)
    return Case(
        config=DispatchConfig(
            num_experts=num_experts,
            top_k=draw(st.integers(1, 32)),
            hidden=draw(st.sampled_from(HIDDEN)),
            dtype=draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])),
            algorithm=draw(st.sampled_from(["alltoall", "allgather"])),
            wire=draw(st.sampled_from(["payload", "payload", "fp8"])),
            timeout_s=30.0,
            debug=True,
        ),
        owner=owner,
        tokens=tuple(draw(st.lists(step, min_size=1, max_size=3))),
        routing=draw(
            st.sampled_from(["uniform", "uniform", "one expert", "none"])
            | st.integers(0, world_size - 1).map("not rank {}".format)
        ),
        unrouted=draw(st.sampled_from([0.0, 0.3])),
        seed=draw(st.integers(0, 1000)),
        idx_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
    )


@given(cases())
@settings(max_examples=EXAMPLES)
def test_any_shape_is_exact_on_threads(local, case):
    check_steps(case, local(case.world_size, all_steps, case))


@given(cases(world_sizes=(2, 4)))
@settings(max_examples=EXAMPLES // 4)
def test_any_shape_is_exact_on_processes(gloo, case):
    check_steps(case, gloo(case.world_size, all_steps, case))


@pytest.mark.slow
@given(cases())
@settings(max_examples=2000)
def test_any_shape_is_exact_on_threads_at_length(local, case):
    check_steps(case, local(case.world_size, all_steps, case))


# What must be met in every run, whatever hypothesis draws.
CORNERS = {
    "one rank": simple_case([(9,), (0,)]),
    "no tokens anywhere": simple_case([(0, 0), (0, 0)]),
    "tokens change each step": simple_case([(1, 0), (0, 64), (30, 30), (2, 1)]),
    "all tokens to one expert": simple_case([(20, 30)], routing="one expert"),
    "nobody routed to rank 1": simple_case([(20, 30)], routing="not rank 1"),
    "nobody routed at all": simple_case([(20, 30)], routing="none"),
    "top 1": simple_case([(20, 30)], top_k=1),
    "top 32": simple_case([(20, 30)], top_k=32, num_experts=64),
    "more columns than experts": simple_case([(20, 30)], top_k=8, num_experts=3),
    "more experts than tokens": simple_case([(1, 2)], num_experts=256, top_k=8),
    "experts that do not divide": simple_case([(5, 6, 7)], num_experts=8),
    "fewer experts than ranks": simple_case([(5, 6, 7, 8)], num_experts=2, top_k=2),
    "one expert": simple_case([(5, 6)], num_experts=1, top_k=1),
    "ranks that own nothing": simple_case([(5, 6, 7)], owner=[1] * 8),
    "owners out of order": simple_case([(5, 6, 7)], owner=[2, 0, 2, 0, 0, 2, 0, 2]),
    "hidden 1": simple_case([(5, 6)], hidden=1),
    "hidden 129": simple_case([(5, 6)], hidden=129),
    "hidden 2048": simple_case([(5, 6)], hidden=2048),
    "fp8, hidden 1": simple_case([(5, 6)], hidden=1, wire="fp8"),
    "fp8, hidden 129": simple_case([(5, 6)], hidden=129, wire="fp8"),
    "fp8, hidden 2048": simple_case([(5, 6)], hidden=2048, wire="fp8"),
    "int32 ids": simple_case([(5, 6)], idx_dtype=torch.int32),
    "seven ranks": simple_case([(5, 0, 6, 1, 0, 2, 9)], num_experts=10),
}


@pytest.mark.parametrize("algorithm", ["alltoall", "allgather"])
@pytest.mark.parametrize("name", CORNERS)
def test_corner(ranks, name, algorithm):
    case = with_algorithm(CORNERS[name], algorithm)
    check_steps(case, ranks(case.world_size, all_steps, case))


def with_algorithm(case: Case, algorithm: str) -> Case:
    return replace(case, config=replace(case.config, algorithm=algorithm))
