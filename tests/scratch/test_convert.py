"""SwiGLU and fp8 on the way from one place to another."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from crossdock.scratch import PermuteScratch, convert_rows, permute, swiglu
from tests.scratch.oracle import expected_permutation, poison_, random_routing

FP8 = torch.float8_e4m3fn
WIDTHS = [1, 8, 127, 128, 129, 200, 512]


def reference_fp8(values: torch.Tensor, num_scales: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Payload and scales, block by block."""
    width = values.shape[1]
    step = width if num_scales == 1 else 128
    scales, payload = [], []
    for start in range(0, width, step):
        block = values[:, start : start + step].float()
        amax = block.abs().amax(1, keepdim=True)
        scale = torch.where(amax > 0, (amax / 448).clamp(min=2.0**-126), 1.0)
        scales.append(scale)
        payload.append((block / scale).clamp(-448, 448).to(FP8))
    return torch.cat([p.view(torch.uint8) for p in payload], 1), torch.cat(scales, 1)


def scale_widths(width: int) -> set[int]:
    return {1, -(-width // 128)}


@pytest.mark.parametrize("width", WIDTHS)
def test_quantize_equals_the_blockwise_reference(width):
    values = torch.randn(9, width).bfloat16()
    values[3] = 0
    values[4] = 1e-38
    for num_scales in scale_widths(width):
        out = torch.empty(9, width + 16, dtype=FP8)[:, :width]
        scale = torch.full((9, num_scales), float("nan"))
        convert_rows(values, out=out, scale=scale)
        payload, want_scale = reference_fp8(values, num_scales)
        assert torch.equal(scale, want_scale)
        assert torch.equal(out.view(torch.uint8), payload)


def test_rows_past_num_rows_are_neither_read_nor_written():
    values = poison_(torch.empty(6, 256))
    values[:4] = torch.randn(4, 256)
    out, scale = poison_(torch.empty(6, 256, dtype=FP8)), torch.full((6, 2), 7.0)
    convert_rows(values, out=out, scale=scale, num_rows=torch.tensor([4]))
    assert scale[:4].isfinite().all()
    assert (scale[4:] == 7.0).all()
    assert not out[:4].float().isnan().any()
    assert out[4:].float().isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_swiglu_is_computed_in_fp32_and_rounded_once(dtype):
    gate_up = torch.randn(5, 2 * 130).to(dtype)
    gate, up = gate_up.float().chunk(2, 1)
    want = (F.silu(gate) * up).to(dtype)
    assert torch.equal(swiglu(gate_up, out=torch.empty(5, 130, dtype=dtype)), want)


def test_swiglu_to_fp8_is_swiglu_then_quantize():
    gate_up = torch.randn(5, 2 * 256).bfloat16()
    gate, up = gate_up.float().chunk(2, 1)
    for num_scales in (1, 2):
        out, scale = torch.empty(5, 256, dtype=FP8), torch.empty(5, num_scales)
        swiglu(gate_up, out=out, scale=scale)
        payload, want_scale = reference_fp8(F.silu(gate) * up, num_scales)
        assert torch.equal(scale, want_scale)
        assert torch.equal(out.view(torch.uint8), payload)


@pytest.mark.parametrize("width", [129, 256])
def test_permute_quantises_dequantises_and_requantises_on_the_way(width):
    idx = random_routing(20, 16, 3, 6, local_share=0.5)
    rows = expected_permutation(idx, 6).source.long()
    pairs = rows.numel()
    x = poison_(torch.empty(20, width, dtype=torch.bfloat16))
    x[:16] = torch.randn(16, width)
    scratch = PermuteScratch(6, 6, "cpu")
    num_blocks = -(-width // 128)

    out, scale = torch.empty(pairs, width, dtype=FP8), torch.empty(pairs, num_blocks)
    quantised = permute(x, None, idx, scratch, num_pairs=pairs, out=out, out_scale=scale)
    payload, want_scale = reference_fp8(x[rows], num_blocks)
    assert torch.equal(quantised.hidden.view(torch.uint8), payload)
    assert torch.equal(quantised.scale, want_scale)

    fp8, fp8_scale = (t.clone() for t in reference_fp8(x.nan_to_num(), num_blocks))
    fp8 = fp8.view(FP8)
    wide = fp8.float() * fp8_scale.repeat_interleave(128, 1)[:, :width]
    out = torch.empty(pairs, width, dtype=torch.bfloat16)
    dequantised = permute(fp8, fp8_scale, idx, scratch, num_pairs=pairs, out=out)
    assert dequantised.scale is None
    assert torch.equal(dequantised.hidden, wide[rows].bfloat16())

    out, scale = torch.empty(pairs, width, dtype=FP8), torch.empty(pairs, 1)
    again = permute(fp8, fp8_scale, idx, scratch, num_pairs=pairs, out=out, out_scale=scale)
    payload, want_scale = reference_fp8(wide[rows], 1)
    assert torch.equal(again.hidden.view(torch.uint8), payload)
    assert torch.equal(again.scale, want_scale)


def test_scales_of_a_third_shape_are_refused():
    with pytest.raises(ValueError, match="scale of out"):
        convert_rows(
            torch.randn(2, 512), out=torch.empty(2, 512, dtype=FP8), scale=torch.empty(2, 3)
        )
