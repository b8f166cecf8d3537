"""The benchmark checks itself and reports every figure."""

from __future__ import annotations

import json

import torch

from crossdock.scratch.bench_permute import Case, run_permute_bench


def test_a_report_is_json_and_complete():
    cases = tuple(
        Case(
            name=str(dtype),
            tokens=9,
            top_k=2,
            num_experts=4,
            num_local_experts=2,
            hidden=256,
            dtype=dtype,
        )
        for dtype in (torch.bfloat16, torch.float8_e4m3fn)
    )
    report = run_permute_bench("cpu", cases=cases, repeats=2)
    assert json.loads(json.dumps(report)) == report
    for case in report["cases"]:
        for name in ("permute", "unpermute"):
            assert case[f"{name}_us"] > 0
            assert case[f"{name}_ratio"] == case[f"{name}_ceiling_us"] / case[f"{name}_us"]
        assert case["index_us"] > 0
    for entry in (*report["activations"], *report["conversions"]):
        assert entry["ratio"] == entry["ceiling_us"] / entry["us"]
