"""Passes over blocks of tokens: whatever the size of a block, the same bits."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from crossdock.dispatch import blocks
from crossdock.dispatch.algorithms.base import ordered_sum
from crossdock.dispatch.wire import FP8, gather_rows

SIZES = st.integers(0, 40)
LISTS = st.lists(st.floats(0, 1), min_size=1, max_size=4)  # how many of the tokens each list has
BLOCK_TOKENS = st.integers(1, 41)


def some_tokens(num_tokens: int, shares: list[float], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.rand(num_tokens, generator=generator) < share for share in shares]
    return [draw.nonzero()[:, 0] for draw in draws]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, FP8], ids=str)
@given(num_tokens=SIZES, shares=LISTS, block=BLOCK_TOKENS, seed=st.integers(0, 99))
@example(num_tokens=40, shares=[1.0, 0.5], block=7, seed=0)
def test_rows_are_gathered_to_every_place(dtype, num_tokens, shares, block, seed):
    source = torch.randn(num_tokens, 5).to(dtype)
    tokens = some_tokens(num_tokens, shares, seed)
    outs = [torch.zeros(len(index), 8, dtype=torch.float32).to(dtype)[:, :5] for index in tokens]
    with patch.object(blocks, "_BLOCK_BYTES", block * 5 * source.itemsize):
        gather_rows(source, tokens, outs)
    for index, out in zip(tokens, outs, strict=True):
        assert torch.equal(out.float(), source.float()[index])


@given(num_tokens=SIZES, shares=LISTS, block=BLOCK_TOKENS, seed=st.integers(0, 99))
@example(num_tokens=40, shares=[1.0, 0.5, 0.9], block=7, seed=0)
def test_sums_do_not_depend_on_blocks(num_tokens, shares, block, seed):
    tokens = some_tokens(num_tokens, shares, seed)
    parts = [torch.randn(len(index), 5).to(torch.bfloat16) for index in tokens]
    expected = torch.zeros(num_tokens, 5)
    for part, index in zip(parts, tokens, strict=True):
        expected[index] += part.float()
    out = torch.full((num_tokens, 5), float("nan"), dtype=torch.bfloat16)
    with patch.object(blocks, "_BLOCK_BYTES", block * 5 * 4):
        ordered_sum(parts, tokens, out)
    assert torch.equal(out, expected.to(torch.bfloat16))
