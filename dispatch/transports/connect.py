"""Choosing and making a transport."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from crossdock.dispatch.config import check_timeout
from crossdock.dispatch.nvshmem.heap import parse_size
from crossdock.dispatch.transports.base import DEFAULT_TIMEOUT_S, Transport
from crossdock.dispatch.transports.gpu_choice import choose, find_ranks
from crossdock.dispatch.transports.hierarchical import (
    HierarchicalTransport,
    find_nodes,
    node_blocks,
)
from crossdock.dispatch.transports.mpi import MpiTransport
from crossdock.dispatch.transports.mpi_library import load_mpi
from crossdock.dispatch.transports.nvshmem import NvshmemTransport
from crossdock.dispatch.transports.process_group import ProcessGroupTransport
from crossdock.dispatch.transports.shm import ShmTransport
from crossdock.scratch.errors import ConfigError, TransportUnavailable

__all__ = ["TRANSPORTS", "connect"]

logger = logging.getLogger(__name__)

TRANSPORTS = ("auto", "gloo", "nccl", "mpi", "shm", "nvshmem", "hierarchical")


def connect(
    name: str = "auto",
    group: Any = None,
    device: str | torch.device | None = None,
    *,
    inner: str = "auto",
    outer: str = "auto",
    ranks_per_node: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    symmetric_heap: int | str | None = None,
) -> Transport:
    """Join this rank to the others. Collective.

    Args:
        name: ``"gloo"`` (CPU), ``"nccl"`` (CUDA), ``"mpi"`` (either), ``"shm"`` (CPU, one node), or
            ``"nvshmem"`` (CUDA; by address where there is one, else by NVSHMEM's puts),
            ``"hierarchical"`` (two of them: each token once to every node), or ``"auto"``. On GPUs
            that is NVSHMEM where all ranks have it, share a node and reach each other's memory,
            else NCCL; which and why is logged on rank 0. On CPUs it is gloo, or hierarchical where
            ranks are on several hosts, as many on each.
        group: Ranks that form the EP group. A torch process group; by default the default group,
            which is made from the launcher's environment if nobody has. For ``"mpi"``, and for
            ``"shm"`` and ``"nvshmem"`` if they shall do without torch's process groups: an mpi4py
            communicator, for ``"mpi"`` by default COMM_WORLD.
        device: Where rows live. By default this rank's GPU (LOCAL_RANK) for NCCL and NVSHMEM, and
            for ``"auto"`` where there is one; else the CPU.
        inner: For ``"hierarchical"``, the transport within a node. ``"auto"``: NCCL on GPUs,
            shared memory on CPUs, or gloo where that cannot be had.
        outer: For ``"hierarchical"``, the one across nodes: ``"gloo"``, ``"nccl"`` or ``"mpi"``.
            ``"auto"``: NCCL on GPUs, else gloo, or MPI for a communicator of mpi4py.
        ranks_per_node: For ``"hierarchical"``, ranks of a node; by default those of a host.
        timeout_s: Seconds after which a rank that does not answer is a RankTimeout.
        symmetric_heap: For ``"nvshmem"``, also as ``inner``: bytes that NVSHMEM takes at once for
            its heap, or a size such as ``"8GiB"``; buckets of all dispatchers must fit. By default
            the heap grows with them.

    Raises:
        ConfigError: An unknown name, a device that the transport cannot use, or a ``timeout_s`` or
            ``symmetric_heap`` out of its range.
        TransportUnavailable: What the transport needs is not here; says what to get.
    """
    if name not in TRANSPORTS:
        raise ConfigError(f"transport {name!r}: one of {', '.join(TRANSPORTS)}")
    check_timeout(timeout_s)
    heap = _heap_for(name, inner, symmetric_heap)
    if device is None:
        on_gpu = name in ("nccl", "nvshmem") or (name == "auto" and torch.cuda.is_available())
        device = _own_gpu() if on_gpu else "cpu"
    device = torch.device(device)
    is_torch = group is None or isinstance(group, dist.ProcessGroup)
    if name in ("gloo", "nccl") and not is_torch:
        raise ConfigError(f"{name} takes a torch process group; group is {type(group).__name__}")
    if name == "mpi" and group is not None and is_torch:
        raise ConfigError("mpi takes an mpi4py communicator; group is a torch process group")
    join = _Join(
        group=group if is_torch else None,
        comm=None if is_torch else group,
        device=device,
        timeout_s=timeout_s,
        symmetric_heap=heap,
    )
    if name == "hierarchical":
        return _connect_levels(join, inner, outer, ranks_per_node)
    if name == "auto":
        return _connect_auto(join)
    return join.over(name)


@dataclass(frozen=True, kw_only=True)
class _Join:
    """What all transports of one call have in common.

    Attributes:
        group: torch's process group, None for the default group.
        comm: mpi4py's communicator, through which ranks meet if it is given.
        device: Where rows live.
        timeout_s: Of every transport.
        symmetric_heap: Bytes of NVSHMEM's heap; None for one that grows.
    """

    group: dist.ProcessGroup | None
    comm: Any
    device: torch.device
    timeout_s: float
    symmetric_heap: int | None

    @property
    def default(self) -> str:
        """What joins all ranks where nothing was asked for."""
        if self.device.type == "cuda":
            return "nccl"
        return "mpi" if self.comm is not None else "gloo"

    def over(self, name: str, blocks: list[list[int]] | None = None) -> Transport:
        """A transport over the group, or over the block of it that holds this rank."""
        if name == "mpi":
            return self._mpi(self.device, blocks)
        if name == "shm":
            return self._shm(blocks)
        if name == "nvshmem":
            return self.nvshmem(blocks)
        return ProcessGroupTransport(
            name, group=self.group, device=self.device, timeout_s=self.timeout_s, blocks=blocks
        )

    def _mpi(self, device: torch.device, blocks: list[list[int]] | None) -> MpiTransport:
        comm = self.comm
        if blocks is not None:
            rank = comm.Get_rank()
            comm = comm.Split(next(i for i, block in enumerate(blocks) if rank in block), rank)
        return MpiTransport(comm, device=device, timeout_s=self.timeout_s)

    def _meeting(self, blocks: list[list[int]] | None) -> Transport:
        """A transport of CPUs, torch's or MPI's."""
        cpu = torch.device("cpu")
        if self.comm is not None:
            return self._mpi(cpu, blocks)
        return ProcessGroupTransport(
            "gloo", group=self.group, device=cpu, timeout_s=self.timeout_s, blocks=blocks
        )

    def _shm(self, blocks: list[list[int]] | None) -> Transport:
        if self.device.type != "cpu":
            raise ConfigError(f"shm joins ranks on CPUs; device is {self.device}: use nccl, or cpu")
        meeting = self._meeting(blocks)
        try:
            return ShmTransport(meeting, timeout_s=self.timeout_s)
        finally:
            meeting.close()

    def nvshmem(
        self, blocks: list[list[int]] | None = None, host: Transport | None = None
    ) -> Transport:
        """GPUs whose ranks meet over ``host``, or over a transport of their own."""
        if self.device.type != "cuda":
            raise ConfigError(
                f"nvshmem joins GPUs; device is {self.device}: use shm, gloo, or cuda"
            )
        if not torch.cuda.is_available():
            raise TransportUnavailable(
                "nvshmem needs a CUDA GPU, and torch sees none here: use gloo"
            )
        host = host or self._meeting(blocks)
        try:
            meeting, host = host, ShmTransport(host, timeout_s=self.timeout_s)
            meeting.close()
        except TransportUnavailable:  # ranks of several hosts
            logger.info("records travel over %s", host.name)
        return NvshmemTransport(host, self.device, self.symmetric_heap)


def _own_gpu() -> torch.device:
    # A process may see fewer GPUs than its host has ranks: its own only (srun), or a shared one.
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", local_rank % max(1, torch.cuda.device_count()))


def _heap_for(name: str, inner: str, symmetric_heap: int | str | None) -> int | None:
    if symmetric_heap is None:
        return None
    if name != "nvshmem" and (name, inner) != ("hierarchical", "nvshmem"):
        raise ConfigError(
            f"symmetric_heap = {symmetric_heap!r} is for transport nvshmem, not {name}: name that "
            "transport, or leave the heap out"
        )
    try:
        return parse_size(symmetric_heap)
    except ConfigError as error:
        raise ConfigError(f"symmetric_heap = {symmetric_heap!r}: {error}") from None


def _connect_auto(join: _Join) -> Transport:
    flat = join.over(join.default)
    assert isinstance(flat, ProcessGroupTransport | MpiTransport)
    if join.device.type == "cuda":
        return _connect_gpus(join, flat)
    nodes = find_nodes(flat)
    if len(nodes) in (1, flat.world_size):
        return flat
    try:
        blocks = node_blocks(nodes, None)
    except ConfigError as error:
        logger.info("flat transport %s: %s", flat.name, error)
        return flat
    return _levels(join, flat, blocks, inner="auto", outer=join.default)


def _connect_gpus(join: _Join, flat: Transport) -> Transport:
    """NVSHMEM if all ranks can have it, else the flat transport."""
    # Two levels have not been tried on GPUs of several hosts: there they must be asked for.
    choice = choose(find_ranks(flat, flat.device))
    if flat.rank == 0:
        logger.info("auto takes %s: %s", choice.name, choice.reason)
    return join.nvshmem(host=flat) if choice.name == "nvshmem" else flat


def _connect_levels(
    join: _Join, inner: str, outer: str, ranks_per_node: int | None
) -> HierarchicalTransport:
    if inner not in ("auto", "gloo", "nccl", "mpi", "shm", "nvshmem"):
        raise ConfigError(f"inner = {inner!r}: auto, gloo, nccl, mpi, shm or nvshmem")
    if outer not in ("auto", "gloo", "nccl", "mpi"):
        raise ConfigError(f"outer = {outer!r}: auto, gloo, nccl or mpi")
    outer = join.default if outer == "auto" else outer
    if "mpi" in (inner, outer) and join.comm is None:
        join = replace(join, comm=load_mpi().COMM_WORLD)
    flat = join.over(outer)
    assert isinstance(flat, ProcessGroupTransport | MpiTransport)
    blocks = node_blocks(find_nodes(flat), ranks_per_node)
    return _levels(join, flat, blocks, inner=inner, outer=outer)


def _levels(
    join: _Join,
    flat: ProcessGroupTransport | MpiTransport,
    blocks: list[list[int]],
    *,
    inner: str,
    outer: str,
) -> HierarchicalTransport:
    """Both levels under a flat transport over all ranks; ``blocks`` are the nodes."""
    within: Transport | None = None
    if inner == "auto":
        inner = join.default
        if join.device.type == "cpu":
            within = _shm_everywhere(join, flat, blocks)
    if within is None:
        within = join.over(inner, blocks)
    across = join.over(outer, [list(ranks) for ranks in zip(*blocks, strict=True)])
    return HierarchicalTransport(flat, within, across, timeout_s=join.timeout_s)


def _shm_everywhere(join: _Join, flat: Transport, blocks: list[list[int]]) -> Transport | None:
    """Shared memory within each node, if every node can have it."""
    within = None
    try:
        within = join.over("shm", blocks)
    except TransportUnavailable as error:
        logger.info("no shared memory within the node: %s", error)
    if bool((flat.exchange(torch.tensor([int(within is not None)])) == 1).all()):
        return within
    if within is not None:
        within.close()
    return None
