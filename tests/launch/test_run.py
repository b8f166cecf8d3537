from __future__ import annotations

import io
import json

import jsonschema
import pytest
import torch
from rich.console import Console

import crossdock.launch.run as run_module
from crossdock.dispatch import run_local
from crossdock.launch.config import Job, load_job
from crossdock.launch.report import RankReport, RunReport
from crossdock.launch.run import run_layer
from crossdock.launch.screen import write_json
from crossdock.scratch.errors import LockedError
from tests.launch.conftest import CONFIGS

PER_STEP = {"type": "array", "items": {"type": "integer", "minimum": 0}}
SECONDS = {"type": "array", "items": {"type": "number", "minimum": 0}}
LISTS = (
    "tokens_attention",
    "tokens_owned",
    "rows_received",
    "bucket_capacity",
    "pairs",
    "scratch_capacity",
)
NUMBERS = ("rank", "dp", "pcp", "tp", "node", "bytes_sent", "bytes_sent_across_nodes")


def closed(properties: dict[str, object]) -> dict[str, object]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


REPORT_SCHEMA = closed(
    {
        "ok": {"type": "boolean"},
        "config": {"type": "object", "required": ["cluster", "parallel", "moe", "run"]},
        "world_size": {"type": "integer"},
        "transport": {"type": "string"},
        "algorithm": {"enum": ["alltoall", "allgather"]},
        "steps": {"type": "integer"},
        "max_abs_error": {"type": "number"},
        "tolerance": {"type": "number"},
        "ranks": {
            "type": "array",
            "items": closed(
                {name: {"type": "integer"} for name in NUMBERS}
                | dict.fromkeys(LISTS, PER_STEP)
                | {"seconds": closed(dict.fromkeys(("dispatch", "experts", "combine"), SECONDS))}
            ),
        },
        "versions": {"type": "object", "additionalProperties": {"type": "string"}},
    }
)


def run(job: Job, *, check: bool = True) -> RunReport:
    world_size = job.topology.world_size
    ranks = run_local(world_size, lambda transport: run_layer(job, transport, check=check))
    return RunReport(job=job, transport="local", ranks=ranks, checked=check)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["dispatch.algorithm=allgather"],
        ["dispatch.wire=fp8"],
        ["dispatch.bucket=64"],
        ["moe.placement=round_robin"],
        ["moe.placement=[3, 3, 3, 3, 3, 3]"],
        ["moe.num_experts=2"],
        ["moe.dtype=float16"],
        ["moe.dtype=float32"],
        ["moe.hidden=129", "moe.intermediate=33"],
        ["parallel={dp: 1, pcp: 4}", "run.batch={prefill: [[8, 1, 7]], decode: [5]}"],
        ["parallel={dp: 1, pcp: 2, tp: 2}", "run.batch={prefill: [[5]], decode: [3]}"],
        [
            "parallel={dp: 2, tp: 2, sequence_parallel: true}",
            "run.batch={prefill: [[5], [2]], decode: [3, 1]}",
        ],
        ["run.batch={tokens_per_rank: [0, 9, 0, 4]}"],
        ["run.batch={tokens_per_rank: [0, 0, 0, 0]}"],
        ["run.routing={uniform: true}"],
    ],
    ids=lambda overrides: " ".join(overrides) or "small",
)
def test_every_step_matches_the_oracle_on_every_rank(small_job, overrides):
    report = run(small_job("dispatch.debug=true", *overrides))
    assert report.ok
    assert report.max_abs_error <= report.tolerance


def test_the_json_is_as_promised(small_job, tmp_path):
    report = run(small_job("cluster={nodes: 2, ranks_per_node: 2}"))
    write_json(report.as_json(), tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    jsonschema.validate(found, REPORT_SCHEMA)
    assert found["ok"] is True
    assert found["world_size"] == len(found["ranks"]) == 4
    for rank in found["ranks"]:
        assert all(len(rank[name]) == found["steps"] == 3 for name in LISTS)
        assert all(len(times) == 3 for times in rank["seconds"].values())
        for rows, bucket in zip(rank["rows_received"], rank["bucket_capacity"], strict=True):
            assert rows <= bucket
        assert 0 < rank["bytes_sent_across_nodes"] < rank["bytes_sent"]
    assert [rank["node"] for rank in found["ranks"]] == [0, 0, 1, 1]
    assert [rank["pcp"] for rank in found["ranks"]] == [0, 1, 0, 1]


def test_each_decode_token_is_owned_once(small_job):
    report = run(small_job("run.batch={decode: [5, 2]}"), check=False)
    assert [rank.tokens_owned[0] for rank in report.ranks] == [3, 2, 1, 1]
    assert [rank.tokens_attention[0] for rank in report.ranks] == [5, 5, 2, 2]


def test_a_wrong_result_on_one_rank_is_a_mismatch(small_job, monkeypatch):
    from_ep = run_module.Batch.from_ep

    def wrong(self, out, transport):
        attention = from_ep(self, out, transport).clone()
        if transport.rank == 2:
            attention[0, 0] += 3
        return attention

    monkeypatch.setattr(run_module.Batch, "from_ep", wrong)
    report = run(small_job())
    assert not report.ok
    assert [rank.ok for rank in report.ranks] == [True, True, False, True]
    assert shown(report).splitlines()[-1].startswith("MISMATCH")
    assert "rank 2" in shown(report).splitlines()[-1]


def test_nan_is_a_mismatch_and_the_json_stays_valid(small_job, monkeypatch, tmp_path):
    monkeypatch.setattr(
        run_module.Batch,
        "from_ep",
        lambda self, out, transport: torch.full(
            (self.num_attention_tokens, out.shape[1]), float("nan")
        ),
    )
    report = run(small_job())
    assert not report.ok
    write_json(report.as_json(), tmp_path / "out.json")
    text = (tmp_path / "out.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text


def test_nothing_grows_after_locking(small_job):
    report = run(
        small_job(
            "run.lock_after=2",
            "run.steps=6",
            "run.routing={uniform: true}",
            "run.batch={tokens_per_rank: [64, 64, 64, 64]}",
        )
    )
    for rank in report.ranks:
        assert len(set(rank.bucket_capacity[2:])) == 1
        assert len(set(rank.scratch_capacity[2:])) == 1


def test_a_step_that_outgrows_locked_memory_is_an_error(small_job):
    with pytest.raises(LockedError, match=r"step 1 outgrows .* run.lock_after = 0") as caught:
        run(small_job("run.lock_after=0"))
    assert caught.value.agreed


def test_the_last_line_says_whether_all_matched(small_job):
    assert shown(run(small_job())).splitlines()[-1].startswith("All 3 steps on all 4 ranks match")
    unchecked = shown(run(small_job(), check=False)).splitlines()[-1]
    assert "not compared" in unchecked


def test_wraps_of_the_trace_are_reported():
    job = load_job(
        CONFIGS / "ragged-dp.yaml",
        ["moe.hidden=8", "moe.intermediate=8", "run.steps=12", "run.routing.layer=5"],
    )
    report = run(job, check=False)
    assert "used up 2 x" in shown(report)  # 12 x 1569 tokens of 8192


def test_two_runs_are_bit_equal(small_job):
    assert strip(run(small_job())) == strip(run(small_job()))


def strip(report: RunReport) -> list[tuple[float, list[int]]]:
    return [(rank.max_abs_error, rank.rows_received) for rank in report.ranks]


def shown(report: RunReport) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    report.show(console)
    return console.export_text().rstrip()


def test_rank_reports_survive_json(small_job):
    rank = run(small_job(), check=False).ranks[3]
    assert RankReport(**json.loads(json.dumps(rank.__dict__))) == rank
