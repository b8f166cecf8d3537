"""SwiGLU and conversions: one read and one write, where a pass of its own would be between kernels.

fp8 is e4m3 with fp32 dequantisation factors, one a row ([P, 1]) or one for each 128 elements of it
([P, ceil(H / 128)]; where H <= 128 the two are the same): scale = amax / 448, the largest e4m3, and
1 where all are zero; value = payload * scale. Sums and products are fp32, rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crossdock.scratch import convert_cuda, convert_torch

__all__ = ["FP8", "SCALE_BLOCK", "check_scale", "convert_rows", "swiglu"]

FP8 = torch.float8_e4m3fn
SCALE_BLOCK = 128


def swiglu(
    gate_up: Tensor,
    *,
    out: Tensor,
    scale: Tensor | None = None,
    num_rows: int | Tensor | None = None,
) -> Tensor:
    """silu(gate) * up, quantised on the way if ``out`` is fp8.

    Args:
        gate_up: [P, 2I] bf16, fp16 or fp32, gate then up.
        out: [P, I], written: bf16, fp16, fp32, or float8_e4m3fn. Rows may be strided.
        scale: fp32 [P, 1] or [P, ceil(I / 128)], written, with an fp8 ``out``; else None.
        num_rows: Rows that count, the rest is neither read nor written; None for all. May be a
            tensor on the device, such as the last of a permutation's ``offsets``.

    Returns:
        ``out``.

    Raises:
        ValueError: Shapes or dtypes do not fit together.
    """
    if gate_up.shape != (out.shape[0], 2 * out.shape[1]):
        raise ValueError(f"gate_up {tuple(gate_up.shape)}, out {tuple(out.shape)}: [P, 2I], [P, I]")
    check_scale("out", out, scale)
    rows = out.shape[0] if num_rows is None else num_rows
    if convert_cuda.is_usable(out.device):
        convert_cuda.convert(gate_up, None, out, scale, rows, gated=True)
    else:
        convert_torch.convert(gate_up, None, out, scale, rows, gated=True)
    return out


def convert_rows(
    values: Tensor,
    *,
    out: Tensor,
    scale: Tensor | None = None,
    values_scale: Tensor | None = None,
    num_rows: int | Tensor | None = None,
) -> Tensor:
    """Rows to another dtype: quantised to fp8, dequantised from it, or rounded.

    Args:
        values: [P, H] bf16, fp16, fp32, or float8_e4m3fn with ``values_scale``.
        out: [P, H], written: bf16, fp16, fp32, or float8_e4m3fn with ``scale``. Rows may be
            strided.
        scale: fp32 [P, 1] or [P, ceil(H / 128)], written.
        values_scale: The same for an fp8 ``values``.
        num_rows: As in ``swiglu``.

    Returns:
        ``out``.

    Raises:
        ValueError: Shapes or dtypes do not fit together.
    """
    if values.shape != out.shape:
        raise ValueError(f"values {tuple(values.shape)}, out {tuple(out.shape)}: the same shape")
    check_scale("out", out, scale)
    check_scale("values", values, values_scale)
    rows = out.shape[0] if num_rows is None else num_rows
    if convert_cuda.is_usable(out.device):
        convert_cuda.convert(values, values_scale, out, scale, rows)
    else:
        convert_torch.convert(values, values_scale, out, scale, rows)
    return out


def check_scale(name: str, payload: Tensor, scale: Tensor | None) -> None:
    """An fp8 tensor has scales of one of the two shapes, any other has none.

    Raises:
        ValueError: It is not so.
    """
    if (payload.dtype == FP8) != (scale is not None):
        raise ValueError(f"{name} is {payload.dtype}: fp8 comes with scales, other dtypes without")
    widths = (1, -(-payload.shape[1] // SCALE_BLOCK))
    if scale is not None and (scale.dtype != torch.float32 or scale.shape[1] not in widths):
        raise ValueError(
            f"scale of {name} is {scale.dtype} {tuple(scale.shape)}: float32 with one column or "
            f"{widths[1]}"
        )
