"""What a dispatch hands over to experts: the rows that a rank received."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

__all__ = ["ReceivedRows"]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class ReceivedRows:
    """Rows in ascending (source rank, token) order, in a bucket of capacity C.

    Everything past ``num_rows`` is unspecified, except ``topk_idx``, which is -1 there. The tensors
    are views of the slot's memory: they are valid until the combine of the same step returns.

    With ``layout = "expert"`` a row is one pair, and K is 1 here. Rows are grouped by local expert,
    those of an expert in ascending (source rank, token) order. Rows between groups, which alignment
    makes, are as unspecified as those past the end. Results are of the expert alone: ``combine``
    multiplies by the weight, and sums a token's results on a rank before those of the ranks.

    Attributes:
        x: Hidden states [C, H] in the wire's payload dtype (the model's, or float8_e4m3fn). May be
            a strided view: stride(1) is 1, stride(0) a multiple of 16 bytes.
        scale: fp32 [C, ceil(H / 128)] dequantisation factors of an fp8 wire, else None. May be
            strided like ``x``.
        topk_idx: int64 [C, K] local expert ids; column k is the sender's column k, -1 where that
            expert lives on another rank.
        topk_weights: fp32 [C, K], bit-equal to the sender's, 0 where ``topk_idx`` is -1.
        num_rows: Rows received; under graph capture int64 [1] on the device. With alignment, the
            most that groups may reach to: num_pairs + min(num_pairs, num_local_experts) x
            (alignment - 1).
        rows_per_expert: int64 [num_local_experts] (row, local expert) pairs of each local expert.
        num_pairs: Sum of ``rows_per_expert``; under graph capture int64 [1] on the device.
        source: int64 [C, 2]: EP rank and token index that each row came from; with ``layout =
            "expert"`` [C, 3], with the sender's column k.
        layout: ``"row"`` or ``"expert"``.
        offsets: int64 [num_local_experts + 1] where ``layout = "expert"``, else None: the pairs of
            local expert e begin at ``offsets[e]``, a multiple of the alignment.
    """

    x: Tensor
    scale: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor
    num_rows: int | Tensor
    rows_per_expert: Tensor
    num_pairs: int | Tensor
    source: Tensor
    dtype: torch.dtype
    take_y: Callable[[], Tensor] = field(repr=False)
    layout: Literal["row", "expert"] = "row"
    offsets: Tensor | None = None

    @property
    def y(self) -> Tensor:
        """[C, H] in the model's ``dtype``: where results go, and combine reads without a copy.

        Taken from the slot on first use, so a dispatch alone costs no memory for it.
        """
        return self.take_y()

    @property
    def capacity(self) -> int:
        """C, the power-of-two capacity of the receive bucket."""
        return int(self.x.shape[0])

    @property
    def hidden(self) -> int:
        """H."""
        return int(self.x.shape[1])
