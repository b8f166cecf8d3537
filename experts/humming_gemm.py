"""Grouped GEMM of the humming-kernels package: weights of 4 or 8 bits, compiled at first use."""

from __future__ import annotations

import importlib.util
from typing import Any, get_args

import torch
from torch import Tensor

from crossdock.experts.gemm import Activations, GroupedGemm, Groups
from crossdock.experts.weights import FP8_BLOCK, WeightFormat
from crossdock.scratch.errors import ConfigError

__all__ = ["GRANULE", "HummingGemm", "check_humming"]

GRANULE = 128
"""What N and K are padded to: whole groups of every format, and whole tiles."""

# humming's names. The secondary scale of nvfp4 is its usual fp32 scale of the whole tensor: alone,
# e4m3 scales of weights as small as 1 / sqrt(7168) would be subnormal and lose most of their bits.
WEIGHT_CONFIGS: dict[WeightFormat, dict[str, Any]] = {
    "fp8_channel": {"dtype": "float8e4m3"},
    "fp8_block": {"dtype": "float8e4m3", "group_size": FP8_BLOCK, "group_size_n": FP8_BLOCK},
    "int4": {"dtype": "int4", "group_size": 128},
    "mxfp4": {"dtype": "float4e2m1", "group_size": 32, "scale_dtype": "float8e8m0"},
    "nvfp4": {
        "dtype": "float4e2m1",
        "group_size": 16,
        "scale_dtype": "float8e4m3",
        "scale_2_type": "tensor",
    },
}
INPUT_CONFIGS: dict[Activations, dict[str, Any] | None] = {
    "plain": None,
    "fp8_token": {"dtype": "float8e4m3"},
    "fp8_block": {"dtype": "float8e4m3", "group_size": 128},
}
DEFAULT_ACTIVATIONS: dict[WeightFormat, Activations] = {
    "fp8_channel": "fp8_token",
    "fp8_block": "fp8_block",
    "int4": "fp8_token",
    "mxfp4": "fp8_token",
    "nvfp4": "plain",
}
COMPUTE_CONFIG = {"gemm_type": "grouped_contiguous"}


class HummingGemm(GroupedGemm):
    """humming's ``HummingLayer`` over all local experts.

    Args:
        weight: [E_local, N, K], multiples of 128; plain, or e4m3 of format ``fp8_block``.
        scale: Of an e4m3 ``weight``: fp32 [E_local, N / 128, K / 128].
        weight_format: What it is quantised to.
        activations: What is multiplied with it.
    """

    name = "humming"
    writes_out = True

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor | None,
        *,
        weight_format: WeightFormat,
        activations: Activations,
    ) -> None:
        self.activations = activations
        self.dtype = torch.float16 if weight.dtype == torch.float16 else torch.bfloat16
        self._format = weight_format
        self._layer = self._make_layer(weight, scale) if weight.shape[0] else None

    def load(self, weight: Tensor, scale: Tensor | None) -> None:
        """As in the base class; for a while there are two copies of the weights.

        Raises:
            ConfigError: The new weights need kernels with other settings.
        """
        if self._layer is None:
            return
        fresh = self._make_layer(weight, scale)
        if fresh.humming_config != self._layer.humming_config:
            raise ConfigError(
                f"reload: humming packs these {self._format} weights in another way than those "
                "before (their range differs): make new experts instead"
            )
        new = dict(fresh.named_parameters())
        for name, parameter in self._layer.named_parameters():
            parameter.copy_(new[name])

    def __call__(
        self, x: Tensor, scale: Tensor | None, groups: Groups, *, out: Tensor | None = None
    ) -> Tensor:
        """See ``GroupedGemm``."""
        assert self._layer is not None
        y: Tensor = self._layer(
            x,
            outputs=out,
            input_scale=scale,
            expert_layout=groups.offsets,
            compute_config=COMPUTE_CONFIG,
        )
        return y

    def _make_layer(self, weight: Tensor, scale: Tensor | None) -> Any:
        from humming.layer import HummingLayer

        experts, n, k = weight.shape
        input_config = INPUT_CONFIGS[self.activations]
        with torch.cuda.device(weight.device), torch.no_grad():
            layer = HummingLayer(
                shape_n=n,
                shape_k=k,
                weight_config=dict(WEIGHT_CONFIGS[self._format]),
                input_config=None if input_config is None else dict(input_config),
                num_experts=experts,
                torch_dtype=self.dtype,
            ).to(weight.device)
            if scale is None:
                layer.load_from_unquantized(weight)
            else:
                packed = weight.view(torch.int32)  # four e4m3 a word, as humming holds them
                layer.load_from_tensors({"weight": packed, "weight_scale": scale})
            layer.transform()
        return layer


def check_humming(
    weight_format: WeightFormat, activations: Activations | None, device: torch.device
) -> Activations:
    """The activations to use, or why not.

    Args:
        weight_format: Of the weights.
        activations: Asked for; None for the format's own.
        device: Where the weights lie.

    Raises:
        ConfigError: humming cannot multiply this here; says why and what can.
    """
    if weight_format == "plain":
        formats = ", ".join(sorted(set(get_args(WeightFormat)) - {"plain"}))
        raise ConfigError(
            f"humming multiplies quantised weights: set ExpertWeights.format to one of {formats}, "
            'or use backend="torch"'
        )
    if device.type != "cuda":
        raise ConfigError(
            f"{weight_format} weights need a CUDA GPU (humming), they are on {device}: on the CPU "
            'use plain weights with backend="torch"'
        )
    activations = activations or DEFAULT_ACTIVATIONS[weight_format]
    if weight_format in ("fp8_channel", "fp8_block") and activations == "plain":
        raise ConfigError(f"{weight_format} weights are multiplied with fp8 activations")
    major, minor = torch.cuda.get_device_capability(device)
    needed = (8, 0) if activations == "plain" else (8, 9)
    if (major, minor) < needed:
        raise ConfigError(
            f"{activations} activations need SM {needed[0]}.{needed[1]}, {device} is SM "
            f"{major}.{minor}: "
            + ("mxfp4 or nvfp4 with plain activations, or " * (major == 8))
            + 'backend="torch" with plain weights'
        )
    if importlib.util.find_spec("humming") is None:
        raise ConfigError(
            f"{weight_format} weights need the package humming-kernels: "
            "pip install 'crossdock[humming]'"
        )
    return activations
