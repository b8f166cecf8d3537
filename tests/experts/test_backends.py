import logging

import pytest
import torch

from crossdock.experts import ExpertWeights, make_experts
from crossdock.scratch import WorkspaceManager
from crossdock.scratch.errors import ConfigError


def make(backend, weight_format="plain", **options):
    weights = ExpertWeights.random([0], hidden=16, intermediate=8, format=weight_format)
    return make_experts(backend, weights, workspace=WorkspaceManager("cpu"), **options)


def test_auto_takes_torch_for_plain_weights_and_says_why(caplog):
    with caplog.at_level(logging.INFO, logger="crossdock.experts.backends"):
        experts = make("auto")
    assert experts.name == "torch"
    assert "plain torch.bfloat16" in experts.reason
    assert experts.reason in caplog.text


@pytest.mark.parametrize(
    ("backend", "weight_format", "options", "message"),
    [
        ("auto", "fp8_block", {}, "fp8_block weights need a CUDA GPU"),
        ("auto", "fp8_channel", {}, "fp8_channel weights need a CUDA GPU"),
        ("cutlass_fp8", "plain", {}, "needs a CUDA GPU of SM 9.0"),
        ("cutlass_fp8", "fp8_block", {}, "humming"),
        ("cutlass_fp8", "fp8_channel", {"activations": "fp8_block"}, "fp8_token"),
        ("humming", "plain", {}, "ExpertWeights.format"),
        ("humming", "mxfp4", {}, "need a CUDA GPU"),
        ("torch", "fp8_channel", {}, 'format "plain"'),
        ("torch", "plain", {"activations": "fp8_token"}, "plain activations"),
        ("torch", "plain", {"activations": "fp4"}, "SM 10.0"),
        ("cutlas", "plain", {}, '"cutlass_fp8"'),
    ],
)
def test_what_cannot_work_is_refused_at_construction_with_the_reason(
    backend, weight_format, options, message
):
    with pytest.raises(ConfigError, match=message):
        make(backend, weight_format, **options)


@pytest.mark.parametrize(
    ("capability", "activations", "message"),
    [
        ((8, 0), None, "fp8_token activations need SM 8.9"),
        ((7, 5), "plain", "plain activations need SM 8.0"),
        ((9, 0), None, r"pip install 'crossdock\[humming\]'"),
    ],
)
def test_humming_says_what_the_gpu_or_the_installation_lacks(
    monkeypatch, capability, activations, message
):
    from crossdock.experts.humming_gemm import check_humming

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=message):
        check_humming("mxfp4", activations, torch.device("cuda:0"))


def test_auto_takes_cutlass_for_fp8_channels_where_torch_has_the_kernel(monkeypatch):
    from crossdock.experts import backends

    class OnGpu:
        format = "fp8_channel"
        device = torch.device("cuda:0")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert backends._choose(OnGpu())[0] == "cutlass_fp8"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    backend, reason = backends._choose(OnGpu())
    assert backend == "humming"
    assert "SM 8.9" in reason


def test_fp4_activations_are_refused_before_sm_10(monkeypatch):
    from crossdock.experts import backends

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert "need SM 10.0" in backends._why_not_fp4(torch.device("cuda:0"))


def test_weights_and_workspace_on_different_devices_are_refused():
    weights = ExpertWeights.random([0], hidden=16, intermediate=8, device="meta")
    with pytest.raises(ConfigError, match="workspace on cpu"):
        make_experts("torch", weights, workspace=WorkspaceManager("cpu"))
