"""Rendered launches against golden files; write them anew with CROSSDOCK_WRITE_GOLDEN=1."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from crossdock.launch import render
from crossdock.launch.config import Job, load_job
from crossdock.scratch.errors import ConfigError
from tests.launch.conftest import CONFIGS

GOLDEN = Path(__file__).parent / "golden"
CASES = {
    "torchrun-one-node.sh": ("laptop", render.torchrun),
    "torchrun-static.sh": ("two-node-16gpu", render.torchrun),
    "torchrun-c10d.sh": ("two-node-16gpu", lambda job: render.torchrun(job, "c10d")),
    "mpirun.sh": ("two-node-16gpu", lambda job: render.mpirun(job, ["gpu01", "gpu02"])),
    "slurm.sh": ("wide-ep-64", render.slurm),
    "slurm-cpu.sh": ("laptop", render.slurm),
    "jobset.yaml": ("two-node-16gpu", lambda job: render.kubernetes(job, "jobset", "c:1")),
    "pytorchjob.yaml": ("two-node-16gpu", lambda job: render.kubernetes(job, "pytorchjob", "c:1")),
    "mpijob.yaml": ("two-node-16gpu", lambda job: render.kubernetes(job, "mpijob", "c:1")),
}


def job_of(name: str) -> Job:
    path = CONFIGS / f"{name}.yaml"
    job = load_job(path, ["run.seed=3"])
    # As typed by a user in the repository's root.
    return Job(
        path=path.relative_to(CONFIGS.parent),
        overrides=job.overrides,
        config=job.config,
        trace=job.trace,
    )


@pytest.mark.parametrize("name", CASES)
def test_rendered_launch_is_the_golden_one(name):
    config, renderer = CASES[name]
    text = renderer(job_of(config))
    if os.environ.get("CROSSDOCK_WRITE_GOLDEN"):
        (GOLDEN / name).write_text(text)
    assert text == (GOLDEN / name).read_text()


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(".sh")])
def test_scripts_are_valid_bash(name):
    subprocess.run(["bash", "-n", str(GOLDEN / name)], check=True)


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(".yaml")])
def test_manifests_have_as_many_ranks_as_the_configuration(name):
    (manifest,) = yaml.safe_load_all((GOLDEN / name).read_text())
    spec = manifest["spec"]
    if manifest["kind"] == "JobSet":
        job = spec["replicatedJobs"][0]["template"]["spec"]
        pods, command = job["parallelism"], job["template"]["spec"]["containers"][0]["command"]
        per_pod = int(command[command.index("--nproc-per-node") + 1])
        assert job["completions"] == pods
    elif manifest["kind"] == "PyTorchJob":
        pods = sum(part["replicas"] for part in spec["pytorchReplicaSpecs"].values())
        per_pod = int(spec["nprocPerNode"])
    else:
        pods, per_pod = spec["mpiReplicaSpecs"]["Worker"]["replicas"], spec["slotsPerWorker"]
    assert (pods, per_pod) == (2, 8)
    assert "nvidia.com/gpu: 8" in (GOLDEN / name).read_text()


def test_paths_and_values_with_blanks_are_quoted(tmp_path):
    path = tmp_path / "my job.yaml"
    path.write_text((CONFIGS / "pcp-decode.yaml").read_text().replace("trace: r", "trace: ../r"))
    path.write_text(path.read_text().split("  routing:")[0] + "  routing: {uniform: true}\n")
    text = render.slurm(load_job(path, ["run.batch={decode: [3]}"]))
    assert "my job.yaml' 'run.batch={decode: [3]}'" in text


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(".yaml")])
def test_manifests_repeat_what_stands_twice(name):
    assert "*id" not in (GOLDEN / name).read_text()


def test_every_node_has_a_host():
    job = load_job(CONFIGS / "two-node-16gpu.yaml")
    with pytest.raises(ConfigError, match=r"1 host\(s\), but cluster.nodes = 2"):
        render.mpirun(job, ["only"])
