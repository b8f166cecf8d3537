"""Received rows made by hand, their unused tail full of NaN."""

import torch
from torch import Tensor

from crossdock.dispatch.rows import ReceivedRows
from crossdock.experts import ExpertWeights
from crossdock.scratch import convert_rows


def make_rows(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    *,
    num_local_experts: int,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    spare: int = 3,
) -> ReceivedRows:
    """``x [n, H]``, local ids ``topk_idx [n, K]``: n rows in a bucket of n + spare."""
    num_rows = x.shape[0]
    capacity = num_rows + spare
    dtype = dtype or x.dtype

    def with_tail(values: Tensor, fill: float) -> Tensor:
        whole = torch.empty((capacity, *values.shape[1:]), dtype=values.dtype, device=x.device)
        # Raw bytes: e4m3's 0xff is NaN, and index kernels for fp8 are not everywhere.
        if values.dtype == torch.float8_e4m3fn:
            whole.view(torch.uint8).fill_(0xFF)
        else:
            whole.fill_(fill)
        whole[:num_rows] = values
        return whole

    y = torch.full((capacity, x.shape[1]), torch.nan, dtype=dtype, device=x.device)
    local = topk_idx[topk_idx >= 0]
    return ReceivedRows(
        x=with_tail(x, torch.nan),
        scale=None if scale is None else with_tail(scale, torch.nan),
        topk_idx=with_tail(topk_idx.long(), -1),
        topk_weights=with_tail(topk_weights, torch.nan),
        num_rows=num_rows,
        rows_per_expert=local.bincount(minlength=num_local_experts),
        num_pairs=local.numel(),
        source=torch.zeros(capacity, 2, dtype=torch.int64, device=x.device),
        dtype=dtype,
        take_y=lambda: y,
    )


def random_routing(
    num_rows: int, top_k: int, num_experts: int, *, remote: float = 0.3, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """``topk_idx`` without repeats in a row, about ``remote`` of it -1, and weights."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_rows, max(num_experts, top_k), generator=generator)
    topk_idx = scores.argsort(dim=1)[:, :top_k]
    topk_idx[topk_idx >= num_experts] = -1
    topk_idx[torch.rand(num_rows, top_k, generator=generator) < remote] = -1
    topk_weights = torch.rand(num_rows, top_k, generator=generator).softmax(dim=1)
    return topk_idx, topk_weights


def wire_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Payload and scales as an fp8 wire delivers them."""
    scale = torch.empty(x.shape[0], -(-x.shape[1] // 128), device=x.device)
    payload = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    return convert_rows(x, out=payload, scale=scale), scale


def quantised_channels(weights: ExpertWeights) -> ExpertWeights:
    """The same weights as e4m3 with one scale for each output channel."""
    fields = {}
    for name, weight in (("w13", weights.w13), ("w2", weights.w2)):
        flat = weight.flatten(0, 1)
        out = torch.empty(flat.shape, dtype=torch.float8_e4m3fn)
        scale = torch.empty(flat.shape[0], 1)
        convert_rows(flat, out=out, scale=scale)
        fields |= {name: out.view(weight.shape), f"{name}_scale": scale.view(weight.shape[:2])}
    return ExpertWeights(**fields, format="fp8_channel")
