"""SwiGLU and fp8 in plain torch: the CPU's path, and the oracle of the kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["convert"]

FP8_MAX = 448.0
SCALE_BLOCK = 128
CHUNK_ELEMENTS = 1 << 20  # that are fp32 at a time


def convert(
    values: Tensor,
    values_scale: Tensor | None,
    out: Tensor,
    scale: Tensor | None,
    num_rows: int | Tensor,
    *,
    gated: bool = False,
    source: Tensor | None = None,
) -> None:
    """Row i of ``out`` from row i of ``values``, or from row ``source[i]``."""
    step = max(1, CHUNK_ELEMENTS // max(1, out.shape[1]))
    for start in range(0, int(num_rows), step):
        end = min(start + step, int(num_rows))
        rows = torch.arange(start, end, device=out.device) if source is None else source[start:end]
        wide = _take(values, rows).float()
        if values_scale is not None:
            wide = wide * _spread(values_scale.index_select(0, rows), wide.shape[1])
        if gated:
            gate, up = wide.chunk(2, dim=1)
            wide = F.silu(gate) * up
        if scale is None:
            out[start:end] = wide
        else:
            _quantize(wide, out[start:end], scale[start:end])


def _take(values: Tensor, rows: Tensor) -> Tensor:
    if values.dtype.itemsize == 1:  # not every torch can index fp8
        return values.view(torch.uint8).index_select(0, rows).view(values.dtype)
    return values.index_select(0, rows)


def _spread(scale: Tensor, width: int) -> Tensor:
    """One factor for each column."""
    return scale if scale.shape[1] == 1 else scale.repeat_interleave(SCALE_BLOCK, 1)[:, :width]


def _quantize(wide: Tensor, out: Tensor, scale: Tensor) -> None:
    rows, width = wide.shape
    block = SCALE_BLOCK if scale.shape[1] > 1 else width
    blocks = F.pad(wide, (0, -width % block)).view(rows, scale.shape[1], block)
    amax = blocks.abs().amax(2)
    factors = (amax / FP8_MAX).clamp_(min=torch.finfo(torch.float32).tiny)
    factors.masked_fill_(amax == 0, 1.0)
    scale.copy_(factors)
    out.copy_((wide / _spread(factors, width)).clamp_(-FP8_MAX, FP8_MAX))
