from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from typer.testing import CliRunner

from crossdock.launch.hashing import hash64, hidden_states, uniform
from crossdock.launch.routing import SyntheticRouting, TraceRouting
from crossdock.launch.trace import Trace, read_trace, write_trace
from crossdock.launch.trace_cli import app
from crossdock.scratch.errors import ConfigError
from tests.launch.conftest import CONFIGS

E64 = CONFIGS / "traces" / "routing-e64-k8.safetensors"
E256 = CONFIGS / "traces" / "routing-e256-k8.safetensors"


def counting_trace(layers: int, tokens: int) -> Trace:
    """Expert = layer * tokens + token, so that what was read tells where it stood."""
    ids = torch.arange(layers * tokens).view(layers, tokens, 1)
    return Trace(
        topk_idx=ids,
        topk_weights=torch.ones(layers, tokens, 1),
        num_experts=layers * tokens,
        metadata={},
    )


@pytest.mark.parametrize(("path", "experts"), [(E64, 64), (E256, 256)])
def test_shipped_traces_are_valid_and_skewed(path, experts):
    trace = read_trace(path)
    assert (trace.num_layers, trace.num_tokens, trace.top_k) == (6, 8192, 8)
    counts = trace.expert_counts()
    assert counts.shape == (6, experts)
    assert int(counts.sum()) == 6 * 8192 * 8
    assert (counts.max(1).values > 3 * counts.double().mean(1)).all()


@settings(max_examples=30)
@given(
    layers=st.integers(1, 4),
    tokens=st.integers(1, 9),
    first=st.integers(0, 3),
    numbers=st.lists(st.integers(0, 200), max_size=20),
)
def test_a_trace_is_read_in_order_and_each_wrap_moves_to_the_next_layer(
    layers, tokens, first, numbers
):
    source = TraceRouting(counting_trace(layers, tokens), first)
    ids, _ = source.at(torch.tensor(numbers, dtype=torch.int64))
    expected = [
        ((first + number // tokens) % layers) * tokens + number % tokens for number in numbers
    ]
    assert ids.flatten().tolist() == expected


def test_wraps_are_counted():
    source = TraceRouting(counting_trace(2, 10))
    assert [source.num_wraps(n) for n in (0, 1, 10, 11, 20, 21)] == [0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize("exponent", [0.0, 1.1, 3.0])
def test_synthetic_routing_is_distinct_normalised_and_the_same_for_whoever_asks(exponent):
    source = SyntheticRouting(num_experts=40, top_k=8, exponent=exponent, seed=3)
    numbers = torch.arange(1000, 1500)
    ids, weights = source.at(numbers)
    by_id = ids.sort(1).values
    assert ids.min() >= 0
    assert ids.max() < 40
    assert (by_id[:, 1:] > by_id[:, :-1]).all()
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(1), torch.ones(500))
    order = torch.randperm(500)
    again, again_weights = source.at(numbers[order])
    assert torch.equal(again, ids[order])
    assert torch.equal(again_weights, weights[order])


def test_zipf_is_skewed_and_uniform_is_not():
    def busiest(exponent: float) -> float:
        source = SyntheticRouting(num_experts=64, top_k=4, exponent=exponent, seed=0)
        counts = torch.bincount(source.at(torch.arange(4096))[0].flatten(), minlength=64)
        return float(counts.max() / counts.double().mean())

    assert busiest(0.0) < 1.3
    assert busiest(1.2) > 4


def test_all_experts_may_be_chosen():
    ids, _ = SyntheticRouting(num_experts=8, top_k=8, exponent=2.0, seed=0).at(torch.arange(5))
    assert torch.equal(ids.sort(1).values, torch.arange(8).expand(5, 8))


def test_hidden_states_depend_on_number_and_seed_alone():
    numbers = torch.tensor([5, 2**40, 0])
    x = hidden_states(numbers, 129, seed=1, dtype=torch.bfloat16)
    assert x.shape == (3, 129)
    assert torch.equal(x[[2, 0]], hidden_states(numbers[[2, 0]], 129, seed=1, dtype=torch.bfloat16))
    assert not torch.equal(x, hidden_states(numbers, 129, seed=2, dtype=torch.bfloat16))
    many = hidden_states(torch.arange(500), 256, seed=0, dtype=torch.float32)
    assert abs(float(many.mean())) < 0.02
    assert abs(float(many.var()) - 1) < 0.02


def test_hash_is_a_bijection_and_uniform_stays_inside():
    counter = torch.arange(-5000, 5000)
    assert hash64(counter, 0).unique().numel() == 10000
    drawn = uniform(counter, 9)
    assert drawn.min() > 0
    assert drawn.max() < 1


@pytest.mark.parametrize(
    ("ids", "weights", "expected"),
    [
        ([[[0, 0]]], [[[1.0, 1.0]]], "twice in one token"),
        ([[[0, 5]]], [[[1.0, 1.0]]], "expert 5 not one of 5"),
        ([[[0, -2]]], [[[1.0, 1.0]]], "expert -2"),
        ([[[0, 1]]], [[[1.0, float("nan")]]], "not finite"),
        ([[0, 1]], [[1.0, 1.0]], "[layers, tokens, top_k]"),
        ([[[0, 1]]], [[[1.0]]], "[layers, tokens, top_k]"),
        ([[[0, 1]]], [[[1, 1]]], "integers and floats"),
    ],
)
def test_a_trace_that_cannot_be_dispatched_is_refused(ids, weights, expected):
    with pytest.raises(ConfigError) as caught:
        Trace(
            topk_idx=torch.tensor(ids),
            topk_weights=torch.tensor(weights),
            num_experts=5,
            metadata={},
        )
    assert expected in str(caught.value)


def test_no_expert_may_stand_twice_and_have_any_weight(tmp_path):
    trace = Trace(
        topk_idx=torch.tensor([[[-1, 3, -1]]]),
        topk_weights=torch.tensor([[[float("nan"), 1.0, 0.0]]]),
        num_experts=300,
        metadata={"source": "here"},
    )
    write_trace(trace, tmp_path / "t.safetensors")
    again = read_trace(tmp_path / "t.safetensors")
    assert again.topk_idx.tolist() == [[[-1, 3, -1]]]
    assert again.num_experts == 300
    assert again.metadata["source"] == "here"
    assert again.expert_counts()[0, 3] == 1
    assert again.expert_counts().sum() == 1


@pytest.mark.parametrize("kind", ["npz", "pt"])
def test_convert_reads_the_arrays_of_others(tmp_path, kind):
    ids = np.array([[3, 1], [0, 2]], dtype=np.int64)
    weights = np.array([[0.6, 0.4], [0.5, 0.5]])
    source, out = tmp_path / f"mine.{kind}", tmp_path / "t.safetensors"
    if kind == "npz":
        np.savez(source, ids=ids, topk_weights=weights)
    else:
        torch.save(
            {"ids": torch.from_numpy(ids), "topk_weights": torch.from_numpy(weights)}, source
        )
    result = CliRunner().invoke(
        app, ["convert", str(source), str(out), "--num-experts", "4", "--idx-key", "ids"]
    )
    assert result.exit_code == 0, result.output
    trace = read_trace(out)
    assert trace.topk_idx.tolist() == [ids.tolist()]
    assert trace.topk_idx.dtype == torch.uint8
    assert trace.topk_weights.dtype == torch.float32


def test_convert_says_what_a_file_lacks(tmp_path):
    np.savez(tmp_path / "mine.npz", a=np.zeros(2))
    arguments = ["convert", str(tmp_path / "mine.npz"), "out", "--num-experts", "4"]
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, ConfigError)
    assert "no topk_idx and no topk_weights; it has a" in str(error)


def test_slice_keeps_what_was_asked(tmp_path):
    out = tmp_path / "part.safetensors"
    arguments = ["slice", str(E64), str(out), "--layers", "1:3", "--tokens", ":100"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert torch.equal(read_trace(out).topk_idx, read_trace(E64).topk_idx[1:3, :100])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--layers", "9:"], "layers 0 to 5 and tokens 0 to 8191"),
        (["--tokens", "5:3"], "nothing is left"),
        (["--tokens", "5"], "write it as A:B"),
        (["--tokens", f"{'1' * 5000}:"], "write it as A:B"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_slice_that_cannot_be_cut_is_refused_in_one_short_line(tmp_path, arguments, expected):
    arguments = ["slice", str(E64), str(tmp_path / "x"), *arguments]
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, ConfigError)
    assert expected in str(error)
    assert len(str(error)) < 300


@pytest.mark.parametrize("name", ["no/such/x", "", "x" * 5000], ids=["parent", "folder", "long"])
def test_a_slice_that_cannot_be_written_is_refused(tmp_path, name):
    arguments = ["slice", str(E64), f"{tmp_path}/{name}", "--tokens", ":10"]
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, ConfigError)
    assert "cannot be written" in str(error)


@pytest.mark.parametrize("name", ["nowhere", "", "x" * 5000], ids=["none", "folder", "long"])
def test_a_trace_that_is_not_there_is_refused(tmp_path, name):
    error = CliRunner().invoke(app, ["show", f"{tmp_path}/{name}"]).exception
    assert isinstance(error, ConfigError)
    assert "no such file" in str(error)


@pytest.mark.parametrize("num_experts", ["", "many", "\u0663", "1" * 5000], ids=lambda n: n[:4])
def test_a_trace_must_say_its_number_of_experts(tmp_path, num_experts):
    path = tmp_path / "t.safetensors"
    tensors = {
        "topk_idx": torch.zeros(1, 1, 1, dtype=torch.uint8),
        "topk_weights": torch.ones(1, 1, 1),
    }
    save_file(tensors, path, metadata={"num_experts": num_experts})
    with pytest.raises(ConfigError, match="has no num_experts"):
        read_trace(path)


def test_show_tells_the_skew():
    result = CliRunner().invoke(app, ["show", str(E64), "--ep", "4"])
    assert result.exit_code == 0, result.output
    assert "busiest expert / mean" in result.output
    assert "EP 4" in result.output
