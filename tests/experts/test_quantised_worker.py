"""The fp8 paths of the worker, on the CPU, with a GEMM that only emulates one."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.experts import ExpertWeights, reference_and_tolerance
from crossdock.experts.gemm import GroupedGemm
from crossdock.experts.worker import Worker
from crossdock.scratch import WorkspaceManager
from crossdock.scratch.errors import ConfigError, LockedError

from .rows import make_rows, quantised_channels, random_routing, wire_fp8


class EmulatedGemm(GroupedGemm):
    """fp8 activations by plain or channel-quantised weights, an expert after the other."""

    name = "emulated"
    writes_out = True

    def __init__(self, weight, scale, *, activations, writes_out):
        self.activations = activations
        self.writes_out = writes_out
        self.dtype = torch.bfloat16
        self.load(weight, scale)

    def load(self, weight, scale):
        self._weight = weight.float() if scale is None else weight.float() * scale.unsqueeze(2)

    def __call__(self, x, scale, groups, *, out=None):
        assert x.dtype == torch.float8_e4m3fn
        assert (out is None) != self.writes_out
        width = x.shape[1]
        blocks = scale.repeat_interleave(width if scale.shape[1] == 1 else 128, dim=1)
        values = x.float() * blocks[:, :width]
        y = torch.full((x.shape[0], self._weight.shape[1]), torch.nan)
        ends = groups.ends.tolist()
        for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            y[start:end] = values[start:end] @ self._weight[expert].T
        return y.bfloat16() if out is None else out.copy_(y)


def emulated_worker(weights, *, activations, writes_out=True, granule=128, workspace=None):
    return Worker(
        partial(EmulatedGemm, activations=activations, writes_out=writes_out),
        granule=granule,
        weights=weights,
        workspace=workspace or WorkspaceManager("cpu"),
        num_experts=weights.num_local_experts,
        reason="test",
    )


@settings(deadline=None, max_examples=60)
@given(
    num_rows=st.integers(0, 30),
    num_experts=st.integers(1, 6),
    hidden=st.sampled_from([1, 8, 128, 129, 300]),
    intermediate=st.sampled_from([1, 16, 129, 256]),
    activations=st.sampled_from(["fp8_token", "fp8_block"]),
    writes_out=st.booleans(),
    prequantised=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    seed=st.integers(0, 99),
)
def test_any_rows_become_the_fp8_that_the_gemm_reads(
    num_rows, num_experts, hidden, intermediate, activations, writes_out, prequantised, dtype, seed
):
    weights = ExpertWeights.random(range(num_experts), hidden=hidden, intermediate=intermediate)
    experts = emulated_worker(weights, activations=activations, writes_out=writes_out)
    topk_idx, topk_weights = random_routing(num_rows, 2, num_experts, seed=seed)
    x = torch.randn(num_rows, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)
    payload, scale = wire_fp8(x) if prequantised else (x, None)
    rows = make_rows(
        payload, topk_idx, topk_weights, num_local_experts=num_experts, scale=scale, dtype=dtype
    )
    found = experts(rows)[:num_rows].float()
    out, tolerance = reference_and_tolerance(
        x,
        topk_idx,
        topk_weights,
        weights,
        wire="fp8" if prequantised else "payload",
        activations=activations,
    )
    assert ((found - out).abs() <= tolerance).all()


def test_rows_of_the_wire_reach_an_fp8_block_gemm_untouched():
    weights = ExpertWeights.random(range(2), hidden=256, intermediate=128)
    seen = []

    class Spy(EmulatedGemm):
        def __call__(self, x, scale, groups, *, out=None):
            seen.append((x.clone(), scale.clone()))
            return super().__call__(x, scale, groups, out=out)

    experts = Worker(
        partial(Spy, activations="fp8_block", writes_out=True),
        granule=128,
        weights=weights,
        workspace=WorkspaceManager("cpu"),
        num_experts=2,
        reason="test",
    )
    payload, scale = wire_fp8(torch.randn(9, 256))
    topk_idx = torch.tensor([[1]] * 4 + [[0]] * 5)
    rows = make_rows(
        payload,
        topk_idx,
        torch.ones(9, 1),
        num_local_experts=2,
        scale=scale,
        dtype=torch.bfloat16,
    )
    experts(rows)
    order = torch.tensor([4, 5, 6, 7, 8, 0, 1, 2, 3])
    assert torch.equal(seen[0][0].view(torch.uint8), payload.view(torch.uint8)[order])
    assert torch.equal(seen[0][1], scale[order])


def one_a_row(x, scale=None):
    return make_rows(
        x,
        torch.zeros(x.shape[0], 1, dtype=torch.int64),
        torch.ones(x.shape[0], 1),
        num_local_experts=2,
        scale=scale,
        dtype=torch.bfloat16,
    )


def test_the_two_regions_alternate_so_that_memory_is_two_buffers():
    weights = ExpertWeights.random(range(2), hidden=256, intermediate=128)
    workspace = WorkspaceManager("cpu")
    experts = emulated_worker(weights, activations="fp8_block", workspace=workspace)
    experts(one_a_row(*wire_fp8(torch.randn(64, 256))))
    region_a = 64 * 256  # fp8
    scales = 64 * 2 * 4
    region_b = 64 * 256 * 2  # bf16: both outputs, [P, 2I] and [P, H]
    assert workspace.capacity_bytes() == region_a + scales + region_b
    experts(one_a_row(torch.randn(64, 256).bfloat16()))  # quantised on the way
    assert workspace.capacity_bytes() == region_a + scales + region_b


def test_pair_capacity_is_exact_for_fp8_too():
    weights = ExpertWeights.random(range(2), hidden=256, intermediate=128)
    workspace = WorkspaceManager("cpu")
    experts = emulated_worker(
        weights, activations="fp8_token", writes_out=False, workspace=workspace
    )
    experts(one_a_row(torch.randn(50, 256).bfloat16()))
    workspace.lock()
    assert experts.pair_capacity() == 50
    experts(one_a_row(*wire_fp8(torch.randn(50, 256))))
    with pytest.raises(LockedError):
        experts(one_a_row(torch.randn(51, 256).bfloat16()))


@pytest.mark.parametrize("hidden", [16, 24])
def test_weights_that_come_in_fp8_are_padded_with_their_scales(hidden):
    plain = ExpertWeights.random(range(3), hidden=hidden, intermediate=5)
    weights = quantised_channels(plain)
    experts = emulated_worker(weights, activations="fp8_token", granule=16)
    topk_idx, topk_weights = random_routing(12, 2, 3)
    x = torch.randn(12, hidden).bfloat16()
    found = experts(make_rows(x, topk_idx, topk_weights, num_local_experts=3))[:12].float()
    out, tolerance = reference_and_tolerance(
        x, topk_idx, topk_weights, weights, activations="fp8_token"
    )
    assert ((found - out).abs() <= tolerance).all()
    for expert in range(3):  # the quantised weights are near the plain ones
        for near, exact in zip(weights.dense(expert), plain.dense(expert), strict=True):
            # e4m3's widest step is 32 of 448, its smallest 2**-9; half of it is the rounding.
            assert ((near - exact).abs() <= exact.abs().amax(1, keepdim=True) * 16.1 / 448).all()


def test_fp8_blocks_that_gate_and_up_would_share_are_refused():
    weights = ExpertWeights(
        w13=torch.zeros(1, 400, 256).to(torch.float8_e4m3fn),
        w2=torch.zeros(1, 256, 200).to(torch.float8_e4m3fn),
        format="fp8_block",
        w13_scale=torch.ones(1, 4, 2),
        w2_scale=torch.ones(1, 2, 2),
    )
    with pytest.raises(ConfigError, match="whole blocks"):
        emulated_worker(weights, activations="fp8_block")
