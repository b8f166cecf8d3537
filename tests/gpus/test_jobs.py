"""The main job on several GPUs, each step against the single-process oracle, and the benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from crossdock.launch.rig import run_on_rig
from tests.gpus.conftest import Crews
from tests.gpus.fleet import CPU_FLEETS, GPU_FLEETS, ONE_GPU_FLEETS, Fleet, on
from tests.launch.jobs import start

ROOT = Path(__file__).parents[2]
SMALL = ["moe.hidden=64", "moe.intermediate=16", "cluster.device=cpu"]
STARTS = {"nccl": "torchrun", "gloo": "torchrun", "nvshmem": "mpirun", "shm": "mpirun"}


@on(GPU_FLEETS, only=lambda fleet: fleet.transport in STARTS)
def test_the_main_job(crews: Crews, fleet: Fleet, tmp_path):
    crews.environment(fleet)  # the GPUs are this job's
    run_job(fleet, tmp_path)


@pytest.mark.slow
@on(CPU_FLEETS, only=lambda fleet: fleet.transport in STARTS)
def test_the_main_job_on_cpus(fleet: Fleet, tmp_path):
    run_job(fleet, tmp_path, *SMALL)


@on(ONE_GPU_FLEETS, only=lambda fleet: fleet.shares_gpu)
def test_the_main_job_on_one_gpu(crews: Crews, fleet: Fleet, tmp_path):
    report = tmp_path / "report.json"
    command = ["-m", "crossdock.launch", "run", str(config_of(fleet))]
    command += ["dispatch.transport=nvshmem", "--json", str(report)]
    environment = crews.environment(fleet)
    assert run_on_rig(fleet.size, command, timeout_s=100, environment=environment) == 0
    check_report(report, fleet)


@pytest.mark.slow
def test_the_benchmark_on_cpus(tmp_path):
    """What needs no GPU of it, as torchrun starts it."""
    out = tmp_path / "gpus.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", "2", "-m", "crossdock.launch.bench.gpus", "--json", str(out)]
    command += ["--device", "cpu", "--rounds", "2", "--seconds", "2"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["cases"][0]["us"]["naive over gloo"] > 0
    assert "naive / eager shm dispatch, 32 tokens, uniform" in result["figures"]
    assert out.with_suffix(".md").read_text() in done.stdout


def run_job(fleet: Fleet, folder: Path, *overrides: str) -> None:
    report = folder / "report.json"
    arguments = [str(config_of(fleet)), f"dispatch.transport={fleet.transport}", *overrides]
    with start(STARTS[fleet.transport], fleet.size, [*arguments, "--json", str(report)]) as job:
        outcome = job.end(150)
    assert outcome.status == 0, outcome.err
    check_report(report, fleet)


def config_of(fleet: Fleet) -> Path:
    return ROOT / "configs" / f"gpus-{fleet.size}.yaml"


def check_report(path: Path, fleet: Fleet) -> None:
    report = json.loads(path.read_text())
    assert report["ok"]
    assert report["transport"] == fleet.transport
    assert report["world_size"] == fleet.size
    assert report["max_abs_error"] <= report["tolerance"]
