"""What ``connect("auto")`` takes on GPUs: a function of the facts that all ranks know."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from crossdock.dispatch import run_local
from crossdock.dispatch.nvshmem.layout import MAX_RANKS
from crossdock.dispatch.transports import connect as connect_module
from crossdock.dispatch.transports import gpu_choice
from crossdock.dispatch.transports.base import Transport
from crossdock.dispatch.transports.gpu_choice import Choice, GpuRank, Lack, choose, find_ranks
from crossdock.scratch.errors import TransportUnavailable


def one_node(world_size: int) -> list[GpuRank]:
    """A rank on each GPU of a node where everything is as it should be."""
    reaches = (True,) * world_size
    return [
        GpuRank(host=1, gpu=100 + rank, lack=Lack.NOTHING, mps=False, reaches=reaches)
        for rank in range(world_size)
    ]


def changed(ranks: Sequence[GpuRank], rank: int, **facts: object) -> list[GpuRank]:
    return [replace(r, **facts) if i == rank else r for i, r in enumerate(ranks)]


def shared_gpu(ranks: Sequence[GpuRank], *, mps: bool) -> list[GpuRank]:
    return [replace(rank, gpu=100, mps=mps) for rank in ranks]


@pytest.mark.parametrize(
    "ranks", [one_node(2), one_node(8), shared_gpu(one_node(4), mps=True)], ids=["2", "8", "MPS"]
)
def test_nvshmem_where_all_reach_each_other(ranks):
    assert choose(ranks).name == "nvshmem"
    assert f"all {len(ranks)} ranks" in choose(ranks).reason


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        (one_node(1), "nobody to reach"),
        (changed(one_node(4), 3, lack=Lack.BINDINGS), "rank 3 has no nvshmem4py"),
        (changed(one_node(4), 2, lack=Lack.LIBRARY), "rank 2 cannot load the NVSHMEM library"),
        (changed(one_node(4), 1, host=2), "on 2 hosts"),
        (one_node(MAX_RANKS + 1), f"at most {MAX_RANKS}"),
        (shared_gpu(one_node(2), mps=False), "rank 0 shares its GPU with rank 1, and without MPS"),
        (changed(one_node(3), 2, gpu=100), "rank 0 shares its GPU with rank 2"),
        (
            changed(shared_gpu(one_node(2), mps=True), 1, mps=False),
            "rank 1 shares its GPU with rank 0",
        ),
        (
            changed(one_node(3), 1, reaches=(True, True, False)),
            "GPU of rank 1 has no access to the memory of rank 2's",
        ),
    ],
)
def test_nccl_where_one_rank_or_pair_cannot(ranks, reason):
    choice = choose(ranks)
    assert choice.name == "nccl"
    assert reason in choice.reason


def test_what_a_rank_cannot_reach_on_its_own_does_not_matter():
    """Some drivers say that a GPU is no peer of itself."""
    ranks = [
        replace(rank, reaches=tuple(peer != index for peer in range(3)))
        for index, rank in enumerate(one_node(3))
    ]
    assert choose(ranks).name == "nvshmem"


@pytest.fixture
def four_gpus(monkeypatch, tmp_path):
    """A node of GPUs 0 to 3, of which 3 reaches nobody."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(
        torch.cuda, "can_device_access_peer", lambda a, b: a != b and 3 not in (a, b)
    )
    monkeypatch.setattr(gpu_choice, "gpu_number", lambda device: 100 + device.index)
    monkeypatch.setattr(gpu_choice, "_find_lack", lambda: Lack.NOTHING)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))  # where nothing runs


def facts(transport: Transport, gpus: Sequence[int]) -> list[GpuRank]:
    return find_ranks(transport, torch.device("cuda", gpus[transport.rank]))


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("gpus", "name"), [([0, 1, 2], "nvshmem"), ([2, 1, 3], "nccl"), ([1, 1], "nccl"), ([3], "nccl")]
)
def test_all_ranks_know_the_same_and_choose_alike(gpus, name):
    known = run_local(len(gpus), lambda transport: facts(transport, gpus))
    assert all(ranks == known[0] for ranks in known)
    assert [rank.gpu - 100 for rank in known[0]] == gpus
    assert choose(known[0]).name == name


@pytest.mark.usefixtures("four_gpus")
def test_one_rank_without_nvshmem_decides_for_all(monkeypatch):
    lacks = iter([Lack.NOTHING, Lack.BINDINGS, Lack.NOTHING])
    monkeypatch.setattr(gpu_choice, "_find_lack", lambda: next(lacks))
    known = run_local(3, lambda transport: facts(transport, [0, 1, 2]))
    choices = {choose(ranks) for ranks in known}
    assert len(choices) == 1
    assert "has no nvshmem4py" in choices.pop().reason


@pytest.mark.usefixtures("four_gpus")
def test_mps_that_runs_lets_ranks_share_a_gpu(tmp_path):
    (tmp_path / "control").touch()
    known = run_local(2, lambda transport: facts(transport, [1, 1]))
    assert choose(known[0]).name == "nvshmem"


def test_what_is_lacking_is_found(monkeypatch):
    monkeypatch.setattr(gpu_choice.importlib.util, "find_spec", lambda name: None)
    assert gpu_choice._find_lack() == Lack.BINDINGS
    monkeypatch.setattr(gpu_choice.importlib.util, "find_spec", lambda name: "here")

    def no_library() -> None:
        raise TransportUnavailable("no libnvshmem_host.so.3")

    monkeypatch.setattr(gpu_choice, "import_bindings", no_library)
    assert gpu_choice._find_lack() == Lack.LIBRARY
    monkeypatch.setattr(gpu_choice, "import_bindings", lambda: None)
    assert gpu_choice._find_lack() == Lack.NOTHING


class Join:
    """Stands for the arguments of ``connect``."""

    def nvshmem(self, *, host: Transport) -> tuple[str, Transport]:
        return "nvshmem over", host


@pytest.mark.parametrize("name", ["nccl", "nvshmem"])
def test_the_reason_is_logged_once_and_the_choice_is_taken(monkeypatch, caplog, name):
    choice = Choice(name=name, reason="because")
    monkeypatch.setattr(connect_module, "find_ranks", lambda transport, device: [])
    monkeypatch.setattr(connect_module, "choose", lambda ranks: choice)
    caplog.set_level(logging.INFO)

    def take(transport: Transport) -> bool:
        taken = connect_module._connect_gpus(Join(), transport)
        return taken == (transport if name == "nccl" else ("nvshmem over", transport))

    assert all(run_local(3, take))
    assert caplog.messages == [f"auto takes {name}: because"]
