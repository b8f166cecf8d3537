"""The whole layer in one process, in plain fp32: what every worker and dispatch is compared with.

Tolerance
---------
A worker differs from fp32 by its roundings. Each is taken as centred, independent of the others and
uniform within half a unit in the last place: at most u|v|, u = 2^-8 for bf16, 2^-11 for fp16, 2^-24
for fp32, so its standard deviation is at most r|v| with r = u / sqrt(3). For one pair:

    x        as sent, or with an fp8 wire off by the quantisation error below, then rounded: r|x|
    h        = w13 x, rounded:                                  r|h|
    a        = silu(gate) * up, rounded once or twice:          2r|a|, beside what h passes on by
               the slopes silu'(gate) up and silu(gate)
    y        = w2 a, rounded:                                   r|y|
    each GEMM also adds up in fp32 (here as well): n terms      2 n 2^-24 sqrt(sum of squares)

A sum of c_i d_i, where d_i are uniform with deviation s_i, exceeds t sqrt(sum (c_i s_i)^2) with a
probability below 2 exp(-t^2 / 2), since the uniform distribution is strictly sub-Gaussian (for
rounding errors see Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM
J. Sci. Comput. 2019): t = 8 is below 3e-14 for each element. So deviations pass through a GEMM as a
root of sums of squares, here bounded by (largest |weight|) x (2-norm of the input's deviations);
where values share their inputs, deviations are added up. The pairs of a token are added up with
|topk_weights|. Then come worst cases: the partial sums of ranks (and of nodes, two levels) are
rounded to the dtype, u sum |w y| each, and so is the result, u|out|.

fp8 (e4m3, three mantissa bits, scale = amax / 448) is off by at most 2^-4 |v|, and below its
smallest normal number by half of its step 2^-9: 2^-10 amax / 448; again uniform, so by sqrt(3) less
in deviation. That is the wire's error in x, and with quantised activations also the worker's in x
and a. Here the independence also says that the quantisation errors of one row are not aligned with
the weights.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from crossdock.experts.gemm import Activations
from crossdock.experts.weights import ExpertWeights

__all__ = ["layer_tolerance", "moe_reference", "reference_and_tolerance"]

DEVIATIONS = 8.0
SILU_CURVATURE = 0.5
"""max |silu''|, reached at 0."""
UNIFORM = 3.0**-0.5
"""Standard deviation of a uniform error over its largest value."""
FP32_ROUNDOFF = 2.0**-24
E4M3_MAX = 448.0
SCALE_BLOCK = 128
WHOLE_ROW = 2**31


def moe_reference(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, weights: ExpertWeights
) -> Tensor:
    """Sum over k of topk_weights[t, k] * expert[topk_idx[t, k]](x[t]).

    Args:
        x: [T, H] of any floating dtype.
        topk_idx: [T, K] global ids, -1 for none.
        topk_weights: [T, K], ignored where the id is -1.
        weights: Of all experts of the layer, by global id; quantised ones are dequantised.

    Returns:
        fp32 [T, H].
    """
    return reference_and_tolerance(x, topk_idx, topk_weights, weights)[0]


def layer_tolerance(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    weights: ExpertWeights,
    *,
    dtype: torch.dtype = torch.bfloat16,
    wire: Literal["payload", "fp8"] = "payload",
    activations: Activations = "plain",
) -> Tensor:
    """How far a layer may be from ``moe_reference``, each element; see the module for the formula.

    Args:
        x: As in ``moe_reference``, and so are the next three.
        topk_idx: See above.
        topk_weights: See above.
        weights: See above.
        dtype: The dtype that the layer computes in.
        wire: Of the dispatch.
        activations: Of the worker.

    Returns:
        fp32 [T, H].
    """
    return reference_and_tolerance(
        x, topk_idx, topk_weights, weights, dtype=dtype, wire=wire, activations=activations
    )[1]


def reference_and_tolerance(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    weights: ExpertWeights,
    *,
    dtype: torch.dtype = torch.bfloat16,
    wire: Literal["payload", "fp8"] = "payload",
    activations: Activations = "plain",
) -> tuple[Tensor, Tensor]:
    """``moe_reference`` and ``layer_tolerance`` in one pass; arguments as there."""
    unit = torch.finfo(dtype).eps / 2
    floor = torch.finfo(dtype).smallest_normal * unit  # half a step of the subnormal numbers
    rounding = UNIFORM * unit
    x = x.float()
    x_spread = torch.zeros_like(x)
    if wire == "fp8":
        x_spread += _fp8_deviation(x, SCALE_BLOCK) + rounding * x.abs() + floor
    block = {"plain": None, "fp8_token": WHOLE_ROW, "fp8_block": SCALE_BLOCK}[activations]
    if block is not None:
        x_spread += _fp8_deviation(x, block)

    out = torch.zeros_like(x)
    spread = torch.zeros_like(x)
    magnitude = torch.zeros_like(x)
    for expert in range(weights.num_local_experts):
        tokens, columns = (topk_idx == expert).nonzero(as_tuple=True)
        if tokens.numel() == 0:
            continue
        w13, w2 = weights.dense(expert)
        factor = topk_weights[tokens, columns].float().unsqueeze(1)

        h = x[tokens] @ w13.T
        h_spread = _through_gemm(x[tokens], x_spread[tokens], w13) + rounding * h.abs() + floor
        (gate, up), (gate_spread, up_spread) = h.chunk(2, dim=1), h_spread.chunk(2, dim=1)
        sigmoid, silu = gate.sigmoid(), F.silu(gate)
        activation = silu * up
        slope = (sigmoid * (1 + gate * (1 - sigmoid))).abs()
        slope += SILU_CURVATURE * DEVIATIONS * gate_spread
        a_spread = slope * gate_spread * (up.abs() + DEVIATIONS * up_spread)
        a_spread += silu.abs() * up_spread + 2 * rounding * activation.abs() + floor
        if block is not None:
            a_spread += _fp8_deviation(activation, block)
        y = activation @ w2.T
        y_spread = _through_gemm(activation, a_spread, w2) + rounding * y.abs() + floor

        out.index_add_(0, tokens, factor * y)
        spread.index_add_(0, tokens, factor.abs() * y_spread)
        magnitude.index_add_(0, tokens, factor.abs() * y.abs())
    tolerance = DEVIATIONS * spread + 2 * unit * magnitude + unit * out.abs() + 2 * floor
    return out, tolerance


def _through_gemm(value: Tensor, spread: Tensor, weight: Tensor) -> Tensor:
    """Spread of ``value @ weight.T``, [rows, 1]: what comes in, and the fp32 sums."""
    terms = value.shape[1]
    sums = 2 * terms * FP32_ROUNDOFF * value.norm(dim=1, keepdim=True)
    through: Tensor = weight.abs().amax() * (spread.norm(dim=1, keepdim=True) + sums)
    return through


def _fp8_deviation(value: Tensor, block: int) -> Tensor:
    """Of e4m3 with one scale for each ``block`` elements of a row."""
    width = value.shape[1]
    block = min(block, width)
    blocks = F.pad(value.abs(), (0, -width % block)).view(value.shape[0], -(-width // block), block)
    step = blocks.amax(dim=2, keepdim=True) * (2.0**-10 / E4M3_MAX)
    return torch.maximum(blocks * 2.0**-4, step).flatten(1)[:, :width] * UNIFORM
