"""What ``connect`` refuses before any rank is asked."""

from __future__ import annotations

import pytest
import torch

from crossdock.dispatch import connect
from crossdock.dispatch.transports import connect as connect_module
from crossdock.scratch.errors import ConfigError


@pytest.mark.parametrize("timeout_s", [0, 0.1, 0.49, -1, 1e6, float("nan"), True, "5", None])
def test_a_timeout_that_ranks_cannot_keep_is_refused(timeout_s):
    with pytest.raises(ConfigError, match=r"timeout_s = .* at least 0.5"):
        connect("gloo", timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("name", "inner"),
    [("auto", "auto"), ("gloo", "auto"), ("nccl", "nvshmem"), ("hierarchical", "shm")],
)
def test_a_heap_without_nvshmem_is_refused(name, inner):
    with pytest.raises(ConfigError, match="symmetric_heap = '8GiB' is for transport nvshmem"):
        connect(name, inner=inner, symmetric_heap="8GiB")


@pytest.mark.parametrize(("name", "inner"), [("nvshmem", "auto"), ("hierarchical", "nvshmem")])
def test_a_heap_of_no_size_is_refused(name, inner):
    with pytest.raises(ConfigError, match=r"symmetric_heap = '8GB': .* such as 8GiB"):
        connect(name, inner=inner, symmetric_heap="8GB")


@pytest.mark.parametrize(
    ("local_rank", "num_gpus", "index"), [("3", 8, 3), ("3", 1, 0), ("5", 4, 1), (None, 2, 0)]
)
def test_a_rank_takes_its_own_gpu_of_those_it_sees(monkeypatch, local_rank, num_gpus, index):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert connect_module._own_gpu() == torch.device("cuda", index)
