"""The main job through real launchers, and what is left of it when a rank is lost."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.launch.jobs import LAUNCHERS, start

TIMEOUT_S = 5
ENDLESS = [
    "run.steps=1000000",
    "cluster.ranks_per_node=3",
    "parallel={dp: 3}",
    "run.batch={tokens_per_rank: [7, 0, 5]}",
]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_main_job_passes_under_each_launcher(launcher, small, tmp_path):
    out = tmp_path / "out.json"
    with start(launcher, 4, [str(small), "--json", str(out)]) as job:
        outcome = job.end(120)
    assert outcome.status == 0, outcome.err
    assert "All 3 steps on all 4 ranks match" in outcome.out.strip().splitlines()[-1]
    report = json.loads(out.read_text())
    assert report["ok"]
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1, 2, 3]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_lost_rank_ends_the_job_and_is_named(launcher, how, small, tmp_path):
    overrides = [*ENDLESS, f"dispatch.timeout_s={TIMEOUT_S}"]
    with start(launcher, 3, [str(small), *overrides, "--errors-dir", str(tmp_path)]) as job:
        job.wait_for("step ")
        os.kill(job.pid_of_rank(2), how)
        outcome = job.end(TIMEOUT_S + 5)
    assert outcome.status != 0
    said = [line for line in outcome.err.splitlines() if line.startswith("crossdock: ")]
    assert any("rank 2" in line for line in said) or _launcher_names_rank_2(outcome.err), (
        outcome.err
    )
    if launcher == "alone":
        assert "rank 2" in outcome.last_line, outcome.err
        assert "Traceback" not in outcome.err, outcome.err
    if how == signal.SIGKILL and launcher == "alone":
        assert outcome.last_line == "crossdock: rank 2 was killed by SIGKILL"


def _launcher_names_rank_2(text: str) -> bool:
    """torchrun's ``rank : 2`` and Open MPI's ``[...@1,2]`` or ``process rank 2``."""
    return any(sign in text.replace(" ", "") for sign in ("rank:2(local", "@1,2]", "rank2withPID"))


def test_another_number_of_ranks_than_configured_is_said_once(small, tmp_path):
    with start("mpirun", 3, [str(small), "--errors-dir", str(tmp_path)]) as job:
        outcome = job.end(60)
    assert outcome.status == 2
    said = [line for line in outcome.err.splitlines() if line.startswith("crossdock: ")]
    assert len(said) == 1
    assert "started 3 ranks" in said[0]


def test_an_error_of_the_job_is_the_last_line(small, tmp_path):
    overrides = ["dispatch.bucket=1", "run.steps=2"]
    with start("alone", 4, [str(small), *overrides, "--errors-dir", str(tmp_path)]) as job:
        outcome = job.end(60)
    assert outcome.status == 1
    assert "Traceback" not in outcome.err, outcome.err
    assert outcome.last_line.startswith("crossdock: ")
    assert "bucket" in outcome.last_line
    assert len(list(tmp_path.glob("*/rank-*.txt"))) >= 1


ENDINGS = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]


@pytest.mark.parametrize("how", ENDINGS, ids=lambda how: how.name)
def test_ending_the_command_ends_its_ranks(how, small, tmp_path):
    with start("alone", 3, [str(small), *ENDLESS, "--errors-dir", str(tmp_path)]) as job:
        job.wait_for("step ")
        if how == signal.SIGINT:  # a terminal's Ctrl-C goes to all
            os.killpg(job.process.pid, how)
        else:
            os.kill(job.process.pid, how)
        outcome = job.end(20)
    assert outcome.status == (-how if how == signal.SIGKILL else 128 + how)
    assert "Traceback" not in outcome.err, outcome.err
