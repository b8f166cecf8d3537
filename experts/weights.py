"""Weights of the experts that one rank owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from crossdock.dispatch.config import DTYPES
from crossdock.scratch.errors import ConfigError

__all__ = ["FP8_BLOCK", "ExpertWeights", "WeightFormat"]

WeightFormat = Literal["plain", "fp8_channel", "fp8_block", "int4", "mxfp4", "nvfp4"]
"""What the grouped GEMM multiplies by. ``plain``: the weights as they are. ``fp8_channel``: e4m3
with one fp32 scale for each output channel. ``fp8_block``: e4m3 with one for each 128 x 128 block.
``int4``: groups of 128. ``mxfp4``: groups of 32. ``nvfp4``: groups of 16."""

FP8_BLOCK = 128
"""Side of a block of ``fp8_block`` weights."""

SILU_MEAN_SQUARE = 0.3557
"""E[silu(z)^2] for z ~ N(0, 1): what SwiGLU leaves of the variance of its two halves."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertWeights:
    """Weights of E_local experts, y = w2 (silu(gate) * up) with [gate; up] = w13 x.

    Attributes:
        w13: [E_local, 2I, H]: I rows of the gate projection, then I rows of the up projection.
        w2: [E_local, H, I].
        format: What the worker multiplies by. Weights in a plain dtype (bf16, fp16, fp32) are
            quantised to it when a worker loads them; ``fp8_channel`` and ``fp8_block`` weights may
            come quantised, as float8_e4m3fn with scales.
        w13_scale: fp32 factors that give back the weights: [E_local, 2I] for ``fp8_channel``,
            [E_local, ceil(2I / 128), ceil(H / 128)] for ``fp8_block``. None for a plain dtype.
        w2_scale: The same for ``w2``.

    Raises:
        ConfigError: Shapes, dtypes, devices or scales do not fit together.
    """

    w13: Tensor
    w2: Tensor
    format: WeightFormat = "plain"
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None

    def __post_init__(self) -> None:
        w13, w2 = self.w13, self.w2
        if self.format not in get_args(WeightFormat):
            raise ConfigError(f"format = {self.format!r}: one of {get_args(WeightFormat)}")
        shapes = f"w13 {tuple(w13.shape)}, w2 {tuple(w2.shape)}"
        if w13.dim() != 3 or w2.dim() != 3:
            raise ConfigError(f"{shapes}: [E_local, 2I, H] and [E_local, H, I]")
        num_local_experts, hidden, intermediate = w2.shape
        if w13.shape != (num_local_experts, 2 * intermediate, hidden):
            raise ConfigError(f"{shapes}: w13 is [E_local, 2I, H] where w2 is [E_local, H, I]")
        if hidden < 1 or intermediate < 1:
            raise ConfigError(f"{shapes}: H and I are at least 1")
        if w13.dtype != w2.dtype or w13.device != w2.device:
            raise ConfigError(
                f"w13 is {w13.dtype} on {w13.device}, w2 {w2.dtype} on {w2.device}: alike"
            )
        if w13.dtype in DTYPES:
            if self.w13_scale is not None or self.w2_scale is not None:
                raise ConfigError(
                    f"scales beside {w13.dtype} weights: they belong to float8_e4m3fn"
                )
            return
        if w13.dtype != torch.float8_e4m3fn or self.format not in ("fp8_channel", "fp8_block"):
            raise ConfigError(
                f"{w13.dtype} weights of format {self.format!r}: float8_e4m3fn for fp8_channel and "
                "fp8_block, or bf16, fp16 or fp32, which are quantised at load"
            )
        for name, weight, scale in (("w13", w13, self.w13_scale), ("w2", w2, self.w2_scale)):
            wanted = _scale_shape(tuple(weight.shape), self.format)
            if scale is None or tuple(scale.shape) != wanted or scale.dtype != torch.float32:
                found = "None" if scale is None else f"{scale.dtype} {tuple(scale.shape)}"
                raise ConfigError(f"{name}_scale is {found}: float32 {wanted} for {self.format}")

    @property
    def num_local_experts(self) -> int:
        """E_local."""
        return int(self.w2.shape[0])

    @property
    def hidden(self) -> int:
        """H."""
        return int(self.w2.shape[1])

    @property
    def intermediate(self) -> int:
        """I."""
        return int(self.w2.shape[2])

    @property
    def dtype(self) -> torch.dtype:
        """Of ``w13`` and ``w2`` as given."""
        return self.w13.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.w13.device

    def dense(self, expert: int) -> tuple[Tensor, Tensor]:
        """w13 [2I, H] and w2 [H, I] of local ``expert`` in fp32, dequantised if quantised."""
        return (
            _dense(self.w13[expert], None if self.w13_scale is None else self.w13_scale[expert]),
            _dense(self.w2[expert], None if self.w2_scale is None else self.w2_scale[expert]),
        )

    @staticmethod
    def random(
        expert_ids: Sequence[int],
        *,
        hidden: int,
        intermediate: int,
        dtype: torch.dtype = torch.bfloat16,
        format: WeightFormat = "plain",
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> ExpertWeights:
        """Weights that give outputs of variance about 1 for inputs of variance 1.

        An expert's weights depend on ``seed`` and its global id alone, and are drawn on the CPU
        from integers (uniform, so no transcendental functions): every rank and machine can make
        every expert's weights, bit-equal.

        Args:
            expert_ids: Global ids of the experts, in the order of their local ids.
            hidden: H.
            intermediate: I.
            dtype: bf16, fp16 or fp32.
            format: See the class.
            device: Where the weights go.
            seed: Any integer.
        """
        w13 = torch.empty(len(expert_ids), 2 * intermediate, hidden, dtype=dtype, device=device)
        w2 = torch.empty(len(expert_ids), hidden, intermediate, dtype=dtype, device=device)
        generator = torch.Generator()
        for local_id, expert_id in enumerate(expert_ids):
            # torch's CPU generator takes the low 32 bits of a seed.
            generator.manual_seed((seed * 1_000_003 + int(expert_id)) % 2**32)
            for weight, variance in (
                (w13[local_id], 1 / hidden),
                (w2[local_id], 1 / (SILU_MEAN_SQUARE * intermediate)),
            ):
                bound = (3 * variance) ** 0.5
                uniform = torch.rand(weight.shape, generator=generator)
                weight.copy_(uniform.mul_(2 * bound).sub_(bound))
        return ExpertWeights(w13=w13, w2=w2, format=format)


def _scale_shape(shape: tuple[int, ...], weight_format: WeightFormat) -> tuple[int, ...]:
    experts, rows, columns = shape
    if weight_format == "fp8_channel":
        return (experts, rows)
    return (experts, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))


def _dense(weight: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return weight.float()
    if scale.dim() == 1:  # one for each output channel
        return weight.float() * scale.unsqueeze(1)
    rows, columns = weight.shape
    factors = scale.repeat_interleave(FP8_BLOCK, dim=0)[:rows]
    return weight.float() * factors.repeat_interleave(FP8_BLOCK, dim=1)[:, :columns]
