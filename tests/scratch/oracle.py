"""The permutation in its plainest form, and inputs that poison whatever must not be read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP8_NAN = 0xFF


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What ``permute`` must return, exactly."""

    offsets: Tensor
    source: Tensor
    inverse: Tensor


def expected_permutation(topk_idx: Tensor, num_local_experts: int) -> Expected:
    """By a stable sort of all ids, on the CPU."""
    capacity, top_k = topk_idx.shape
    ids = topk_idx.cpu().reshape(-1)
    order = torch.where(ids < 0, num_local_experts, ids).argsort(stable=True)
    counts = torch.bincount(ids[ids >= 0], minlength=num_local_experts)
    slots = order[: int(counts.sum())]
    inverse = torch.full((capacity * top_k,), -1, dtype=torch.int32)
    inverse[slots] = torch.arange(slots.numel(), dtype=torch.int32)
    return Expected(
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]),
        source=(slots // top_k).int(),
        inverse=inverse.view(capacity, top_k),
    )


def expected_sum(expert_out: Tensor, topk_weights: Tensor, inverse: Tensor) -> Tensor:
    """fp32 [C, H] sum over k ascending of weight times pair, on the CPU."""
    expert_out, topk_weights, inverse = expert_out.cpu().float(), topk_weights.cpu(), inverse.cpu()
    total = torch.zeros(inverse.shape[0], expert_out.shape[1])
    for k in range(inverse.shape[1]):
        has = inverse[:, k] >= 0
        pairs = inverse[has, k].long()
        total[has] += topk_weights[has, k, None] * expert_out[pairs]
    return total


def poison_(tensor: Tensor) -> Tensor:
    """Fills with NaN, or for fp8 with the bytes that are NaN."""
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8).fill_(FP8_NAN)
    else:
        tensor.fill_(float("nan"))
    return tensor


def random_routing(
    capacity: int,
    num_rows: int,
    top_k: int,
    num_local_experts: int,
    *,
    local_share: float = 1.0,
    seed: int = 0,
) -> Tensor:
    """int64 [C, K]: distinct local experts in a row, -1 elsewhere and past ``num_rows``."""
    generator = torch.Generator().manual_seed(seed)
    width = max(top_k, round(num_local_experts / local_share) if local_share else top_k)
    scores = torch.rand(capacity, max(width, 1), generator=generator)
    idx = scores.topk(top_k, dim=1).indices
    idx[idx >= num_local_experts] = -1
    if not local_share:
        idx.fill_(-1)
    idx[num_rows:] = -1
    return idx


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, so that NaN equals NaN."""
    return tensor.contiguous().view(torch.uint8)
