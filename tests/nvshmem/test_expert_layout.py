"""The expert-major layout on the CPU: its kernels' own code, its mover's and the dispatcher's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from crossdock.dispatch import run_local
from crossdock.dispatch.transports.nvshmem import NvshmemTransport
from crossdock.launch.bench import layouts as bench
from tests.nvshmem import expert_checks as checks
from tests.nvshmem.emulation import emulate, record_by_repeating
from tests.nvshmem.test_emulated import folder  # noqa: F401 - a fixture


def run(world_size: int, check) -> None:
    run_local(world_size, lambda host: check(NvshmemTransport(host, torch.device("cpu"))))


@pytest.mark.parametrize(
    "check", [checks.few_pairs_are_exact, *checks.CHECKS[1:]], ids=lambda check: check.__name__
)
@pytest.mark.parametrize(
    "world_size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4))]
)
def test_emulated(monkeypatch, folder, world_size, check):  # noqa: F811
    emulate(monkeypatch, folder)
    run(world_size, check)


@pytest.mark.parametrize("check", checks.CAPTURED, ids=lambda check: check.__name__)
@pytest.mark.parametrize(
    "world_size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))]
)
def test_captured(monkeypatch, folder, world_size, check):  # noqa: F811
    emulate(monkeypatch, folder)
    run(world_size, lambda transport: check(transport, record_by_repeating))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_shapes_are_exact(monkeypatch, folder, world_size):  # noqa: F811
    emulate(monkeypatch, folder)
    run(world_size, checks.pairs_and_their_sums_are_exact)


def test_the_benchmark_compares_the_same_results(monkeypatch, folder):  # noqa: F811
    """All of it but graphs, which are run once, and times."""
    emulate(monkeypatch, folder)
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
        "_record": run_once,
        "measure_graphs": lambda _, candidates, rounds: dict.fromkeys(candidates, 1.0),
        "HIDDEN": 64,
        "TOKENS": (20,),
    }.items():
        monkeypatch.setattr(bench, name, fake)
    monkeypatch.setattr("crossdock.launch.bench.inputs.HIDDEN", 64)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "none")
    measure = bench.bench_layouts
    result, _ = run_local(2, lambda host: measure(NvshmemTransport(host, torch.device("cpu"))))
    case = result["cases"]["payload, 20 tokens"]
    assert {"row: permute", "row: step", "expert: copy of y", "expert: step"} <= case["us"].keys()
    assert case["rows a token"]["expert"] == 8
    assert 1 < case["rows a token"]["row"] <= 2
    assert case["GB written to buckets"]["expert"] == 2 * 20 * 8 * 64 * 2 / 1e9
