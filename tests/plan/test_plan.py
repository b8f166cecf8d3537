"""A plan says what a run counts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from typer.testing import CliRunner

from crossdock.dispatch import Dispatcher, connect, run_local
from crossdock.dispatch.buckets import next_power_of_two
from crossdock.dispatch.transports.base import Transport
from crossdock.dispatch.two_level import TwoLevelMover
from crossdock.experts import ExpertWeights, make_experts
from crossdock.launch.batch import make_batch
from crossdock.launch.cli import app
from crossdock.launch.config import Job, load_job
from crossdock.launch.plan.loads import MAX_DRAWN, count_loads
from crossdock.launch.plan.plan import make_plan
from crossdock.launch.report import RankReport
from crossdock.launch.routing import make_routing
from crossdock.launch.run import run_layer
from crossdock.scratch import WorkspaceManager, permute_scratch
from crossdock.scratch.errors import LockedError

CONFIGS = Path(__file__).parents[2] / "configs"
TRACE = CONFIGS / "traces" / "routing-e64-k8.safetensors"
COUNTED = ("rows_received", "bucket_capacity", "pairs", "scratch_capacity")
SENT = ("bytes_sent", "bytes_sent_across_nodes")

SMALL = """\
version: 1
name: small
cluster: {nodes: 2, ranks_per_node: 2}
parallel: {dp: 2, pcp: 2}
moe: {num_experts: 6, top_k: 2, hidden: 16, intermediate: 8}
dispatch: {transport: gloo}
run:
  steps: 3
  batch: {prefill: [[7, 0], [5]], decode: [3, 0]}
  routing: {zipf: 1.1}
"""

TRACED = f"""\
version: 1
name: traced
cluster: {{nodes: NODES, ranks_per_node: SIZE}}
parallel: {{dp: RANKS}}
moe: {{num_experts: 64, top_k: 8, hidden: 2048, intermediate: 64}}
run:
  steps: 1
  batch: {{tokens_per_rank: TOKENS}}
  routing: {{trace: {TRACE}}}
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def traced(tmp_path: Path, nodes: int, size: int, tokens: int, *overrides: str) -> Job:
    text = TRACED.replace("NODES", str(nodes)).replace("SIZE", str(size))
    text = text.replace("RANKS", str(nodes * size)).replace("TOKENS", str([tokens] * nodes * size))
    path = tmp_path / "traced.yaml"
    path.write_text(text)
    return load_job(path, overrides)


def run(job: Job) -> list[RankReport]:
    ranks = job.topology.world_size
    return run_local(ranks, lambda transport: run_layer(job, transport, check=False))


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["dispatch.algorithm=allgather"],
        ["dispatch.wire=fp8", "moe.hidden=200"],
        ["dispatch.bucket=40"],
        ["moe.placement=round_robin", "run.routing={uniform: true}"],
        ["moe.placement=[3, 3, 3, 3, 3, 3]"],
        ["moe.num_experts=2"],
        ["moe.dtype=float32", "run.steps=8", "run.lock_after=7"],
        ["cluster.nodes=4", "cluster.ranks_per_node=1"],
        ["cluster.nodes=1", "cluster.ranks_per_node=4"],
        ["parallel={dp: 1, pcp: 2, tp: 2}", "run.batch={prefill: [[9, 3]], decode: [5]}"],
        [
            "parallel={dp: 1, pcp: 2, tp: 2, sequence_parallel: true}",
            "run.batch={prefill: [[9, 3]], decode: [5]}",
        ],
        ["parallel={dp: 4, pcp: 1}", "run.batch={tokens_per_rank: [0, 9, 1, 30]}"],
        ["run.batch={decode: [0, 0]}"],
    ],
    ids=" ".join,
)
def test_a_plan_equals_a_run(small, overrides):
    job = load_job(small, overrides)
    planned = make_plan(job).as_json()["ranks"]
    for plan, report in zip(planned, run(job), strict=True):
        assert [plan[name] for name in (*COUNTED, *SENT)] == [
            getattr(report, name) for name in (*COUNTED, *SENT)
        ]
        assert [plan["tokens_owned"]] * job.config.run.steps == report.tokens_owned


@pytest.mark.parametrize("inner", ["shm", "gloo"])
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["dispatch.algorithm=allgather"],
        ["dispatch.wire=fp8", "moe.num_experts=12", "moe.top_k=4", "run.steps=6"],
        ["parallel={dp: 4, pcp: 1}", "run.batch={tokens_per_rank: [0, 9, 1, 30]}"],
    ],
    ids=" ".join,
)
def test_a_plan_equals_a_run_over_two_levels(small, pools, inner, overrides):
    overrides = [*overrides, "dispatch.transport=hierarchical"]
    planned = make_plan(load_job(small, overrides)).as_json()["ranks"]
    reports = pools.get(4, "gloo").run(run_over_two_levels, small, overrides, inner)
    for plan, (report, relay) in zip(planned, reports, strict=True):
        assert [plan[name] for name in (*COUNTED, *SENT)] == [
            getattr(report, name) for name in (*COUNTED, *SENT)
        ]
        assert plan["memory"]["relay"] == relay


def run_over_two_levels(
    pooled: Transport, path: Path, overrides: list[str], inner: str
) -> tuple[RankReport, int]:
    """In a rank's process: the report, and the bytes taken for rows that pass through."""
    job, taken = load_job(path, overrides), []
    reserve = TwoLevelMover.reserve

    def noted(mover: TwoLevelMover, slot: int, rows: int) -> None:
        taken.append(rows * mover.wire.row_bytes)
        reserve(mover, slot, rows)

    transport = connect("hierarchical", inner=inner, ranks_per_node=2)
    try:
        with patch.object(TwoLevelMover, "reserve", noted):
            return run_layer(job, transport, check=False), max(taken, default=0)
    finally:
        transport.close()


def test_a_plan_equals_a_run_that_uses_its_trace_up(tmp_path):
    trace_tokens = 8192 * 6
    overrides = ["moe.hidden=8", f"run.steps={trace_tokens // 16384 + 1}", "run.routing.layer=4"]
    job = traced(tmp_path, 2, 2, 4096, *overrides)
    plan, loads = make_plan(job), count_loads(job)
    routing, owner = make_routing(job), job.placement.owner
    for step in range(job.config.run.steps):
        topk_idx, _ = routing.at(torch.arange(step * 16384, (step + 1) * 16384))
        there = torch.zeros(16384, 4, dtype=torch.bool).scatter_(1, owner[topk_idx], True)
        assert plan.rows_received[step].tolist() == there.sum(0).tolist()
        assert loads.rows_sent[step].tolist() == there.view(4, 4096, 4).sum((1, 2)).tolist()
    assert loads.exact


def test_two_level_crosses_once_per_node_and_token(small):
    """Against a count token by token."""
    job = load_job(small, ["moe.num_experts=12", "moe.top_k=4", "moe.placement=round_robin"])
    plan, steps = make_plan(job), job.config.run.steps
    routing, owner = make_routing(job), job.placement.owner.tolist()
    total = make_batch(job, 0).total
    ends = plan.loads.tokens.cumsum(0).tolist()
    out, home = plan.row_bytes, plan.result_bytes
    flat = [[0] * 4 for _ in range(4)]
    two_level = [[0] * 4 for _ in range(4)]
    for number in range(total * steps):
        source = next(rank for rank in range(4) if number % total < ends[rank])
        ranks = {owner[expert] for expert in routing.at(torch.tensor([number]))[0][0].tolist()}
        for rank in ranks - {source}:
            flat[source][rank] += out
            flat[rank][source] += home
        for node in {rank // 2 for rank in ranks}:
            gateway = node * 2 + source % 2
            if gateway != source:
                two_level[source][gateway] += out
                two_level[gateway][source] += home
            for rank in ranks - {gateway}:
                if rank // 2 == node:
                    two_level[gateway][rank] += out
                    two_level[rank][gateway] += home
    assert plan.traffic["alltoall"].between_ranks.tolist() == flat
    assert plan.traffic["two-level"].between_ranks.tolist() == two_level
    crossing = sum(two_level[a][b] for a in range(4) for b in range(4) if a // 2 != b // 2)
    assert int(plan.traffic["two-level"].sent_across.sum()) == crossing
    assert int(plan.traffic["two-level"].between_nodes.sum()) == crossing


@pytest.mark.parametrize(("nodes", "size", "least", "most"), [(4, 2, 1.4, 1.6), (2, 8, 3.0, 4.0)])
def test_flat_moves_more_across_nodes_than_two_level(tmp_path, nodes, size, least, most):
    traffic = make_plan(traced(tmp_path, nodes, size, 512)).traffic
    across = {name: int(found.sent_across.sum()) for name, found in traffic.items()}
    assert least < across["alltoall"] / across["two-level"] < most
    assert across["allgather"] > across["alltoall"]


@pytest.mark.parametrize("algorithm", ["alltoall", "allgather"])
@pytest.mark.parametrize("wire", ["payload", "fp8"])
def test_memory_is_what_the_layer_holds(small, algorithm, wire):
    overrides = [f"dispatch.algorithm={algorithm}", f"dispatch.wire={wire}", "moe.hidden=200"]
    job = load_job(small, [*overrides, "run.steps=1"])
    plan = make_plan(job)

    def held(transport):
        rank, moe = transport.rank, job.config.moe
        batch = make_batch(job, rank)
        workspace = WorkspaceManager("cpu")
        weights = ExpertWeights.random(
            job.placement.local_experts(rank).tolist(),
            hidden=moe.hidden,
            intermediate=moe.intermediate,
            dtype=job.dtype,
            device=torch.device("cpu"),
            seed=0,
        )
        experts = make_experts("auto", weights, workspace=workspace, num_experts=moe.num_experts)
        x = torch.zeros(batch.num_owned, moe.hidden, dtype=job.dtype)
        routing = make_routing(job).at(batch.to_ep(batch.numbers))
        with Dispatcher(
            job.dispatch_config, transport, topology=job.topology, placement=job.placement
        ) as dispatcher:
            rows, handle = dispatcher.dispatch(x, *routing)
            experts(rows)
            dispatcher.combine(rows.y, handle)
        scratch = permute_scratch(
            workspace,
            num_experts=moe.num_experts,
            num_local_experts=weights.num_local_experts,
            device="cpu",
        )
        bucket = rows.capacity * plan.row_bytes
        parts = (rows.topk_idx, rows.topk_weights, rows.source)
        return {
            "bucket": bucket + sum(part.nbytes for part in parts),
            "y": rows.y.nbytes,
            "permute_scratch": scratch.num_bytes,
            "workspace": workspace.num_bytes,
            "weights": weights.w13.nbytes + weights.w2.nbytes,
        }

    for rank, found in enumerate(run_local(4, held)):
        planned = plan.as_json()["ranks"][rank]["memory"]
        assert {name: planned[name] for name in found} == found


def test_a_step_that_will_be_refused_is_foreseen(small):
    overrides = ["parallel={dp: 4, pcp: 1}", "run.batch={tokens_per_rank: [30, 9, 1, 30]}"]
    job = load_job(small, [*overrides, "run.steps=200", "run.lock_after=1", "moe.top_k=1"])
    refusal = make_plan(job).refusal
    assert refusal is not None
    assert refusal.capacity == next_power_of_two(refusal.capacity) < refusal.need
    steps = []
    with pytest.raises(LockedError) as caught:
        run_local(4, lambda transport: run_layer(job, transport, check=False, on_step=steps.append))
    assert f"receive {refusal.need} {refusal.what}" in str(caught.value)
    assert max(steps) == refusal.step - 1


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_no_step_of_our_jobs_would_be_refused(name):
    assert make_plan(load_job(CONFIGS / f"{name}.yaml")).refusal is None


def test_a_fixed_bucket_that_is_too_small_is_foreseen(small):
    refusal = make_plan(load_job(small, ["dispatch.bucket=1"])).refusal
    assert refusal is not None
    assert (refusal.step, refusal.what, refusal.capacity) == (1, "rows", 1)


@pytest.mark.parametrize(
    ("settings", "algorithm"),
    [
        ([], "alltoall"),
        (["dispatch.transport=auto"], "two-level"),
        (["dispatch.transport=hierarchical"], "two-level"),
        (["dispatch={transport: auto, algorithm: allgather}"], "two-level allgather"),
        (["dispatch.transport=auto", "cluster={nodes: 4, ranks_per_node: 1}"], "alltoall"),
        (["dispatch.transport=auto", "cluster={nodes: 1, ranks_per_node: 4}"], "alltoall"),
    ],
)
def test_the_plan_takes_the_way_that_the_job_would(small, settings, algorithm):
    assert make_plan(load_job(small, settings)).algorithm == algorithm


def test_times_follow_from_the_busiest_rank(small):
    links = "links={intra_node_gb_s: 1.0, inter_node_gb_s: 0.25, latency_us: 7}"
    job = load_job(small, [links, "run.steps=1"])
    plan = make_plan(job)
    rows = plan.loads.rows.clone().fill_diagonal_(0)
    own_node = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)).long()
    busiest = [max(int(m.sum(0).max()), int(m.sum(1).max())) for m in (rows * own_node, rows)]
    across = rows * (1 - own_node)
    busiest[1] = max(int(across.sum(0).max()), int(across.sum(1).max()))
    move = max(busiest[0] / 1.0e9, busiest[1] / 0.25e9)
    flat = plan.traffic["alltoall"]
    assert flat.dispatch_s == pytest.approx(2 * 7e-6 + move * plan.row_bytes)
    assert flat.combine_s == pytest.approx(2 * 7e-6 + move * plan.result_bytes)
    two_level = plan.traffic["two-level"].dispatch_s
    assert two_level is not None
    assert two_level > 3 * 7e-6


def test_without_speeds_there_are_no_times(small):
    plan = make_plan(load_job(small, ["links={intra_node_gb_s: 1.0}"]))
    assert plan.traffic["alltoall"].dispatch_s is None


def test_a_long_run_of_a_distribution_is_sampled_and_says_so(small):
    batch = (
        "parallel={dp: 4, pcp: 1}",
        f"run.batch={{tokens_per_rank: [{MAX_DRAWN // 2}, 0, 0, 0]}}",
    )
    assert not count_loads(load_job(small, [*batch, "run.steps=3"])).exact
    assert count_loads(load_job(small, [*batch, "run.steps=2"])).exact


def test_4096_ranks_are_planned_in_seconds(tmp_path):
    began = time.process_time()
    plan = make_plan(traced(tmp_path, 512, 8, 4096))
    assert time.process_time() - began < 30
    tokens = 4096 * 4096
    assert tokens <= int(plan.loads.node_rows.sum()) <= int(plan.loads.rows.sum()) <= 8 * tokens
    assert int(plan.loads.pairs.sum()) == 8 * tokens
    assert plan.as_json()["traffic"]["alltoall"]["between_ranks"] is None


def test_the_command_takes_another_trace_and_writes_json(tmp_path):
    config, out = tmp_path / "c.yaml", tmp_path / "plan.json"
    config.write_text(SMALL.replace("num_experts: 6, top_k: 2", "num_experts: 64, top_k: 8"))
    arguments = ["plan", str(config), "--trace", str(TRACE), "--json", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "two-level" in result.output
    assert "alltoall *" in result.output
    written = json.loads(out.read_text())
    assert written["config"]["run"]["routing"]["trace"] == str(TRACE)
    assert written["config"]["run"]["routing"]["zipf"] is None
    assert len(written["traffic"]["two-level"]["between_nodes"]) == 2
