import pytest
import torch

from crossdock.experts import ExpertWeights, moe_reference, reference_and_tolerance

from .rows import random_routing

GENERATOR = torch.Generator().manual_seed(0)


def test_the_oracle_is_the_sum_over_k_of_weighted_experts():
    weights = ExpertWeights.random(range(5), hidden=6, intermediate=3, dtype=torch.float32)
    topk_idx, topk_weights = random_routing(7, 3, 5)
    x = torch.randn(7, 6)
    expected = torch.zeros(7, 6)
    for token in range(7):
        for k in range(3):
            expert = int(topk_idx[token, k])
            if expert >= 0:
                gate, up = (weights.w13[expert] @ x[token]).chunk(2)
                activation = gate / (1 + torch.exp(-gate)) * up
                expected[token] += topk_weights[token, k] * (weights.w2[expert] @ activation)
    torch.testing.assert_close(moe_reference(x, topk_idx, topk_weights, weights), expected)


def test_weights_of_absent_experts_are_ignored_even_nan():
    weights = ExpertWeights.random(range(2), hidden=4, intermediate=4)
    topk_idx = torch.tensor([[-1, 1], [-1, -1]])
    topk_weights = torch.tensor([[torch.nan, 0.5], [torch.nan, torch.inf]])
    out, tolerance = reference_and_tolerance(torch.randn(2, 4), topk_idx, topk_weights, weights)
    assert out.isfinite().all()
    assert tolerance.isfinite().all()
    assert (out[1] == 0).all()


def emulate(x, topk_idx, topk_weights, weights, dtype, quantise_x=lambda x: x):
    """The layer with every rounding that a worker makes, pair by pair, two ranks."""
    x = quantise_x(x.float()).to(dtype)
    num_experts = weights.num_local_experts
    partial = torch.zeros(2, *x.shape)
    for expert in range(num_experts):
        tokens, columns = (topk_idx == expert).nonzero(as_tuple=True)
        h = (x[tokens].float() @ weights.w13[expert].float().T).to(dtype)
        gate, up = h.chunk(2, dim=1)
        activation = torch.nn.functional.silu(gate) * up
        y = (activation.float() @ weights.w2[expert].float().T).to(dtype)
        partial[expert % 2].index_add_(
            0, tokens, topk_weights[tokens, columns].unsqueeze(1) * y.float()
        )
    return partial.to(dtype).float().sum(0).to(dtype).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("hidden", "intermediate"), [(1, 1), (129, 8), (256, 320)])
def test_roundings_stay_within_the_tolerance_and_use_a_fair_part_of_it(dtype, hidden, intermediate):
    weights = ExpertWeights.random(range(6), hidden=hidden, intermediate=intermediate, dtype=dtype)
    x = torch.randn(300, hidden, generator=GENERATOR).to(dtype)
    topk_idx, topk_weights = random_routing(300, 3, 6)
    out, tolerance = reference_and_tolerance(x, topk_idx, topk_weights, weights, dtype=dtype)
    used = (emulate(x, topk_idx, topk_weights, weights, dtype) - out).abs() / tolerance
    used = used.nan_to_num().max().item()  # 0 / 0: a token without experts
    assert used < 0.5
    if dtype != torch.float32:  # there both sides round alike
        assert used > 0.04


def round_e4m3(x):
    blocks = torch.nn.functional.pad(x, (0, -x.shape[1] % 128)).unflatten(1, (-1, 128))
    scale = blocks.abs().amax(dim=2, keepdim=True) / 448
    scale[scale == 0] = 1
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1)[:, : x.shape[1]]


@pytest.mark.parametrize("hidden", [129, 256])
def test_an_fp8_wire_stays_within_its_tolerance_which_a_plain_wire_does_not_allow(hidden):
    weights = ExpertWeights.random(range(4), hidden=hidden, intermediate=192)
    # Rows of very different sizes inside a block, so that e4m3's subnormal numbers are used.
    x = torch.randn(300, hidden, generator=GENERATOR)
    x = (x * torch.logspace(-5, 1, hidden)).bfloat16()
    topk_idx, topk_weights = random_routing(300, 2, 4, remote=0.0)
    out, tolerance = reference_and_tolerance(x, topk_idx, topk_weights, weights, wire="fp8")
    error = emulate(x, topk_idx, topk_weights, weights, torch.bfloat16, round_e4m3) - out
    assert (error.abs() <= tolerance).all()
    _, plain = reference_and_tolerance(x, topk_idx, topk_weights, weights)
    assert plain.max() < 0.5 * tolerance.max()


def test_a_wrong_expert_is_beyond_the_tolerance():
    weights = ExpertWeights.random(range(4), hidden=128, intermediate=128)
    topk_idx, topk_weights = random_routing(50, 2, 4, remote=0.0)
    x = torch.randn(50, 128, generator=GENERATOR)
    out, tolerance = reference_and_tolerance(x, topk_idx, topk_weights, weights)
    wrong = moe_reference(x, (topk_idx + 1) % 4, topk_weights, weights)
    beyond = ((wrong - out).abs() > tolerance).any(dim=1)
    assert beyond.all()
