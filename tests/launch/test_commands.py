from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from crossdock.dispatch import connect, run_local
from crossdock.dispatch.transports.base import Transport
from crossdock.dispatch.transports.gpu_choice import GpuRank, Lack
from crossdock.launch import doctor
from crossdock.launch.batch import make_batch
from crossdock.launch.bench.dispatch import bench_dispatch
from crossdock.launch.bench.memory import bench_memory
from crossdock.launch.bench.transports import bench_transports
from crossdock.launch.check import find_needs, ranges
from crossdock.launch.cli import app
from crossdock.launch.config import Job
from crossdock.launch.routing import make_routing
from crossdock.launch.run import run_layer
from crossdock.launch.schema import schema_text
from crossdock.scratch.errors import ConfigError
from tests.launch.conftest import CONFIGS


@pytest.mark.parametrize("overrides", [[], ["dispatch.algorithm=allgather"]])
def test_check_predicts_what_a_run_receives(small_job, overrides):
    job = small_job("dispatch.bucket=grow", *overrides)
    needs = find_needs(job, make_routing(job), make_batch(job, 0).total)
    reports = run_local(4, lambda transport: run_layer(job, transport, check=False))
    assert [need.rows for need in needs] == [max(r.rows_received) for r in reports]
    assert [need.pairs for need in needs] == [max(r.pairs) for r in reports]
    assert [need.bucket for need in needs] == [max(r.bucket_capacity) for r in reports]


@pytest.mark.parametrize("name", ["laptop", "wide-ep-64"])
def test_check_shows_grid_owners_and_needs(name):
    result = CliRunner().invoke(app, ["check", str(CONFIGS / f"{name}.yaml")])
    assert result.exit_code == 0, result.output
    assert "valid" in result.output
    assert "receive MB" in result.output
    assert ("0-15" if name == "laptop" else "252-255") in result.output


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], "none"), ([3], "3"), ([0, 1, 2, 7], "0-2, 7"), ([0, 2], "0, 2")],
)
def test_experts_are_shown_as_ranges(numbers, text):
    assert ranges(numbers) == text


def test_many_single_experts_are_cut():
    assert ranges(range(0, 40, 2)) == "0, 2, 4, 6, 8, ... (20)"


def test_doctor_says_what_each_transport_lacks():
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for name in ("gloo", "nccl", "mpi", "shm", "nvshmem", "JIT", "MPS"):
        assert name in result.output
    findings = {finding.name: finding for finding in doctor.find_transports()}
    assert findings["gloo"].ok
    assert findings["nccl"].ok == torch.cuda.is_available()
    assert all(finding.detail for finding in findings.values())


def test_what_doctor_says_to_install_can_be_copied(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    output = CliRunner().invoke(app, ["doctor"]).output
    assert "pip install 'crossdock[mpi]'" in output
    assert "\\" not in output


def test_doctor_knows_that_shared_memory_wants_an_x86(monkeypatch):
    for machine, ready in (("x86_64", True), ("aarch64", False)):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        findings = {finding.name: finding for finding in doctor.find_transports()}
        assert findings["shm"].ok is ready


def test_doctor_says_what_auto_would_take_and_why():
    assert doctor.auto_words([]).startswith("takes gloo: torch sees no GPU")
    lacking = GpuRank(host=1, gpu=1, lack=Lack.BINDINGS, mps=False, reaches=(True, True))
    fine = replace(lacking, lack=Lack.NOTHING, mps=True)
    words = doctor.auto_words([fine, replace(lacking, gpu=2)])
    assert words.startswith("takes nccl with a rank on each of 2 GPU(s): rank 1 has no nvshmem4py")
    words = doctor.auto_words([replace(fine, reaches=(True,))])
    assert words.startswith("takes nccl with a rank on each of 1 GPU(s): one rank has nobody")
    assert "; nvshmem with two ranks on one: all 2 ranks reach" in words


def test_schema_command_prints_the_schema():
    assert CliRunner().invoke(app, ["schema"]).stdout == schema_text()


def test_memory_by_pairs_is_less_than_by_rows_times_top_k(small_job):
    job = small_job("run.batch={tokens_per_rank: [64, 64, 64, 64]}", "moe.num_experts=24")
    result = bench_memory(job)
    for sizes in result["ranks"]:
        assert sizes["rows"] <= sizes["pairs"] <= 2 * sizes["rows"]
        assert sizes["workspace_and_scratch"] < sizes["by_rows_x_top_k"]
        assert sizes["receive"] <= sizes["by_ranks_x_max_tokens"]
    json.dumps(result)


def test_bench_memory_shows_what_is_saved(small, tmp_path):
    out = tmp_path / "out.json"
    result = CliRunner().invoke(app, ["bench", str(small), "--memory", "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert "formula / held" in result.output
    assert json.loads(out.read_text())["subject"] == "memory"


@pytest.mark.parametrize("overrides", [[], ["dispatch.wire=fp8"], ["dispatch.algorithm=allgather"]])
def test_bench_checks_and_then_times_beside_its_ceilings(small_job, overrides):
    job = small_job("run.batch={tokens_per_rank: [9, 0, 4, 1]}", *overrides)
    results = run_local(4, lambda transport: bench_dispatch(job, transport, rounds=2))
    json.dumps(results[0])
    times = results[0]["milliseconds"]
    assert {"dispatch", "combine", "bare all-to-all", "naive dispatch"} <= times.keys()
    assert all(time["least"] <= time["median"] <= time["p99"] for time in times.values())
    assert all(ratio > 0 for ratio in results[0]["ratios"].values())


def bench_beside_shm(transport: Transport, job: Job) -> dict[str, Any]:
    shm = connect("shm")
    result = bench_transports(job, [transport, shm], rounds=2)
    shm.close()
    return result


def test_bench_compares_transports_in_one_run(gloo, small_job):
    job = small_job("run.batch={tokens_per_rank: [9, 1, 4, 2]}")
    result = gloo(4, bench_beside_shm, job)[0]
    json.dumps(result)
    assert {"gloo dispatch", "shm combine", "copy of rows"} <= result["milliseconds"].keys()
    assert all(ratio > 0 for ratio in result["ratios"].values())


def test_bench_of_the_experts_says_what_it_lacks():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    error = CliRunner().invoke(app, ["bench", "experts"]).exception
    assert isinstance(error, ConfigError)
    assert "GPU" in str(error)
