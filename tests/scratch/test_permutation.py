"""Permute and unpermute against a stable sort, with everything unused poisoned."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.scratch import PermuteScratch, WorkspaceManager, permute, permute_scratch, unpermute
from crossdock.scratch.errors import LockedError
from tests.scratch.oracle import (
    bits,
    expected_permutation,
    expected_sum,
    poison_,
    random_routing,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]


def make_hidden(capacity: int, num_rows: int, hidden: int, dtype: torch.dtype, pad: int):
    """Random rows in a wider, poisoned buffer: a strided view with a NaN tail."""
    wide = poison_(torch.empty(capacity, hidden + pad, dtype=dtype))
    view = wide[:, :hidden]
    view[:num_rows] = torch.randn(num_rows, hidden).to(dtype)
    return view


@st.composite
def cases(draw):
    num_local_experts = draw(st.integers(0, 9))
    top_k = draw(st.integers(1, 5))
    num_rows = draw(st.integers(0, 40))
    tail = draw(st.integers(0, 5))
    ids = st.integers(-1, num_local_experts - 1)
    drawn = draw(st.lists(ids, min_size=num_rows * top_k, max_size=num_rows * top_k))
    idx = torch.full((num_rows + tail, top_k), -1, dtype=torch.int64)
    idx[:num_rows] = torch.tensor(drawn, dtype=torch.int64).view(num_rows, top_k)
    return num_local_experts, num_rows, idx


@settings(deadline=None, max_examples=150)
@given(
    case=cases(),
    dtype=st.sampled_from(DTYPES),
    hidden=st.sampled_from([1, 3, 8, 129]),
    pad=st.sampled_from([0, 16]),
)
def test_round_trip_equals_the_oracle(case, dtype, hidden, pad):
    num_local_experts, num_rows, idx = case
    capacity, top_k = idx.shape
    want = expected_permutation(idx, num_local_experts)
    pairs = want.source.numel()
    x = make_hidden(capacity, num_rows, hidden, dtype, pad)
    scale = None
    if dtype == torch.float8_e4m3fn:
        scale = make_hidden(capacity, num_rows, 2, torch.float32, 2)
    scratch = PermuteScratch(num_local_experts, num_local_experts, "cpu")

    permuted = permute(x, scale, idx, scratch, num_pairs=pairs)

    assert torch.equal(permuted.offsets, want.offsets)
    assert torch.equal(permuted.source, want.source)
    assert torch.equal(permuted.inverse, want.inverse)
    assert permuted.num_pairs == pairs
    rows = want.source.long()
    assert torch.equal(bits(permuted.hidden), bits(x.contiguous()[rows]))
    if scale is not None:
        assert torch.equal(permuted.scale, scale[rows])

    weights = torch.where(idx >= 0, torch.rand(capacity, top_k), float("nan"))
    expert_out = torch.randn(pairs, hidden).bfloat16()
    out = poison_(torch.empty(capacity, hidden, dtype=torch.bfloat16))
    assert unpermute(out, expert_out, weights, permuted) is out
    want_out = expected_sum(expert_out, weights, want.inverse)
    assert torch.equal(out, want_out.bfloat16())
    assert not out[(idx < 0).all(1)].count_nonzero()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_more_room_than_pairs_leaves_the_tail_alone(dtype):
    idx = random_routing(16, 12, 3, 4, local_share=0.5)
    pairs = int((idx >= 0).sum())
    x = make_hidden(16, 12, 24, dtype, 0)
    out = poison_(torch.empty(100, 32, dtype=dtype))[:, :24]
    permuted = permute(x, None, idx, PermuteScratch(8, 4, "cpu"), num_pairs=pairs + 7, out=out)
    assert permuted.hidden.data_ptr() == out.data_ptr()
    assert permuted.hidden.shape == (pairs + 7, 24)
    assert int(permuted.offsets[-1]) == pairs
    assert not permuted.hidden[:pairs].float().isnan().any()
    assert out[pairs:].float().isnan().all()


@pytest.mark.parametrize("as_tensor", [False, True])
def test_rows_past_num_rows_are_not_read_and_their_results_not_written(as_tensor):
    idx = random_routing(16, 16, 3, 4)
    idx[10:] = 10**12  # garbage
    pairs = 30
    num_rows = torch.tensor([10]) if as_tensor else 10
    x = make_hidden(16, 10, 8, torch.bfloat16, 0)
    scratch = PermuteScratch(4, 4, "cpu")
    permuted = permute(x, None, idx, scratch, num_pairs=pairs, num_rows=num_rows)
    want = expected_permutation(idx[:10], 4)
    assert torch.equal(permuted.source, want.source)
    assert torch.equal(permuted.inverse[:10], want.inverse)
    out = torch.full((16, 8), 7.0)
    weights = torch.rand(16, 3)
    weights[10:] = float("nan")
    unpermute(out, permuted.hidden, weights, permuted)
    assert not out.isnan().any()
    assert (out[10:] == 7.0).all()


def test_unpermute_is_the_same_in_one_chunk_and_in_many(monkeypatch):
    idx = random_routing(100, 90, 4, 6, local_share=0.5)
    pairs = int((idx >= 0).sum())
    x = torch.randn(100, 16)
    permuted = permute(x, None, idx, PermuteScratch(6, 6, "cpu"), num_pairs=pairs)
    weights = torch.rand(100, 4)
    whole = unpermute(torch.empty(100, 16), permuted.hidden, weights, permuted)
    monkeypatch.setattr("crossdock.scratch.permute_torch.CHUNK_ELEMENTS", 7 * 16)
    chunked = unpermute(torch.empty(100, 16), permuted.hidden, weights, permuted)
    assert torch.equal(whole, chunked)


def test_too_few_pairs_are_refused_with_both_numbers():
    idx = torch.zeros(5, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"num_pairs = 4, but topk_idx has 5"):
        permute(torch.randn(5, 8), None, idx, PermuteScratch(1, 1, "cpu"), num_pairs=4)


def test_a_locked_scratch_permutes_up_to_its_capacity_and_no_further():
    workspace = WorkspaceManager("cpu")
    scratch = permute_scratch(workspace, num_experts=1, num_local_experts=1, device="cpu")
    idx = torch.zeros(5, 1, dtype=torch.int64)
    x = torch.randn(6, 8)
    first = permute(x[:5], None, idx, scratch, num_pairs=5)
    workspace.lock()
    again = permute(x[:5], None, idx, scratch, num_pairs=5)
    assert again.source.data_ptr() == first.source.data_ptr()
    assert again.offsets.data_ptr() == first.offsets.data_ptr()
    with pytest.raises(LockedError, match="6 pairs wanted, 5 present"):
        permute(x, None, torch.zeros(6, 1, dtype=torch.int64), scratch, num_pairs=6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.randn(4, 8)}, "hidden"),
        ({"hidden": torch.randn(8, 5).t()}, "stride"),
        ({"topk_idx": torch.zeros(5, 1, dtype=torch.int32)}, "int64"),
        ({"out": torch.empty(4, 8)}, "out"),
        ({"out": torch.empty(5, 8, dtype=torch.float8_e4m3fn)}, "fp8 comes with scales"),
        ({"scale": torch.ones(5, 1), "out_scale": torch.empty(4, 1)}, "out_scale"),
        ({"scale": torch.ones(5, 1), "out_scale": torch.empty(5, 2)}, "other dtypes without"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change, message):
    arguments = {
        "hidden": torch.randn(5, 8),
        "scale": None,
        "topk_idx": torch.zeros(5, 1, dtype=torch.int64),
        "scratch": PermuteScratch(1, 1, "cpu"),
        "num_pairs": 5,
    }
    with pytest.raises(ValueError, match=message):
        permute(**{**arguments, **change})


def test_unpermute_refuses_what_does_not_fit():
    idx = torch.zeros(5, 1, dtype=torch.int64)
    permuted = permute(torch.randn(5, 8), None, idx, PermuteScratch(1, 1, "cpu"), num_pairs=5)
    with pytest.raises(ValueError, match="topk_weights"):
        unpermute(torch.empty(5, 8), permuted.hidden, torch.ones(5, 2), permuted)
    with pytest.raises(ValueError, match="out"):
        unpermute(torch.empty(6, 8), permuted.hidden, torch.ones(5, 1), permuted)
