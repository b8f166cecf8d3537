"""Tokens for measurements on GPUs: of one shape, spread evenly or as recorded, and their sums."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from crossdock.dispatch.placement import ExpertPlacement
from crossdock.dispatch.transports.base import Transport
from crossdock.dispatch.wire import dequantize, quantize
from crossdock.launch.bench.tokens import Tokens

__all__ = [
    "HIDDEN",
    "NUM_EXPERTS",
    "TOP_K",
    "sums_of_unchanged_rows",
    "traced_inputs",
    "uniform_inputs",
]

HIDDEN, NUM_EXPERTS, TOP_K = 7168, 256, 8


def uniform_inputs(transport: Transport, tokens: int, num_experts: int) -> Tokens:
    """Tokens of this rank whose experts are all equally likely."""
    generator = torch.Generator(transport.device).manual_seed(transport.rank)
    scores = torch.rand(tokens, num_experts, generator=generator, device=transport.device)
    return _with_ids(transport, scores.argsort(1)[:, :TOP_K].contiguous())


def traced_inputs(transport: Transport, tokens: int, name: str) -> Tokens:
    """This rank's of the recorded tokens of ``routing-NAME-k8``: ``"e64"`` or ``"e256"``."""
    from safetensors.torch import load_file

    folder = Path(os.environ.get("CROSSDOCK_TRACES", "configs/traces"))
    ids = load_file(folder / f"routing-{name}-k8.safetensors")["topk_idx"][0].long()
    start = transport.rank * tokens % len(ids)
    mine = torch.roll(ids, -start, 0)[:tokens]
    return _with_ids(transport, mine.to(transport.device))


def sums_of_unchanged_rows(
    tokens: Tokens, placement: ExpertPlacement, *, fp8: bool = False
) -> Tensor:
    """Results [T, H] if experts give rows back as they came: each token once for each of its ranks.

    Sums of up to 64 equal numbers of 8 bits are exact in fp32, whatever their order.

    Args:
        tokens: Of this rank.
        placement: Who owns which expert.
        fp8: Whether rows travelled as fp8, and were given back dequantised.
    """
    owner = placement.owner.to(tokens.x.device)[tokens.topk_idx]
    times = torch.zeros(len(owner), device=owner.device)
    for rank in range(placement.ep_size):
        times += (owner == rank).any(1)
    x = dequantize(*quantize(tokens.x), tokens.x.dtype) if fp8 else tokens.x
    return (x.float() * times[:, None]).to(x.dtype)


def _with_ids(transport: Transport, ids: Tensor) -> Tokens:
    device = transport.device
    return Tokens(
        x=torch.randn(len(ids), HIDDEN, device=device).bfloat16(),
        topk_idx=ids,
        topk_weights=torch.rand(len(ids), TOP_K, device=device),
    )
