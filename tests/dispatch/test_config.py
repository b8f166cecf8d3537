"""DispatchConfig validates itself."""

from __future__ import annotations

import pytest
import torch

from crossdock.dispatch import DispatchConfig, errors

SIZES = {"num_experts": 8, "top_k": 2, "hidden": 16}


def test_defaults():
    config = DispatchConfig(**SIZES)
    assert (config.dtype, config.algorithm, config.wire) == (torch.bfloat16, "alltoall", "payload")
    assert (config.bucket, config.layout, config.num_sms) == ("grow", "row", None)
    assert (config.timeout_s, config.debug) == (100.0, False)


def test_it_is_frozen_and_keyword_only():
    with pytest.raises(AttributeError):
        DispatchConfig(**SIZES).hidden = 3
    with pytest.raises(TypeError):
        DispatchConfig(8, 2, 16)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_experts", 0),
        ("num_experts", 1.5),
        ("top_k", 0),
        ("top_k", -1),
        ("hidden", 0),
        ("hidden", True),
        ("dtype", torch.int64),
        ("dtype", "bfloat16"),
        ("algorithm", "alltoal"),
        ("wire", "fp4"),
        ("bucket", 0),
        ("bucket", -5),
        ("bucket", "shrink"),
        ("bucket", 2.0),
        ("layout", "column"),
        ("expert_alignment", 0),
        ("expert_alignment", 1025),
        ("num_sms", 0),
        ("timeout_s", 0),
        ("timeout_s", -1.0),
        ("timeout_s", float("nan")),
        ("timeout_s", "soon"),
        ("timeout_s", 0.49),
        ("timeout_s", True),
        ("debug", "yes"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(errors.ConfigError, match=name):
        DispatchConfig(**(SIZES | {name: value}))


@pytest.mark.parametrize("name", SIZES)
def test_sizes_have_no_default(name):
    with pytest.raises(TypeError, match=name):
        DispatchConfig(**{key: value for key, value in SIZES.items() if key != name})
