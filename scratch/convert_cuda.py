"""Launches the kernel that changes rows on their way: SwiGLU, quantisation, dequantisation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from crossdock.scratch import permute_cuda
from crossdock.scratch.kernels import load_kernel

__all__ = ["convert", "is_usable"]

GROUP = 8  # numbers of a thread side by side, in convert.cu
ITEMS = 4  # such groups
GATED_ITEMS = 2  # of SwiGLU to other than fp8, which has twice the operands: measured on an H200
MAX_THREADS = 512


def is_usable(device: torch.device) -> bool:
    """Whether rows on ``device`` go through the kernel."""
    return device.type == "cuda" and permute_cuda.is_available()


def convert(
    values: Tensor,
    values_scale: Tensor | None,
    out: Tensor,
    scale: Tensor | None,
    num_rows: int | Tensor,
    *,
    gated: bool = False,
    inverse: Tensor | None = None,
) -> None:
    """Row i of ``values`` to row i of ``out``, or to the rows ``inverse[i, :]`` that are not -1."""
    width = out.shape[1]
    on_device = num_rows.to(torch.int64) if isinstance(num_rows, Tensor) else None
    bound = values.shape[0] if isinstance(num_rows, Tensor) else num_rows
    target = "PLAIN" if scale is None else "BLOCK" if scale.shape[1] > 1 else "ROW"
    items = GATED_ITEMS if gated and target == "PLAIN" else ITEMS
    kernel = load_kernel(
        permute_cuda.SOURCES / "convert.cu",
        "convert",
        device=out.device,
        defines={
            "SOURCE": "SWIGLU" if gated else "PLAIN" if values_scale is None else "SCALED",
            "TARGET": target,
            "ITEMS": items,
            "IN": permute_cuda.C_TYPES.get(values.dtype, "unsigned char"),
            "OUT": permute_cuda.C_TYPES.get(out.dtype, "unsigned char"),
            "IN_ALIGNED": int(_is_aligned(values, width if gated else 0)),
            "OUT_ALIGNED": int(_is_aligned(out, 0)),
        },
    )
    threads = math.ceil(width / (GROUP * items * 32)) * 32
    kernel(
        bound,
        min(MAX_THREADS, max(32, threads)),
        values,
        values.stride(0),
        values_scale,
        values_scale.stride(0) if values_scale is not None else 0,
        values_scale.shape[1] if values_scale is not None else 0,
        out,
        out.stride(0),
        scale,
        scale.stride(0) if scale is not None else 0,
        width,
        inverse,
        inverse.shape[1] if inverse is not None else 1,
        on_device,
        bound,
        device=out.device,
    )


def _is_aligned(rows: Tensor, second_half: int) -> bool:
    """Whether a group starts at words: at its own size, up to sixteen bytes."""
    itemsize = rows.dtype.itemsize
    return math.gcd(permute_cuda.alignment(rows), second_half * itemsize) >= min(
        16, GROUP * itemsize
    )
