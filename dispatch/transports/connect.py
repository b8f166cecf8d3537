"""Choosing and making a transport."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from crossdock.dispatch.transports.base import DEFAULT_TIMEOUT_S, Transport
from crossdock.dispatch.transports.mpi import MpiTransport
from crossdock.dispatch.transports.process_group import ProcessGroupTransport
from crossdock.dispatch.transports.shm import ShmTransport
from crossdock.scratch.errors import ConfigError

__all__ = ["TRANSPORTS", "connect"]

TRANSPORTS = ("auto", "gloo", "nccl", "mpi", "shm")


def connect(
    name: str = "auto",
    group: Any = None,
    device: str | torch.device | None = None,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Transport:
    """Join this rank to the others. Collective.

    Args:
        name: ``"gloo"`` (CPU), ``"nccl"`` (CUDA), ``"mpi"`` (either), ``"shm"`` (CPU, one node), or
            ``"auto"``: NCCL where this rank's device is a GPU, gloo elsewhere.
        group: Ranks that form the EP group. A torch process group; by default the default group,
            which is made from the launcher's environment if nobody has. For ``"mpi"``, and for
            ``"shm"`` if it shall do without torch's process groups: an mpi4py communicator, for
            ``"mpi"`` by default COMM_WORLD.
        device: Where rows live. By default this rank's GPU (LOCAL_RANK) for NCCL, and for
            ``"auto"`` where there is one; else the CPU.
        timeout_s: Seconds after which a rank that does not answer is a RankTimeout.

    Raises:
        ConfigError: An unknown name, or a device that the transport cannot use.
        TransportUnavailable: What the transport needs is not here; says what to get.
    """
    if name not in TRANSPORTS:
        raise ConfigError(f"transport {name!r}: one of {', '.join(TRANSPORTS)}")
    if device is None:
        on_gpu = name == "nccl" or (name == "auto" and torch.cuda.is_available())
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if on_gpu else "cpu"
    device = torch.device(device)
    if name == "auto":
        name = "nccl" if device.type == "cuda" else "gloo"
    if name == "mpi":
        return MpiTransport(group, device=device, timeout_s=timeout_s)
    if name == "shm":
        return _connect_shm(group, device, timeout_s)
    return ProcessGroupTransport(name, group=group, device=device, timeout_s=timeout_s)


def _connect_shm(group: Any, device: torch.device, timeout_s: float) -> Transport:
    if device.type != "cpu":
        raise ConfigError(f"shm joins ranks on CPUs; device is {device}: use nccl, or cpu")
    meeting: Transport
    if group is None or isinstance(group, dist.ProcessGroup):
        meeting = ProcessGroupTransport("gloo", group=group, device=device, timeout_s=timeout_s)
    else:
        meeting = MpiTransport(group, device=device, timeout_s=timeout_s)
    try:
        return ShmTransport(meeting, timeout_s=timeout_s)
    finally:
        meeting.close()
