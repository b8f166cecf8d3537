"""Received rows to (row, local expert) pairs grouped by expert, and results back to rows.

hidden [C,H], topk_idx [C,K]
  | permute      order: local expert, ties by (row, k)
hidden [P,H], offsets [E_local+1], source [P], inverse [C,K]
  | grouped GEMMs of the caller
expert_out [P,H]
  | unpermute    fp32 sum over k of weight x expert_out[inverse], rounded once
out [C,H]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from crossdock.scratch import convert_cuda, convert_torch, permute_cuda, permute_torch
from crossdock.scratch.convert import check_scale
from crossdock.scratch.permute_scratch import PermuteScratch

__all__ = ["Permuted", "permute", "unpermute"]

SUM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True, eq=False)
class Permuted:
    """Pairs grouped by local expert; pairs of one expert are in ascending (row, k) order.

    ``offsets`` and ``source`` lie in the permute scratch: they hold until its next ``permute``.

    Attributes:
        hidden: [P, H] the row of each pair, in the dtype that came in. Past ``offsets[-1]``
            unspecified.
        scale: fp32 [P, S] its dequantisation factors, or None.
        offsets: int64 [num_local_experts + 1]; the pairs of local expert e are
            ``offsets[e]:offsets[e + 1]``.
        inverse: int32 [C, K] the pair that row c, column k became; -1 where it is none. Past
            ``num_rows`` unspecified.
        source: int32 [P] the row of each pair. Past ``offsets[-1]`` unspecified.
        num_rows: Rows that count, on the host or (int64, one element) on the device.
    """

    hidden: Tensor
    scale: Tensor | None
    offsets: Tensor
    inverse: Tensor
    source: Tensor
    num_rows: int | Tensor

    @property
    def num_pairs(self) -> int:
        """P, the pairs there is room for: as many as there are, unless counts stay on a device."""
        return int(self.hidden.shape[0])


def permute(
    hidden: Tensor,
    scale: Tensor | None,
    topk_idx: Tensor,
    scratch: PermuteScratch,
    *,
    num_pairs: int,
    num_rows: int | Tensor | None = None,
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
) -> Permuted:
    """Copies each row once for each of its local experts, grouped by expert.

    Args:
        hidden: [C, H] bf16, fp16, fp32 or float8_e4m3fn; stride(1) is 1, rows may be strided.
        scale: fp32 [C, S], permuted alongside, or None. May be strided like ``hidden``.
        topk_idx: int64 [C, K] local expert ids, -1 for none.
        scratch: Grows to ``num_pairs`` unless locked.
        num_pairs: P. The pairs in ``topk_idx``; where the host does not know them, any number
            that is not smaller.
        num_rows: Rows that count, the rest of ``topk_idx`` is not read; None for all C. May be a
            tensor of one element on the device, so that nothing is baked into a CUDA graph.
        out: [P, H] where the permuted rows go; rows may be strided, a larger first dimension is
            legal, None for a fresh tensor like ``hidden``. Another dtype converts on the way:
            bf16, fp16 or fp32 dequantises fp8 rows, float8_e4m3fn quantises others, or fp8 rows
            whose scales have another shape (see ``convert`` for the two).
        out_scale: fp32, the scales of an fp8 ``out``; None for a fresh tensor like ``scale``.

    Raises:
        ValueError: Shapes or dtypes do not fit together, or (on the CPU) there are more than
            ``num_pairs`` pairs.
        LockedError: The scratch is too small and locked.
    """
    capacity, top_k = topk_idx.shape
    if hidden.dim() != 2 or hidden.shape[0] != capacity or not _has_unit_stride(hidden):
        raise ValueError(
            f"hidden {tuple(hidden.shape)} with strides {hidden.stride()}: [C, H] with C = "
            f"{capacity} as in topk_idx, and stride(1) = 1"
        )
    if topk_idx.dtype != torch.int64:
        raise ValueError(f"topk_idx is {topk_idx.dtype}: int64")
    scratch.reserve(num_pairs)
    if out is None:
        out = hidden.new_empty((num_pairs, hidden.shape[1]))
    if out_scale is None and scale is not None and out.dtype == hidden.dtype:
        out_scale = scale.new_empty((num_pairs, scale.shape[1]))
    if out.shape[1] != hidden.shape[1] or out.shape[0] < num_pairs:
        raise ValueError(
            f"out {tuple(out.shape)}: [{num_pairs}, {hidden.shape[1]}] for these pairs"
        )
    if out_scale is not None and out_scale.shape[0] < num_pairs:
        raise ValueError(f"out_scale {tuple(out_scale.shape)}: {num_pairs} rows for these pairs")
    permuted = Permuted(
        hidden=out[:num_pairs],
        scale=out_scale[:num_pairs] if out_scale is not None else None,
        offsets=scratch.offsets,
        inverse=torch.empty((capacity, top_k), dtype=torch.int32, device=topk_idx.device),
        source=scratch.source(num_pairs),
        num_rows=capacity if num_rows is None else _wide(num_rows),
    )
    converts = out.dtype != hidden.dtype or _width(out_scale) != _width(scale)
    if converts:
        check_scale("hidden", hidden, scale)
        check_scale("out", out, out_scale)
    if _by_kernels(topk_idx, scratch):
        topk_idx = topk_idx.contiguous()
        if converts:
            permute_cuda.index(topk_idx, scratch, permuted)
            convert_cuda.convert(
                hidden,
                scale,
                permuted.hidden,
                permuted.scale,
                permuted.num_rows,
                inverse=permuted.inverse,
            )
        else:
            permute_cuda.permute(hidden, scale, topk_idx, scratch, permuted)
    else:
        count = permute_torch.index(topk_idx, permuted)
        if converts:
            convert_torch.convert(
                hidden, scale, permuted.hidden, permuted.scale, count, source=permuted.source
            )
        else:
            permute_torch.gather(hidden, scale, permuted, count)
    return permuted


def unpermute(out: Tensor, expert_out: Tensor, topk_weights: Tensor, permuted: Permuted) -> Tensor:
    """Sums each row's pairs with their weights: fp32, k ascending, rounded once.

    A row without a local expert becomes exact zeros. Rows past ``permuted.num_rows`` are left as
    they are. A weight without a pair is never read into a sum, whatever it is.

    Args:
        out: [C, H] bf16, fp16 or fp32, written.
        expert_out: [P, H] bf16, fp16 or fp32.
        topk_weights: fp32 [C, K].
        permuted: What ``permute`` returned.

    Returns:
        ``out``.

    Raises:
        ValueError: Shapes or dtypes do not fit together.
    """
    capacity, top_k = permuted.inverse.shape
    if topk_weights.shape != (capacity, top_k) or topk_weights.dtype != torch.float32:
        raise ValueError(
            f"topk_weights {tuple(topk_weights.shape)} {topk_weights.dtype}: float32 "
            f"[{capacity}, {top_k}] as the topk_idx that was permuted"
        )
    if out.dtype not in SUM_DTYPES or expert_out.dtype not in SUM_DTYPES:
        raise ValueError(
            f"expert_out is {expert_out.dtype}, out is {out.dtype}: each one of "
            f"{', '.join(map(str, SUM_DTYPES))}"
        )
    if out.dim() != 2 or out.shape[0] != capacity or out.shape[1] != expert_out.shape[1]:
        raise ValueError(
            f"out {tuple(out.shape)}: [C, H] = [{capacity}, {expert_out.shape[1]}] as the "
            "topk_idx that was permuted and expert_out"
        )
    if out.device.type == "cuda" and permute_cuda.is_available():
        permute_cuda.unpermute(out, expert_out, topk_weights, permuted)
    else:
        permute_torch.unpermute(out, expert_out, topk_weights, permuted)
    return out


def _has_unit_stride(tensor: Tensor) -> bool:
    return tensor.stride(1) == 1 or tensor.shape[1] == 1


def _by_kernels(topk_idx: Tensor, scratch: PermuteScratch) -> bool:
    return (
        topk_idx.device.type == "cuda"
        and permute_cuda.supports(topk_idx, scratch)
        and permute_cuda.is_available()
    )


def _wide(num_rows: int | Tensor) -> int | Tensor:
    return num_rows.to(torch.int64) if isinstance(num_rows, Tensor) else num_rows


def _width(scale: Tensor | None) -> int:
    return 0 if scale is None else int(scale.shape[1])
