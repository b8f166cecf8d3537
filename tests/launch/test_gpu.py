"""The main job on a GPU: one rank, and four that share it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from crossdock.launch.rig import mps, run_on_rig
from tests.launch.conftest import CONFIGS

pytestmark = pytest.mark.gpu

RUN = ["-m", "crossdock.launch", "run"]


def test_one_rank_takes_nccl_and_matches_the_oracle(tmp_path):
    out = tmp_path / "out.json"
    overrides = [
        "cluster={nodes: 1, ranks_per_node: 1, device: cuda}",
        "parallel={}",
        "run.batch={prefill: [[1500, 17]], decode: [5]}",
    ]
    command = [*RUN, str(CONFIGS / "laptop.yaml"), *overrides, "--json", str(out)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["ok"]
    assert report["transport"] == "nccl"


@pytest.mark.parametrize(
    "override", ["dispatch.transport=auto", "dispatch.symmetric_heap=1GiB", "run.lock_after=1"]
)
def test_four_ranks_that_share_a_gpu_take_nvshmem_and_match_the_oracle(tmp_path, override):
    out = tmp_path / "out.json"
    command = [*RUN, str(CONFIGS / "rig-4.yaml"), "run.steps=3", override, "--json", str(out)]
    with mps() as variables:
        assert run_on_rig(4, command, timeout_s=120, environment=variables) == 0
    report = json.loads(out.read_text())
    assert report["ok"]
    assert report["transport"] == "nvshmem"
