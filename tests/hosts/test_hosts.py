"""The main job on hosts that are namespaces: it passes, and it ends when a host is lost."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from crossdock.launch.config import load_job
from crossdock.launch.plan.plan import make_plan
from tests.hosts.jobs import Job, start_mpirun, start_torchrun
from tests.hosts.network import Network, make_network, why_no_hosts

Start = Callable[[Network, int, list[str], Path], AbstractContextManager[Job]]
TRACE = Path(__file__).parents[2] / "configs" / "traces" / "routing-e64-k8.safetensors"
TIMEOUT_S = 8
LOST_RANKS = r"crossdock: rank 2 did not arrive; rank 3 did not arrive"

CONFIG = """\
version: 1
name: hosts
cluster: {nodes: 2, ranks_per_node: 2}
parallel: {dp: 2, pcp: 2}
moe: {num_experts: 16, top_k: 4, hidden: 64, intermediate: 32}
dispatch: {transport: gloo, timeout_s: 60}
run:
  steps: 4
  batch: {prefill: [[70, 3], [50]], decode: [5, 0]}
  routing: {zipf: 0.8}
"""

FOUR = f"""\
version: 1
name: four-hosts
cluster: {{nodes: 4, ranks_per_node: 2}}
parallel: {{dp: 8}}
moe: {{num_experts: 64, top_k: 8, hidden: 1024, intermediate: 32}}
dispatch: {{transport: auto, timeout_s: 120}}
run:
  batch: {{tokens_per_rank: [384, 384, 384, 384, 384, 384, 384, 384]}}
  routing: {{trace: {TRACE}}}
"""

_REASON = why_no_hosts()
pytestmark = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "hosts.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def two_hosts() -> Iterator[Network]:
    with make_network(2) as network:
        yield network


@pytest.mark.parametrize(
    ("start", "transport", "found"),
    [
        (start_torchrun, "gloo", "gloo"),
        (start_mpirun, "auto", "hierarchical"),
        pytest.param(start_torchrun, "auto", "hierarchical", marks=pytest.mark.slow),
        pytest.param(start_mpirun, "mpi", "mpi", marks=pytest.mark.slow),
    ],
)
def test_the_main_job_passes_on_two_hosts(start, transport, found, two_hosts, config, tmp_path):
    setting = f"dispatch.transport={transport}"
    report = run_job(start, two_hosts, [str(config), setting], tmp_path)
    assert report["transport"] == found
    assert [rank["node"] for rank in report["ranks"]] == [0, 0, 1, 1]
    for host, ranks in zip(
        two_hosts.hosts, (report["ranks"][:2], report["ranks"][2:]), strict=True
    ):
        assert host.bytes_sent() > sum(rank["bytes_sent_across_nodes"] for rank in ranks) > 0
    planned = make_plan(load_job(config, [setting])).as_json()["ranks"]
    for name in ("rows_received", "pairs", "bytes_sent", "bytes_sent_across_nodes"):
        assert [r[name] for r in report["ranks"]] == [r[name] for r in planned]


@pytest.mark.slow
@pytest.mark.parametrize("start", [start_torchrun, start_mpirun])
def test_four_hosts_cross_once_per_node_and_token(start, tmp_path):
    """Our counts against the least that can cross, and the interfaces' counts against ours."""
    config = tmp_path / "four.yaml"
    config.write_text(FOUR)
    across, carried = [], []
    for steps in (1, 5):
        settings = [str(config), f"run.steps={steps}"]
        with make_network(4) as network:
            report = run_job(start, network, settings, tmp_path)
            carried.append(sum(host.bytes_sent() for host in network.hosts))
        assert report["transport"] == "hierarchical"
        across.append(sum(rank["bytes_sent_across_nodes"] for rank in report["ranks"]))
        plan = make_plan(load_job(config, settings[1:]))
        node = torch.arange(8) // 2
        elsewhere = plan.loads.node_rows.clone()
        elsewhere[torch.arange(8), node] = 0
        least = int(elsewhere.sum()) * (plan.row_bytes + plan.result_bytes)
        assert across[-1] == least
    # What ranks say to each other beside is the same in both jobs, or small.
    assert across[1] - across[0] >= 100e6
    assert carried[1] - carried[0] == pytest.approx(across[1] - across[0], rel=0.1)
    flat = run_job_flat(start, config, tmp_path)
    assert flat == int(plan.traffic["alltoall"].sent_across.sum())
    assert 1.4 < flat / across[1] < 1.6


def run_job_flat(start: Start, config: Path, tmp_path: Path) -> int:
    """Bytes across nodes of the same job over one level."""
    settings = [str(config), "run.steps=5", "dispatch.transport=gloo"]
    with make_network(4) as network:
        report = run_job(start, network, settings, tmp_path)
    return sum(rank["bytes_sent_across_nodes"] for rank in report["ranks"])


def run_job(start: Start, network: Network, arguments: list[str], folder: Path) -> dict[str, Any]:
    """Two ranks on each host, to the end; what they report."""
    out = folder / "out.json"
    with start(network, 2, [*arguments, "--json", str(out)], folder) as job:
        job.succeed(280)
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    ("start", "transport"),
    [
        (start_torchrun, "gloo"),
        pytest.param(start_torchrun, "auto", marks=pytest.mark.slow),
        pytest.param(start_mpirun, "gloo", marks=pytest.mark.slow),
        pytest.param(start_mpirun, "mpi", marks=pytest.mark.slow),
    ],
)
def test_a_host_that_is_cut_off_is_named_by_the_rest(start, transport, two_hosts, config, tmp_path):
    settings = ["run.steps=1000000", f"dispatch={{transport: {transport}, timeout_s: {TIMEOUT_S}}}"]
    with start(two_hosts, 2, [str(config), *settings], tmp_path) as job:
        job.wait_for("step ")
        two_hosts.hosts[1].cut_off()
        # The ranks: launchers wait for the lost host longer, Open MPI's as long as TCP does.
        job.lose_all_ranks(TIMEOUT_S + 5)
    assert re.search(LOST_RANKS, job.parts[0].said), job.parts[0].said
    for part in job.parts[1:]:  # torchrun there: the store was on the host that is lost to it
        assert re.search(r"crossdock: rank 0 .*; rank 1 ", part.said), part.said


@pytest.mark.slow
@pytest.mark.parametrize("start", [start_torchrun, start_mpirun])
def test_a_rank_killed_on_another_host_ends_the_job(start, two_hosts, config, tmp_path):
    overrides = ["run.steps=1000000", f"dispatch.timeout_s={TIMEOUT_S}"]
    with start(two_hosts, 2, [str(config), *overrides], tmp_path) as job:
        job.wait_for("step ")
        os.kill(job.ranks()[3], signal.SIGKILL)
        job.end(TIMEOUT_S + 5)
    assert all(part.process.returncode not in (0, None) for part in job.parts)


@pytest.mark.slow
@pytest.mark.parametrize("start", [start_torchrun, start_mpirun])
def test_lost_packets_are_slow_and_right(start, two_hosts, config, tmp_path):
    for host in two_hosts.hosts:
        host.lose(0.01)
    with start(two_hosts, 2, [str(config)], tmp_path) as job:
        job.succeed(200)


@pytest.mark.slow
def test_a_narrow_link_is_slow_and_right(two_hosts, config, tmp_path):
    for host in two_hosts.hosts:
        host.limit(100)
    overrides = ["moe.hidden=1024", "run.batch={tokens_per_rank: [256, 256, 256, 256]}"]
    with start_torchrun(two_hosts, 2, [str(config), *overrides], tmp_path) as job:
        job.succeed(200)


@pytest.mark.slow
def test_delay_and_lost_packets_together_are_slow_and_right(config, tmp_path):
    with make_network(2, delay_s=0.2) as network:
        for host in network.hosts:
            host.lose(0.01)
        with start_torchrun(network, 2, [str(config)], tmp_path) as job:
            job.succeed(280)
