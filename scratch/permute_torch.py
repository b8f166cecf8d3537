"""Permute and unpermute in plain torch: the CPU's path, and the oracle of the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from crossdock.scratch.permutation import Permuted

__all__ = ["gather", "index", "unpermute"]

# fp32 elements of one accumulator: large enough that a chunk's work hides the cost of its calls,
# small enough to stay in a core's cache between columns.
CHUNK_ELEMENTS = 1 << 19


def index(topk_idx: Tensor, permuted: Permuted) -> int:
    """Fills offsets, inverse and source. On CUDA it waits for the device.

    Returns:
        The pairs that there are.

    Raises:
        ValueError: There is no room for them.
    """
    num_rows = int(permuted.num_rows)
    top_k = topk_idx.shape[1]
    ids = topk_idx[:num_rows].reshape(-1)
    slots = (ids >= 0).nonzero().squeeze(1)  # row * K + k, ascending: remote ones cost no sorting
    count = slots.numel()
    if count > permuted.num_pairs:
        raise ValueError(
            f"num_pairs = {permuted.num_pairs}, but topk_idx has {count} local pairs: pass what "
            "was received (ReceivedRows.num_pairs)"
        )
    experts = ids[slots]
    slots = slots[experts.argsort(stable=True)]
    per_expert = experts.bincount(minlength=permuted.offsets.numel() - 1)
    permuted.offsets[0] = 0
    torch.cumsum(per_expert, 0, out=permuted.offsets[1:])
    source = permuted.source[:count]
    source.copy_(slots.div(top_k, rounding_mode="floor"))
    inverse = permuted.inverse[:num_rows].view(-1)
    inverse.fill_(-1)
    inverse[slots] = torch.arange(count, dtype=torch.int32, device=slots.device)
    return count


def gather(hidden: Tensor, scale: Tensor | None, permuted: Permuted, count: int) -> None:
    """Fills the first ``count`` rows of hidden and scale, by source."""
    source = permuted.source[:count]
    _gather(hidden, source, permuted.hidden[:count])
    if scale is not None and permuted.scale is not None:
        _gather(scale, source, permuted.scale[:count])


def unpermute(out: Tensor, expert_out: Tensor, topk_weights: Tensor, permuted: Permuted) -> None:
    """Fills ``out``; one fp32 accumulator for a chunk of rows, column after column."""
    num_rows = int(permuted.num_rows)
    rows_per_chunk = max(1, CHUNK_ELEMENTS // max(1, out.shape[1]))
    for start in range(0, num_rows, rows_per_chunk):
        end = min(start + rows_per_chunk, num_rows)
        total = torch.zeros((end - start, out.shape[1]), dtype=torch.float32, device=out.device)
        for k in range(permuted.inverse.shape[1]):
            pairs = permuted.inverse[start:end, k]
            rows = (pairs >= 0).nonzero().squeeze(1)
            if rows.numel():
                values = expert_out.index_select(0, pairs[rows]).float()
                weights = topk_weights[start:end, k][rows]
                total.index_add_(0, rows, values.mul_(weights.unsqueeze(1)))
        out[start:end] = total


def _gather(source: Tensor, rows: Tensor, out: Tensor) -> None:
    if source.dtype.itemsize == 1:  # not every torch can index fp8
        source, out = source.view(torch.uint8), out.view(torch.uint8)
    torch.index_select(source, 0, rows, out=out)
