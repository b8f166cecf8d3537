"""Workers on rows that come grouped by expert: pairs, multiplied where they lie."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from crossdock.dispatch.wire import quantize
from crossdock.experts import ExpertWeights, make_experts
from crossdock.scratch import WorkspaceManager
from crossdock.scratch.errors import LockedError
from tests.experts.rows import make_rows

COUNTS = (3, 0, 5, 1)


def make_pair_rows(hidden: int, dtype: torch.dtype, *, wire: str = "payload"):
    """One row a pair, in order of experts; every other row is not this rank's concern."""
    expert = torch.arange(len(COUNTS)).repeat_interleave(torch.tensor(COUNTS))
    x = torch.randn(len(expert), hidden, generator=torch.Generator().manual_seed(1)).to(dtype)
    payload, scale = quantize(x) if wire == "fp8" else (x, None)
    weights = torch.ones(len(expert), 1)
    rows = make_rows(
        payload, expert[:, None], weights, num_local_experts=4, scale=scale, dtype=dtype, spare=16
    )
    return rows, expert


def group(rows, expert: torch.Tensor, alignment: int):
    """The same pairs with room between groups, which holds NaN."""
    sizes = [-(-count // alignment) * alignment for count in COUNTS]
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    first = torch.tensor([0, *COUNTS]).cumsum(0)
    at = offsets[expert] + torch.arange(len(expert)) - first[expert]

    def moved(values):
        if values is None:
            return None
        spread = values[len(expert) :][:1].expand_as(values).clone()  # what the tail holds
        spread.view(torch.uint8)[at] = values.view(torch.uint8)[: len(expert)]
        return spread

    y = torch.full_like(rows.y, torch.nan)
    return at, replace(
        rows,
        x=moved(rows.x),
        scale=moved(rows.scale),
        topk_idx=moved(rows.topk_idx),
        topk_weights=moved(rows.topk_weights),
        num_rows=len(expert) + 3 * (alignment - 1),
        layout="expert",
        offsets=offsets,
        take_y=lambda: y,
    )


def make_worker(hidden: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(2)
    weights = ExpertWeights(
        w13=torch.randn(4, 24, hidden, generator=generator).to(dtype),
        w2=torch.randn(4, hidden, 12, generator=generator).to(dtype),
    )
    return make_experts("torch", weights, workspace=WorkspaceManager("cpu"))


@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("hidden", [32, 20])
@pytest.mark.parametrize("wire", ["payload", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_results_are_those_of_rows_that_are_permuted(hidden, wire, dtype, alignment):
    rows, expert = make_pair_rows(hidden, dtype, wire=wire)
    at, grouped = group(rows, expert, alignment)
    worker = make_worker(hidden, dtype)
    expected = worker(rows)[: len(expert)].clone()
    y = worker(grouped)
    assert y.data_ptr() == grouped.y.data_ptr()
    assert expected.isfinite().all()
    torch.testing.assert_close(y[at], expected)


def test_a_locked_worker_says_how_many_pairs_it_holds_and_refuses_more():
    rows, expert = make_pair_rows(32, torch.bfloat16)
    worker = make_worker(32, torch.bfloat16)
    _, grouped = group(rows, expert, 2)
    worker(grouped)
    worker.workspace.lock()
    assert worker.pair_capacity() >= grouped.num_rows
    worker(grouped)
    with pytest.raises(LockedError):
        worker(replace(grouped, num_rows=24))


def test_no_pairs_are_no_work():
    rows, expert = make_pair_rows(32, torch.bfloat16)
    _, grouped = group(rows, expert, 1)
    empty = replace(grouped, num_rows=0, num_pairs=0, offsets=torch.zeros(5, dtype=torch.int64))
    assert make_worker(32, torch.bfloat16)(empty).isnan().all()
