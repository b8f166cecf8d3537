"""Captured checks and the benchmark of several GPUs, without one: kernels run on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import pytest
import torch

from crossdock.dispatch import run_local
from crossdock.dispatch.transports.base import Transport
from crossdock.dispatch.transports.nvshmem import NvshmemTransport
from crossdock.launch.bench import gpus as bench
from crossdock.launch.bench.gpus_table import table_of
from crossdock.launch.bench.graphs import SlowestRank
from crossdock.launch.bench.peers import PeerCopy
from tests.dispatch.cases import simple_case
from tests.gpus import checks
from tests.gpus.reference import TracedCase
from tests.nvshmem.emulation import record_by_repeating

RANKS = 3


@pytest.mark.parametrize("wire", ["payload", pytest.param("fp8", marks=pytest.mark.slow)])
def test_captured_steps(emulated, wire, seed):
    tokens = [(30, 30, 30), (0, 12, 30), (0, 0, 0), (1, 0, 0)]
    case = simple_case(tokens, hidden=136, wire=wire, debug=False, seed=seed)
    emulated(RANKS, checks.captured_steps_are_right, case)


def test_captured_recorded_routing(emulated, seed):
    plain = simple_case([(20,) * RANKS] * 2, num_experts=64, top_k=8, debug=False, seed=seed)
    case = TracedCase(**vars(plain), trace="e64")
    emulated(RANKS, checks.captured_steps_are_right, case)


@pytest.mark.slow
def test_steps_of_random_sizes(emulated, seed):
    case = simple_case([(30,) * RANKS], num_experts=16, hidden=64, timeout_s=60.0, seed=seed)
    emulated(RANKS, checks.steps_of_random_sizes, case, 25)


def test_the_benchmark_measures_what_it_says(monkeypatch, emulated):
    """All of it but graphs, events and the driver's copies."""
    monkeypatch.setattr(bench, "capture", lambda step: (record_by_repeating(step), None))
    monkeypatch.setattr(bench, "measure_graphs", replay_in_turns)
    monkeypatch.setattr(PeerCopy, "by_engines", lambda copy: copy.by_kernel(0))
    monkeypatch.setattr(bench, "HIDDEN", 64)
    monkeypatch.setattr("crossdock.launch.bench.inputs.HIDDEN", 64)
    cases = [bench.Case(tokens=40), bench.Case(tokens=9, routing="e64", num_sms=1)]

    def measure(transport: NvshmemTransport) -> dict:
        transports = {"nvshmem": transport, "local": transport._host}
        return bench.bench_gpus(bench.Fabric(transports=transports), cases, seconds=200, rounds=2)

    result, *_ = emulated(RANKS, measure)
    assert [case["tokens"] for case in result["cases"]] == [40, 9]
    first, few_sms = result["cases"]
    assert {"naive over local", "captured nvshmem dispatch", "peer copy"} <= first["us"].keys()
    assert "eager local dispatch" not in few_sms["us"]
    # What a rank keeps does not cross.
    assert first["bytes that cross"]["dispatch"] < max(first["rows received"]) * 64 * 2
    assert any("of peer copy" in name for name in result["figures"])
    assert "| uniform, payload, 40 tokens |" in table_of(result)


def replay_in_turns(
    transport: Transport, candidates: Mapping[str, Callable[[], None]], rounds: int
) -> SlowestRank:
    times = dict.fromkeys(candidates, 0.0)
    for _ in range(rounds):
        for name, run in candidates.items():
            transport.exchange(torch.zeros(1, dtype=torch.int64))
            began = time.perf_counter()
            run()
            times[name] += (time.perf_counter() - began) * 1e6 / rounds
    return SlowestRank(times, {})


def test_a_benchmark_without_time_says_what_it_left_out():
    def measure(host: Transport) -> dict:
        cases = bench.plan_cases((8, 16), (4,))
        return bench.bench_gpus(bench.Fabric(transports={"local": host}), cases, seconds=-1)

    result, _ = run_local(2, measure)
    assert result["cases"] == []
    assert len(result["left out, no time"]) == 13
    assert "left out" in table_of(result)
