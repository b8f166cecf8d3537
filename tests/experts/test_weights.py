import pytest
import torch

from crossdock.experts import ExpertWeights
from crossdock.scratch.errors import ConfigError


def test_an_experts_weights_depend_only_on_the_seed_and_its_global_id():
    some = ExpertWeights.random([5, 2], hidden=9, intermediate=4, seed=7)
    everyone = ExpertWeights.random(range(6), hidden=9, intermediate=4, seed=7)
    other_seed = ExpertWeights.random(range(6), hidden=9, intermediate=4, seed=8)
    for local_id, expert_id in enumerate([5, 2]):
        assert torch.equal(some.w13[local_id], everyone.w13[expert_id])
        assert torch.equal(some.w2[local_id], everyone.w2[expert_id])
        assert not torch.equal(some.w13[local_id], other_seed.w13[expert_id])
    assert not torch.equal(everyone.w13[0], everyone.w13[1])


def test_random_weights_give_outputs_of_about_unit_variance():
    weights = ExpertWeights.random([0], hidden=256, intermediate=256, dtype=torch.float32)
    x = torch.randn(2000, 256, generator=torch.Generator().manual_seed(0))
    gate, up = (x @ weights.w13[0].T).chunk(2, dim=1)
    y = (torch.nn.functional.silu(gate) * up) @ weights.w2[0].T
    assert 0.8 < y.std().item() < 1.25


def test_a_rank_without_experts_has_weights_of_zero_experts():
    weights = ExpertWeights.random([], hidden=8, intermediate=4)
    assert (weights.num_local_experts, weights.hidden, weights.intermediate) == (0, 8, 4)


def shaped(w13, w2, dtype=torch.bfloat16):
    return {"w13": torch.zeros(w13, dtype=dtype), "w2": torch.zeros(w2, dtype=dtype)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (shaped((2, 8, 6), (2, 6, 5)), "2I, H"),
        (shaped((2, 8, 6), (3, 6, 4)), "2I, H"),
        (shaped((8, 6), (6, 4)), "E_local, 2I, H"),
        (shaped((2, 0, 6), (2, 6, 0)), "at least 1"),
        (shaped((2, 8, 6), (2, 6, 4), torch.int8), "float8_e4m3fn"),
        ({**shaped((2, 8, 6), (2, 6, 4)), "w13_scale": torch.ones(2, 8)}, "scales beside"),
        ({**shaped((2, 8, 6), (2, 6, 4)), "format": "fp5"}, "format"),
        ({**shaped((2, 8, 6), (2, 6, 4), torch.float8_e4m3fn)}, "plain"),
        (
            {
                **shaped((2, 8, 6), (2, 6, 4), torch.float8_e4m3fn),
                "format": "fp8_channel",
                "w13_scale": torch.ones(2, 8),
                "w2_scale": torch.ones(2, 5),
            },
            "w2_scale",
        ),
    ],
)
def test_weights_that_do_not_fit_together_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        ExpertWeights(**fields)


def test_w13_and_w2_of_different_dtypes_are_refused():
    with pytest.raises(ConfigError, match="alike"):
        ExpertWeights(w13=torch.zeros(1, 8, 6), w2=torch.zeros(1, 6, 4, dtype=torch.float16))
