"""Chooses and makes the worker for some weights on some device."""

from __future__ import annotations

import logging
from functools import partial
from typing import Literal

import torch

from crossdock.experts.gemm import Activations, CutlassFp8Gemm, TorchGemm
from crossdock.experts.humming_gemm import GRANULE as HUMMING_GRANULE
from crossdock.experts.humming_gemm import HummingGemm, check_humming
from crossdock.experts.weights import ExpertWeights
from crossdock.experts.worker import MakeGemm, Worker
from crossdock.scratch import WorkspaceManager
from crossdock.scratch.errors import ConfigError

__all__ = ["Backend", "make_experts"]

logger = logging.getLogger(__name__)

Backend = Literal["auto", "torch", "cutlass_fp8", "humming"]

TORCH_ROW_BYTES = 16
"""``grouped_mm`` wants every row stride to be a multiple of this."""

CUTLASS_GRANULE = 16


def make_experts(
    backend: Backend,
    weights: ExpertWeights,
    *,
    workspace: WorkspaceManager,
    num_experts: int | None = None,
    activations: Activations | Literal["fp4"] | None = None,
) -> Worker:
    """Experts of this rank: ``experts(rows)`` fills ``rows.y``.

    ==============  =====================================  =========================  ============
    backend         weights                                activations                runs on
    ==============  =====================================  =========================  ============
    torch           plain bf16, fp16, fp32                 plain                      CPU, CUDA
    cutlass_fp8     fp8_channel                            fp8_token                  SM 9.0, 10.x
    humming         fp8_block, fp8_channel, int4, mxfp4,   fp8_block or fp8_token     SM 8.9 on
                    nvfp4
    humming         int4, mxfp4, nvfp4                     plain (bf16, fp16)         SM 8.0 on
    ==============  =====================================  =========================  ============

    Rows may arrive plain or in the wire's fp8, whatever the activations.

    Args:
        backend: See the table; ``"auto"`` picks by weights and GPU, and says why in ``.reason``.
        weights: Of the experts of this rank, on the workspace's device. Plain weights of a
            quantised format (and plain weights for ``"cutlass_fp8"``) are quantised here.
        workspace: Where buffers come from. Experts made anew on it after ``lock()`` (a weight
            reload) use the same scratch and the same bytes.
        num_experts: E, over all ranks, so that layers of one shape share their scratch; None for
            as many as ``weights`` holds.
        activations: What the GEMMs read, None for what suits the weights.

    Raises:
        ConfigError: This backend cannot multiply these weights here; says why and what can.
    """
    reason = "asked for"
    if backend == "auto":
        backend, reason = _choose(weights)
    if activations == "fp4":
        raise ConfigError(_why_not_fp4(weights.device))
    if backend == "torch":
        _require_plain(weights, activations)
        granule = TORCH_ROW_BYTES // weights.dtype.itemsize
        make_gemm: MakeGemm = TorchGemm
    elif backend == "cutlass_fp8":
        _require_cutlass_fp8(weights, activations)
        granule = CUTLASS_GRANULE
        make_gemm = CutlassFp8Gemm
    elif backend == "humming":
        chosen = check_humming(weights.format, activations, weights.device)
        granule = HUMMING_GRANULE
        make_gemm = partial(HummingGemm, weight_format=weights.format, activations=chosen)
    else:
        raise ConfigError(f'backend = {backend!r}: "auto", "torch", "cutlass_fp8" or "humming"')
    worker = Worker(
        make_gemm,
        granule=granule,
        weights=weights,
        workspace=workspace,
        num_experts=weights.num_local_experts if num_experts is None else num_experts,
        reason=reason,
    )
    logger.info("experts: %s, %s", worker.name, reason)
    return worker


def _choose(weights: ExpertWeights) -> tuple[Backend, str]:
    if weights.format == "plain":
        return "torch", f"the weights are plain {weights.dtype}"
    if weights.format == "fp8_channel" and _why_not_cutlass_fp8(weights.device) is None:
        return "cutlass_fp8", "fp8_channel weights, and torch's fp8 grouped GEMM runs on this GPU"
    if weights.format == "fp8_channel":
        return "humming", f"fp8_channel weights; {_why_not_cutlass_fp8(weights.device)}"
    return "humming", f"only humming multiplies {weights.format} weights"


def _require_plain(weights: ExpertWeights, activations: str | None) -> None:
    if weights.format != "plain":
        raise ConfigError(
            f"the torch worker multiplies bf16, fp16 or fp32, not {weights.format}: use "
            'backend="cutlass_fp8" or "humming" on a GPU, or weights of format "plain"'
        )
    if activations not in (None, "plain"):
        raise ConfigError(f"the torch worker reads plain activations, not {activations}")


def _require_cutlass_fp8(weights: ExpertWeights, activations: str | None) -> None:
    if weights.format not in ("plain", "fp8_channel"):
        raise ConfigError(
            f"cutlass_fp8 has one scale for each output channel, these weights are {weights.format}"
            ': use backend="humming"'
        )
    if activations not in (None, "fp8_token"):
        raise ConfigError(
            f"cutlass_fp8 reads activations with one scale a row (fp8_token), not {activations}"
        )
    if refusal := _why_not_cutlass_fp8(weights.device):
        raise ConfigError(
            f'{refusal}: use backend="humming" (SM 8.9 on), or "torch" with plain weights'
        )


def _why_not_cutlass_fp8(device: torch.device) -> str | None:
    needs = "cutlass_fp8 needs a CUDA GPU of SM 9.0 or 10.x (torch's scaled_grouped_mm)"
    if device.type != "cuda":
        return f"{needs}, the weights are on {device}"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major in (9, 10) else f"{needs}, {device} is SM {major}.{minor}"


def _why_not_fp4(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major >= 10:
            return f"fp4 activations are not built yet (SM {major}.{minor} could): use fp8_token"
        return f"fp4 activations need SM 10.0 or newer, {device} is SM {major}.{minor}"
    return f"fp4 activations need a GPU of SM 10.0 or newer, the weights are on {device}"
