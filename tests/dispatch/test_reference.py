"""The oracle that is shipped, against the one that these tests wrote from the specification."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from crossdock.dispatch.reference import reference_combine, reference_dispatch
from tests.dispatch.cases import Case
from tests.dispatch.oracle import assert_same_bits, expected_out, expected_rows
from tests.dispatch.test_ragged import cases


@given(cases())
@settings(max_examples=30)
def test_both_oracles_dispatch_alike(case: Case):
    batches = [case.batch(0, rank) for rank in range(case.world_size)]
    received = reference_dispatch(
        [batch.x for batch in batches],
        [batch.topk_idx for batch in batches],
        [batch.topk_weights for batch in batches],
        case.placement(),
        algorithm=case.config.algorithm,
    )
    for rank, rows in enumerate(received):
        expected = expected_rows(case, 0, rank)
        assert torch.equal(rows.source, expected.source)
        assert torch.equal(rows.topk_idx, expected.topk_idx)
        assert_same_bits(rows.topk_weights, expected.topk_weights)
        assert_same_bits(rows.x, expected.x)
        assert torch.equal(rows.rows_per_expert, expected.rows_per_expert)


@given(cases())
@settings(max_examples=30)
def test_both_oracles_combine_alike(case: Case):
    sources, y = [], []
    for rank in range(case.world_size):
        rows = expected_rows(case, 0, rank)
        results = case.results(0, rank, len(rows.source))
        results[(rows.topk_idx < 0).all(dim=1)] = 0
        sources.append(rows.source)
        y.append(results)
    out = reference_combine(y, sources, list(case.tokens[0]), case.config.dtype)
    for rank, result in enumerate(out):
        assert torch.equal(result, expected_out(case, 0, rank))


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        # fp32, ascending: ((2**12 + 1) + -2**12) + 1
        ("rank", 2.0),
        # 2**12 + 1 does not fit in bf16, so the first node says 2**12; the second -2**12 + 1 the
        # same way, -2**12.
        ("two-level", 0.0),
    ],
)
def test_two_level_sums_round_between_nodes(order, expected):
    y = [torch.tensor([[value]], dtype=torch.bfloat16) for value in (2.0**12, 1.0, -(2.0**12), 1.0)]
    source = [torch.tensor([[0, 0]])] * 4
    out = reference_combine(y, source, [1, 0, 0, 0], torch.bfloat16, order=order, ranks_per_node=2)
    assert out[0].item() == expected
    assert [len(part) for part in out[1:]] == [0, 0, 0]
