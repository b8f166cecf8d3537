"""What must arrive and what must come back, written from the specification, and its checks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tests.dispatch.cases import Case, Step, owner_of

FP8_BLOCK = 128
FP8_MAX = 448.0


@dataclass(frozen=True)
class Expected:
    """The rows of one rank: tensors without a tail."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    source: Tensor
    rows_per_expert: Tensor


@lru_cache(maxsize=64)
def expected_rows(case: Case, step: int, rank: int) -> Expected:
    """Rows in (source rank, token) order; columns of experts that live elsewhere are -1 and 0."""
    local_id = torch.full((case.config.num_experts + 1,), -1)  # the last answers for -1
    mine = [expert for expert, owner in enumerate(case.owner) if owner == rank]
    for i, expert in enumerate(mine):
        local_id[expert] = i
    x, ids, weights, source = [], [], [], []
    for sender in range(case.world_size):
        batch = case.batch(step, sender)
        local = local_id[batch.topk_idx.long()]
        if case.config.algorithm == "allgather":
            tokens = torch.arange(len(local))
        else:
            tokens = (local >= 0).any(dim=1).nonzero().flatten()
        x.append(batch.x[tokens])
        ids.append(local[tokens])
        weights.append(torch.where(local >= 0, batch.topk_weights, 0.0)[tokens])
        source.append(torch.stack([torch.full_like(tokens, sender), tokens], dim=1))
    topk_idx = torch.cat(ids)
    return Expected(
        x=torch.cat(x),
        topk_idx=topk_idx,
        topk_weights=torch.cat(weights),
        source=torch.cat(source),
        rows_per_expert=torch.bincount(topk_idx[topk_idx >= 0], minlength=len(mine)),
    )


def expected_out(case: Case, step: int, rank: int) -> Tensor:
    """fp32 sum of the ranks' results in ascending rank order, rounded once."""
    num_tokens = case.tokens[step][rank]
    out = torch.zeros(num_tokens, case.config.hidden)
    for expert_rank in range(case.world_size):
        rows = expected_rows(case, step, expert_rank)
        y = case.results(step, expert_rank, len(rows.source)).float()
        back = (rows.source[:, 0] == rank) & (rows.topk_idx >= 0).any(dim=1)
        out[rows.source[back, 1]] += y[back]
    return out.to(case.config.dtype)


def results_of(case: Case, step: int, topk_idx: list[Tensor]) -> list[Tensor]:
    """What the experts of every rank make of its rows; zeros where no local expert is asked for."""
    results = []
    for rank, ids in enumerate(topk_idx):
        y = case.results(step, rank, len(ids))
        y[(ids < 0).all(dim=1)] = 0
        results.append(y)
    return results


def check_steps(case: Case, by_rank: list[list[Step]]) -> None:
    """Every rank's steps against the expectation."""
    assert len(by_rank) == case.world_size
    for rank, steps in enumerate(by_rank):
        assert len(steps) == case.num_steps
        for step, seen in enumerate(steps):
            check_step(case, step, rank, seen)


def check_step(case: Case, step: int, rank: int, seen: Step) -> None:
    at = f"step {step}, rank {rank} of {case}"
    rows = expected_rows(case, step, rank)
    assert seen.num_rows == len(rows.source), at
    assert torch.equal(seen.source, rows.source), at
    assert seen.topk_idx.dtype == torch.int64, at
    assert torch.equal(seen.topk_idx, rows.topk_idx), at
    assert_same_bits(seen.topk_weights, rows.topk_weights, at)
    assert seen.rows_per_expert.dtype == torch.int64, at
    assert torch.equal(seen.rows_per_expert, rows.rows_per_expert), at
    assert seen.num_pairs == int(rows.rows_per_expert.sum()), at
    if case.config.wire == "payload":
        assert seen.scale is None, at
        assert_same_bits(seen.x, rows.x, at)
    else:
        check_quantised(seen.x, seen.scale, rows.x, at)
    check_capacity(seen.capacity, seen.num_rows, at)
    if seen.out is not None:
        assert not seen.out.isnan().any(), f"NaN reached a result, {at}"
        expected = expected_out(case, step, rank)
        assert seen.out.dtype == expected.dtype, at
        assert torch.equal(seen.out, expected), at


def check_capacity(capacity: int, num_rows: int, at: str = "") -> None:
    assert capacity >= num_rows, at
    assert capacity & (capacity - 1) == 0, f"capacity {capacity} is no power of two, {at}"


def check_quantised(x: Tensor, scale: Tensor | None, original: Tensor, at: str = "") -> None:
    """e4m3 has 3 mantissa bits: half a step is 2**-4 of the value, or 2**-10 of the scale."""
    assert x.dtype == torch.float8_e4m3fn, at
    assert scale is not None, at
    assert scale.dtype == torch.float32, at
    hidden = original.shape[1]
    blocks = -(-hidden // FP8_BLOCK)
    assert scale.shape == (len(original), blocks), at
    original = original.float()
    padded = torch.zeros(len(original), blocks * FP8_BLOCK)
    padded[:, :hidden] = original
    largest = padded.view(len(original), blocks, FP8_BLOCK).abs().amax(dim=2)
    by_element = scale.repeat_interleave(FP8_BLOCK, dim=1)[:, :hidden]
    error = (x.float() * by_element - original).abs()
    # A scale that is a power of two may be up to twice largest / 448, hence 2**-9.
    smallest_step = (largest / FP8_MAX * 2**-9).repeat_interleave(FP8_BLOCK, dim=1)[:, :hidden]
    bound = torch.maximum(original.abs() * 2**-4, smallest_step) * (1 + 1e-5)
    assert (error <= bound).all(), f"{(error - bound).max()} past the bound, {at}"


def assert_same_bits(seen: Tensor, expected: Tensor, at: str = "") -> None:
    """Equal as bytes: NaN equals itself, and -0 is not 0."""
    assert seen.dtype == expected.dtype, at
    assert seen.shape == expected.shape, at
    as_bytes = [tensor.contiguous().view(torch.uint8) for tensor in (seen, expected)]
    assert torch.equal(*as_bytes), at


def num_choices(case: Case, step: int) -> int:
    """Routed (token, expert) choices of all ranks: each must be somebody's pair."""
    return sum(
        int((owner_of(case.owner, case.batch(step, rank).topk_idx) >= 0).sum())
        for rank in range(case.world_size)
    )
