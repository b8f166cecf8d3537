from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.experts import ExpertWeights, make_experts, reference_and_tolerance
from crossdock.scratch import PermuteScratch, WorkspaceManager, permute_scratch
from crossdock.scratch.errors import ConfigError, LockedError

from .rows import make_rows, random_routing

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def check(weights, x, topk_idx, topk_weights, *, experts=None, wire="payload", scale=None):
    """Runs the worker on ``x`` in a poisoned bucket; its y must be the oracle's."""
    dtype = weights.dtype
    if experts is None:
        experts = make_experts("torch", weights, workspace=poisoned_workspace())
    payload = x if scale is None else scale[0]
    rows = make_rows(
        payload,
        topk_idx,
        topk_weights,
        num_local_experts=weights.num_local_experts,
        scale=None if scale is None else scale[1],
        dtype=dtype,
    )
    y = experts(rows)
    assert y.data_ptr() == rows.y.data_ptr()
    found = y[: rows.num_rows].float()
    out, tolerance = reference_and_tolerance(
        x, topk_idx, topk_weights, weights, dtype=dtype, wire=wire
    )
    assert ((found - out).abs() <= tolerance).all()
    alone = (topk_idx < 0).all(dim=1)
    assert (found[alone] == 0).all()
    return rows


def poisoned_workspace():
    """A workspace whose every byte is 0xff, which is NaN in each floating dtype."""
    workspace = WorkspaceManager("cpu")
    (buffer,) = workspace.get_simultaneous(((1 << 22,), torch.uint8))
    buffer.fill_(0xFF)
    return workspace


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 8, 129])
@pytest.mark.parametrize("intermediate", [1, 8, 129])
def test_any_hidden_and_intermediate_size(dtype, hidden, intermediate):
    weights = ExpertWeights.random(range(3), hidden=hidden, intermediate=intermediate, dtype=dtype)
    x = torch.randn(19, hidden, generator=torch.Generator().manual_seed(1)).to(dtype)
    check(weights, x, *random_routing(19, 2, 3))


@settings(deadline=None, max_examples=40)
@given(
    num_rows=st.integers(0, 40),
    top_k=st.integers(1, 8),
    num_experts=st.integers(0, 12),
    remote=st.sampled_from([0.0, 0.5, 1.0]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_ragged_rows_and_experts(num_rows, top_k, num_experts, remote, dtype, seed):
    weights = ExpertWeights.random(range(num_experts), hidden=24, intermediate=20, dtype=dtype)
    topk_idx, topk_weights = random_routing(num_rows, top_k, num_experts, remote=remote, seed=seed)
    x = torch.randn(num_rows, 24, generator=torch.Generator().manual_seed(seed)).to(dtype)
    check(weights, x, topk_idx, topk_weights)


def test_all_rows_to_one_expert():
    weights = ExpertWeights.random(range(6), hidden=32, intermediate=16)
    topk_idx = torch.full((50, 1), 4)
    check(weights, torch.randn(50, 32).bfloat16(), topk_idx, torch.ones(50, 1))


@pytest.mark.parametrize("hidden", [1, 128, 129, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_rows_are_dequantised(hidden, dtype):
    weights = ExpertWeights.random(range(4), hidden=hidden, intermediate=64, dtype=dtype)
    x = torch.randn(30, hidden, generator=torch.Generator().manual_seed(2)).to(dtype)
    blocks = torch.nn.functional.pad(x.float(), (0, -hidden % 128)).unflatten(1, (-1, 128))
    scale = blocks.abs().amax(dim=2) / 448
    payload = (blocks / scale.unsqueeze(2)).flatten(1)[:, :hidden].to(torch.float8_e4m3fn)
    check(weights, x, *random_routing(30, 2, 4, remote=0.2), wire="fp8", scale=(payload, scale))


def test_rows_may_be_a_strided_view():
    weights = ExpertWeights.random(range(3), hidden=40, intermediate=16)
    topk_idx, topk_weights = random_routing(20, 2, 3)
    message = torch.full((23, 64), torch.nan, dtype=torch.bfloat16)
    message[:20, :40] = torch.randn(20, 40)
    experts = make_experts("torch", weights, workspace=poisoned_workspace())
    contiguous = check(weights, message[:20, :40], topk_idx, topk_weights, experts=experts)
    strided = make_rows(message[:20, :40], topk_idx, topk_weights, num_local_experts=3)
    strided = replace(strided, x=message[:, :40])
    assert torch.equal(experts(strided)[:20], contiguous.y[:20])


def test_rows_past_num_rows_are_left_alone():
    weights = ExpertWeights.random(range(3), hidden=8, intermediate=8)
    rows = check(weights, torch.randn(5, 8).bfloat16(), *random_routing(5, 2, 3))
    assert rows.y[5:].isnan().all()


def test_rows_that_do_not_fit_the_weights_are_refused():
    weights = ExpertWeights.random(range(3), hidden=8, intermediate=8)
    experts = make_experts("torch", weights, workspace=WorkspaceManager("cpu"))
    routing = random_routing(5, 2, 3)
    with pytest.raises(ConfigError, match="hidden = 9"):
        experts(make_rows(torch.zeros(5, 9).bfloat16(), *routing, num_local_experts=3))
    with pytest.raises(ConfigError, match="4 experts"):
        experts(make_rows(torch.zeros(5, 8).bfloat16(), *routing, num_local_experts=4))
    with pytest.raises(ConfigError, match="float16"):
        experts(make_rows(torch.zeros(5, 8).half(), *routing, num_local_experts=3))


def run(experts, num_rows):
    """``num_rows`` pairs, one a row."""
    rows = make_rows(
        torch.ones(num_rows, 8).bfloat16(),
        torch.zeros(num_rows, 1, dtype=torch.int64),
        torch.ones(num_rows, 1),
        num_local_experts=experts.num_local_experts,
    )
    return experts(rows)


def test_pair_capacity_is_the_most_pairs_that_run_once_locked():
    weights = ExpertWeights.random(range(2), hidden=8, intermediate=4)
    workspace = WorkspaceManager("cpu")
    experts = make_experts("torch", weights, workspace=workspace)
    assert experts.pair_capacity() == -1
    run(experts, 37)
    run(experts, 5)
    workspace.lock()
    assert experts.pair_capacity() == 37
    run(experts, 37)
    with pytest.raises(LockedError):
        run(experts, 38)
    run(experts, 37)
    workspace.unlock()
    assert experts.pair_capacity() == -1
    run(experts, 38)


def test_pair_capacity_heeds_the_scratch_and_the_workspace():
    weights = ExpertWeights.random(range(2), hidden=8, intermediate=4)
    workspace = WorkspaceManager("cpu")
    experts = make_experts("torch", weights, workspace=workspace)
    run(experts, 10)
    permute_scratch(workspace, num_experts=2, num_local_experts=2, device="cpu").reserve(1000)
    workspace.lock()
    assert experts.pair_capacity() == 256 // (8 * 2)  # what one aligned unit holds
    run(experts, 16)
    with pytest.raises(LockedError):
        run(experts, 17)


def test_experts_never_warmed_up_hold_no_pairs():
    weights = ExpertWeights.random(range(2), hidden=8, intermediate=4)
    workspace = WorkspaceManager("cpu")
    experts = make_experts("torch", weights, workspace=workspace)
    workspace.lock()
    assert experts.pair_capacity() == 0


def test_experts_made_anew_after_locking_use_the_same_memory():
    workspace = WorkspaceManager("cpu")
    first = make_experts(
        "torch",
        ExpertWeights.random(range(2), hidden=8, intermediate=4, seed=1),
        workspace=workspace,
        num_experts=16,
    )
    run(first, 20)
    workspace.lock()
    scratch = first._scratch()
    (buffer,) = workspace.get_simultaneous(((1,), torch.uint8))
    addresses = buffer.data_ptr(), scratch.offsets.data_ptr(), scratch.source(20).data_ptr()

    weights = ExpertWeights.random(range(2), hidden=8, intermediate=4, seed=2)
    second = make_experts("torch", weights, workspace=workspace, num_experts=16)
    assert second._scratch() is scratch
    assert second.pair_capacity() == 20
    x = torch.randn(20, 8).bfloat16()
    check(weights, x, torch.ones(20, 1, dtype=torch.int64), torch.ones(20, 1), experts=second)
    (buffer,) = workspace.get_simultaneous(((1,), torch.uint8))
    assert addresses == (
        buffer.data_ptr(),
        scratch.offsets.data_ptr(),
        scratch.source(20).data_ptr(),
    )


def test_experts_of_a_shape_never_seen_are_refused_once_locked():
    workspace = WorkspaceManager("cpu")
    workspace.lock()
    with pytest.raises(LockedError, match="PermuteScratch"):
        make_experts(
            "torch", ExpertWeights.random([0], hidden=8, intermediate=4), workspace=workspace
        )


@pytest.mark.parametrize(("hidden", "intermediate"), [(16, 8), (9, 5)])
def test_reload_replaces_the_weights_in_place(hidden, intermediate):
    before = ExpertWeights.random(range(2), hidden=hidden, intermediate=intermediate, seed=1)
    after = ExpertWeights.random(range(2), hidden=hidden, intermediate=intermediate, seed=2)
    experts = make_experts("torch", before, workspace=WorkspaceManager("cpu"))
    addresses = experts.gemm13._weight.data_ptr(), experts.gemm2._weight.data_ptr()
    experts.reload(after)
    assert addresses == (experts.gemm13._weight.data_ptr(), experts.gemm2._weight.data_ptr())
    x = torch.randn(9, hidden).bfloat16()
    check(after, x, *random_routing(9, 2, 2), experts=experts)
    with pytest.raises(ConfigError, match="built for"):
        experts.reload(ExpertWeights.random(range(3), hidden=hidden, intermediate=intermediate))


def test_layers_of_one_shape_share_their_scratch_and_lanes_never_do():
    workspace = WorkspaceManager("cpu", num_lanes=2)
    layers = [
        make_experts(
            "torch",
            ExpertWeights.random(range(2), hidden=8, intermediate=4, seed=seed),
            workspace=workspace,
        )
        for seed in range(2)
    ]
    assert layers[0]._scratch() is layers[1]._scratch()
    with workspace.use(lane=1):
        other: PermuteScratch = layers[0]._scratch()
    assert other is not layers[0]._scratch()


def test_workspace_follows_pairs():
    weights = ExpertWeights.random(range(2), hidden=8, intermediate=32)
    workspace = WorkspaceManager("cpu")
    experts = make_experts("torch", weights, workspace=workspace)
    run(experts, 64)
    assert workspace.capacity_bytes() == 64 * 32 * 2  # pairs x max(H, I) x bf16


def test_quantised_formats_are_refused_with_advice():
    weights = ExpertWeights.random([0], hidden=8, intermediate=8, format="mxfp4")
    with pytest.raises(ConfigError, match="humming"):
        make_experts("torch", weights, workspace=WorkspaceManager("cpu"))
