"""A row as bytes: payload, scales, local expert ids, weights and the token it came from.

One row is one contiguous run of ``row_bytes``, a multiple of 16, so a row and its metadata travel
as one message and every field of a buffer of rows is a strided view of it:

    payload [H] | scale fp32 [ceil(H/128)] | ids int32 [K] | weights fp32 [K] | token int32 | pad

With an fp8 wire the payload is e4m3 with one scale for each 128 elements; otherwise it is the
model's dtype and there is no scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from crossdock.dispatch.blocks import token_blocks

__all__ = ["FP8", "FP8_BLOCK", "WireFormat", "dequantize", "gather_rows", "num_blocks", "quantize"]

FP8 = torch.float8_e4m3fn
FP8_BLOCK = 128
FP8_MAX = 448.0
_ALIGN = 16


def num_blocks(hidden: int) -> int:
    """Scales of a row: ceil(H / 128)."""
    return -(-hidden // FP8_BLOCK)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as e4m3 with one scale for each 128 elements, the last block possibly shorter.

    scale = amax / 448 (the largest e4m3), 1 for a block of zeros; payload = x / scale, rounded to
    nearest even. |x - payload * scale| <= max(|x| / 16, scale / 1024): half a step of a 3-bit
    mantissa, or of the subnormals. A block with a NaN is all NaN.

    Args:
        x: [T, H] in any floating dtype.

    Returns:
        float8_e4m3fn [T, H] and fp32 [T, ceil(H / 128)].
    """
    tokens, hidden = x.shape
    blocks = num_blocks(hidden)
    wide = torch.nn.functional.pad(x.float(), (0, blocks * FP8_BLOCK - hidden))
    wide = wide.view(tokens, blocks, FP8_BLOCK)
    amax = wide.abs().amax(-1)
    # By a tensor: torch on CUDA divides by a number by multiplying by its reciprocal, rounded.
    scale = torch.where(amax == 0, 1.0, amax / torch.full_like(amax, FP8_MAX))
    # A block of the smallest fp32 numbers has no representable amax / 448.
    scale = scale.clamp_min_(torch.finfo(torch.float32).tiny)
    payload = (wide / scale[..., None]).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
    return payload.view(tokens, blocks * FP8_BLOCK)[:, :hidden].contiguous(), scale


def dequantize(payload: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply payload [T, H] by scale [T, ceil(H / 128)], in fp32, rounded once to ``dtype``."""
    hidden = payload.shape[1]
    factors = scale.repeat_interleave(FP8_BLOCK, dim=1)[:, :hidden]
    return (payload.float() * factors).to(dtype)


def gather_rows(source: Tensor, tokens: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Copy rows of one source to several places.

    On the CPU a block of tokens at a time, so that a row comes from memory once, however many
    places want it.

    Args:
        source: [T, W].
        tokens: int64 [n] for each place, token of each row; ascending if there are several places.
        outs: [n, W] for each place, in the source's dtype.
    """
    if source.dtype == FP8:  # index_select does not know it
        source, outs = source.view(torch.uint8), [out.view(torch.uint8) for out in outs]
    if len(outs) == 1:  # nothing to come back for
        torch.index_select(source, 0, tokens[0], out=outs[0])
        return
    row_bytes = source.shape[1] * source.itemsize
    for _, _, cuts in token_blocks(len(source), row_bytes, tokens, source.device):
        for out, index, cut in zip(outs, tokens, cuts, strict=True):
            torch.index_select(source, 0, index[cut], out=out[cut])


@dataclass(frozen=True, kw_only=True)
class WireFormat:
    """Places of a row's fields.

    Attributes:
        hidden: H.
        top_k: K.
        dtype: The model's dtype.
        fp8: Whether the payload travels as e4m3 with scales.
    """

    hidden: int
    top_k: int
    dtype: torch.dtype
    fp8: bool

    @property
    def payload_dtype(self) -> torch.dtype:
        """Element type of the payload on the wire."""
        return FP8 if self.fp8 else self.dtype

    @cached_property
    def scale_at(self) -> int:
        """Byte at which scales begin."""
        return _round_up(self.hidden * self.payload_dtype.itemsize, 4)

    @cached_property
    def ids_at(self) -> int:
        """Byte at which expert ids begin."""
        return self.scale_at + (4 * num_blocks(self.hidden) if self.fp8 else 0)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row, a multiple of 16."""
        return _round_up(self.ids_at + 8 * self.top_k + 4, _ALIGN)

    def allocate(self, rows: int, device: torch.device) -> Tensor:
        """Uninitialised buffer uint8 [rows, row_bytes]."""
        return torch.empty(rows, self.row_bytes, dtype=torch.uint8, device=device)

    def payload(self, buffer: Tensor) -> Tensor:
        """[n, H] view of the payload of a buffer uint8 [n, row_bytes]."""
        return buffer.view(self.payload_dtype)[:, : self.hidden]

    def scale(self, buffer: Tensor) -> Tensor | None:
        """fp32 [n, ceil(H / 128)] view of the scales, None where the wire has none."""
        return self._words(buffer, torch.float32, self.scale_at, self.ids_at) if self.fp8 else None

    def ids(self, buffer: Tensor) -> Tensor:
        """int32 [n, K] view of the expert ids."""
        return self._words(buffer, torch.int32, self.ids_at, self.ids_at + 4 * self.top_k)

    def weights(self, buffer: Tensor) -> Tensor:
        """fp32 [n, K] view of the weights."""
        begin = self.ids_at + 4 * self.top_k
        return self._words(buffer, torch.float32, begin, begin + 4 * self.top_k)

    def token(self, buffer: Tensor) -> Tensor:
        """int32 [n] view of the token index at the source."""
        begin = self.ids_at + 8 * self.top_k
        return self._words(buffer, torch.int32, begin, begin + 4)[:, 0]

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Payload [T, H] and scales fp32 [T, ceil(H / 128)], or None, of tokens [T, H]."""
        return quantize(x) if self.fp8 else (x, None)

    def pack(self, buffer: Tensor, x: Tensor, ids: Tensor, weights: Tensor, tokens: Tensor) -> None:
        """Write rows of the given tokens, ready to send.

        Args:
            buffer: uint8 [n, row_bytes], overwritten.
            x: [T, H] in the model's dtype.
            ids: int32 [n, K] expert ids of each row.
            weights: fp32 [n, K] weights of each row.
            tokens: int64 [n], token of each row.
        """
        payload, scale = self.encode(x)
        gather_rows(payload, [tokens], [self.payload(buffer)])
        if scale is not None:
            scales = self.scale(buffer)
            assert scales is not None
            gather_rows(scale, [tokens], [scales])
        self.ids(buffer).copy_(ids)
        self.weights(buffer).copy_(weights)
        self.token(buffer).copy_(tokens)

    def _words(self, buffer: Tensor, dtype: torch.dtype, begin: int, end: int) -> Tensor:
        return buffer.view(dtype)[:, begin // 4 : end // 4]


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
