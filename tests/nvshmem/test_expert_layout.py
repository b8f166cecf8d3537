"""The expert-major layout on the CPU: its kernels' own code, its mover's and the dispatcher's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from crossdock.launch.bench import layouts as bench
from tests.nvshmem import expert_checks as checks
from tests.nvshmem.emulation import record_by_repeating


@pytest.mark.parametrize(
    "check", [checks.few_pairs_are_exact, *checks.CHECKS[1:]], ids=lambda check: check.__name__
)
@pytest.mark.parametrize(
    "world_size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4))]
)
def test_emulated(emulated, world_size, check):
    emulated(world_size, check)


@pytest.mark.parametrize("check", checks.CAPTURED, ids=lambda check: check.__name__)
@pytest.mark.parametrize(
    "world_size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))]
)
def test_captured(emulated, world_size, check):
    emulated(world_size, check)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_shapes_are_exact(emulated, world_size):
    emulated(world_size, checks.pairs_and_their_sums_are_exact)


def test_the_benchmark_compares_the_same_results(monkeypatch, emulated):
    """All of it but graphs, which are run once, and times."""
    uniform_inputs = bench.uniform_inputs

    def inputs(*arguments):
        tokens = uniform_inputs(*arguments)
        # torch's unpermute on the CPU rounds product and sum apart.
        return replace(tokens, topk_weights=tokens.topk_weights.bfloat16().float())

    def run_once(call):
        found = []
        record_by_repeating(lambda: found.append(call()))
        return (lambda: None), found[0]

    for name, fake in {
        "uniform_inputs": inputs,
        "capture": run_once,
        "measure_graphs": lambda _, candidates, rounds: [dict.fromkeys(candidates, 1.0)] * 2,
        "HIDDEN": 64,
        "TOKENS": (20,),
    }.items():
        monkeypatch.setattr(bench, name, fake)
    monkeypatch.setattr("crossdock.launch.bench.inputs.HIDDEN", 64)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "none")
    result, _ = emulated(2, bench.bench_layouts)
    case = result["cases"]["payload, 20 tokens"]
    assert {"row: permute", "row: step", "expert: copy of y", "expert: step"} <= case["us"].keys()
    assert case["rows a token"]["expert"] == 8
    assert 1 < case["rows a token"]["row"] <= 2
    assert case["GB written to buckets"]["expert"] == 2 * 20 * 8 * 64 * 2 / 1e9
