"""What moves rows between GPUs where nobody asked for a transport, and why.

Every rank learns the same facts about all ranks, and :func:`choose` is a function of them alone, so
all ranks come to the same choice.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Literal

import torch

from crossdock.dispatch.digest import digest_of
from crossdock.dispatch.nvshmem.layout import MAX_RANKS
from crossdock.dispatch.nvshmem.runtime import gpu_number, import_bindings
from crossdock.dispatch.transports.base import Transport
from crossdock.scratch.errors import TransportUnavailable

__all__ = [
    "Choice",
    "GpuRank",
    "Lack",
    "choose",
    "find_mps",
    "find_ranks",
    "ranks_of_this_machine",
]

_MPS_FOLDER = "CUDA_MPS_PIPE_DIRECTORY"
_MPS_DEFAULT = "/tmp/nvidia-mps"


class Lack(IntEnum):
    """What a rank lacks for NVSHMEM."""

    NOTHING = 0
    BINDINGS = 1
    LIBRARY = 2


_LACKS = {
    Lack.BINDINGS: "has no nvshmem4py (crossdock[cu13] or [cu12])",
    Lack.LIBRARY: "cannot load the NVSHMEM library (nvidia-nvshmem-cu13 or -cu12)",
}


@dataclass(frozen=True, kw_only=True)
class GpuRank:
    """What decides about one rank.

    Attributes:
        host: Number of its host.
        gpu: Number of its GPU, the same in every process that uses this GPU.
        lack: What it lacks for NVSHMEM.
        mps: Its kernels may run while those of other processes run on the same GPU.
        reaches: [R] whether its GPU can load from and store to the memory of each rank's GPU.
    """

    host: int
    gpu: int
    lack: Lack
    mps: bool
    reaches: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A transport, and the reason in plain words."""

    name: Literal["nccl", "nvshmem"]
    reason: str


def choose(ranks: Sequence[GpuRank]) -> Choice:
    """NVSHMEM where all ranks share a node and reach each other's memory, else NCCL.

    Args:
        ranks: Facts of all ranks, in rank order.
    """
    against = _against_nvshmem(ranks)
    if against is not None:
        return Choice(name="nccl", reason=against)
    return Choice(name="nvshmem", reason=f"all {len(ranks)} ranks reach each other's memory")


def _against_nvshmem(ranks: Sequence[GpuRank]) -> str | None:
    if len(ranks) == 1:
        return "one rank has nobody to reach"
    hosts = len({rank.host for rank in ranks})
    if hosts > 1:
        return f"the ranks are on {hosts} hosts"
    if len(ranks) > MAX_RANKS:
        return f"nvshmem joins at most {MAX_RANKS} ranks, not {len(ranks)}"
    for index, rank in enumerate(ranks):
        if rank.lack:
            return f"rank {index} {_LACKS[rank.lack]}"
    for index, rank in enumerate(ranks):
        for peer in range(len(ranks)):
            if peer == index:
                continue
            if rank.gpu == ranks[peer].gpu and not rank.mps:
                return (
                    f"rank {index} shares its GPU with rank {peer}, and without MPS (none runs in "
                    f"{_MPS_FOLDER}, by default {_MPS_DEFAULT}) they would take turns"
                )
            if not rank.reaches[peer]:
                return f"the GPU of rank {index} has no access to the memory of rank {peer}'s"
    return None


def find_ranks(transport: Transport, device: torch.device) -> list[GpuRank]:
    """The facts about all ranks. Collective.

    Args:
        transport: Joins the ranks.
        device: This rank's GPU.
    """
    facts = [_host_number(), gpu_number(device), _find_lack(), int(find_mps() is not None)]
    said = transport.exchange(torch.tensor(facts)).tolist()
    visible = _reachable(device)
    row = torch.tensor([int(gpu in visible) for _, gpu, _, _ in said])
    reaches = transport.exchange(row).bool().tolist()
    return [
        GpuRank(host=host, gpu=gpu, lack=Lack(lack), mps=bool(mps), reaches=tuple(reaches[rank]))
        for rank, (host, gpu, lack, mps) in enumerate(said)
    ]


def ranks_of_this_machine() -> list[GpuRank]:
    """The facts as they would be with one rank on each GPU that this process sees."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    host, lack, mps = _host_number(), _find_lack(), find_mps() is not None
    numbers = [gpu_number(device) for device in devices]
    ranks = []
    for device, number in zip(devices, numbers, strict=True):
        visible = _reachable(device)
        reaches = tuple(other in visible for other in numbers)
        ranks.append(GpuRank(host=host, gpu=number, lack=lack, mps=mps, reaches=reaches))
    return ranks


def _reachable(device: torch.device) -> set[int]:
    """Numbers of the GPUs whose memory this one can reach: of those that this process sees."""
    index = device.index
    return {
        gpu_number(torch.device("cuda", peer))
        for peer in range(torch.cuda.device_count())
        if peer == index or torch.cuda.can_device_access_peer(index, peer)
    }


def _find_lack() -> Lack:
    if importlib.util.find_spec("nvshmem") is None:
        return Lack.BINDINGS
    try:
        import_bindings()
    except TransportUnavailable:
        return Lack.LIBRARY
    return Lack.NOTHING


def find_mps() -> Path | None:
    """The folder in which CUDA's multi-process service listens to this process, if it does."""
    folder = Path(os.environ.get(_MPS_FOLDER, _MPS_DEFAULT))
    return folder if (folder / "control").exists() else None


def _host_number() -> int:
    return digest_of(socket.gethostname().encode())
