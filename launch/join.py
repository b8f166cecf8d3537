"""Who started this rank, and how it finds the others.

torchrun, Open MPI's and MPICH's mpirun and srun all say by environment variables which rank a
process is; only torchrun also says where to meet. Whoever it was, afterwards there is one store
that all ranks share and one torch process group, with torchrun's variables set.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from crossdock.dispatch import Topology
from crossdock.dispatch.transports.watch import Process
from crossdock.scratch.errors import ConfigError, RankTimeout

__all__ = ["Launcher", "Membership", "Seat", "check_hosts", "check_world_size", "find_seat", "join"]

Launcher = Literal["torchrun", "Open MPI", "MPICH", "Slurm"]

START_S = 100.0
_SLURM_TASKS = "SLURM_STEP_TASKS_PER_NODE"

_SIZE_FLAGS: dict[Launcher, str] = {
    "torchrun": "--nnodes {nodes} --nproc-per-node {ranks_per_node}",
    "Open MPI": "-n {ranks}",
    "MPICH": "-n {ranks}",
    "Slurm": "--nodes {nodes} --ntasks-per-node {ranks_per_node}",
}
_PLACE_FLAGS: dict[Launcher, str] = {
    "torchrun": "give each node its own --node-rank and the same --nproc-per-node",
    "Open MPI": "start with --map-by slot (not --map-by node)",
    "MPICH": "start with -ppn {ranks_per_node}",
    "Slurm": "start with --distribution=block (not cyclic)",
}


@dataclass(frozen=True, kw_only=True)
class Seat:
    """What a launcher says about the process that it started."""

    launcher: Launcher
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Membership:
    """A rank that has joined the others.

    Attributes:
        seat: Which rank this is.
        store: Shared by all ranks.
        processes: Where each rank runs.
        timeout_s: Seconds that ranks wait for each other.
    """

    seat: Seat
    store: Store
    processes: tuple[Process, ...]
    timeout_s: float

    def gather(self, name: str, value: Any) -> list[Any] | None:
        """Everyone's value (JSON) on rank 0, in rank order; None elsewhere.

        Raises:
            RankTimeout: On rank 0: names the ranks that gave nothing.
        """
        self.store.set(f"{name}/{self.seat.rank}", json.dumps(value))
        if self.seat.rank:
            return None
        return _get_of_all(self.store, name, self.seat.world_size, self.timeout_s)

    def share(self, name: str, value: Any = None) -> Any:
        """Rank 0's value on every rank.

        Raises:
            RankTimeout: Rank 0 gave nothing.
        """
        if self.seat.rank == 0:
            self.store.set(f"{name}/0", json.dumps(value))
        return _get_of_all(self.store, name, 1, self.timeout_s)[0]


def find_seat(environ: Mapping[str, str] = os.environ) -> Seat | None:
    """This process's seat; None if no launcher started it."""
    names: tuple[str, ...]
    # Launchers are nested (mpirun inside a Slurm job, torchrun under srun): innermost first.
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return _seat("torchrun", environ, names)
    if "OMPI_COMM_WORLD_RANK" in environ:
        prefix = "OMPI_COMM_WORLD_"
        names = tuple(prefix + name for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
        return _seat("Open MPI", environ, names)
    in_step = {"SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"} <= environ.keys()
    # srun also answers MPI programs (--mpi=pmi2); under MPICH's mpirun in a Slurm job the Slurm
    # variables are those of its own daemons.
    if "PMI_RANK" in environ and not (
        in_step and environ["SLURM_STEP_NUM_TASKS"] == environ.get("PMI_SIZE")
    ):
        names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
        return _seat("MPICH", environ, names)
    if in_step:
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", _SLURM_TASKS)
        return _seat("Slurm", environ, names)
    return None


def check_world_size(seat: Seat, topology: Topology) -> None:
    """Raises ConfigError if the launcher started another number of ranks than configured."""
    if seat.world_size != topology.world_size:
        flags = _flags(_SIZE_FLAGS, seat, topology)
        raise ConfigError(
            f"{seat.launcher} started {seat.world_size} ranks, but the configuration has nodes "
            f"{topology.nodes} x ranks_per_node {topology.ranks_per_node} = {topology.world_size}: "
            f"start with {flags}, or change cluster and parallel"
        )


def check_hosts(hosts: Sequence[str], seat: Seat, topology: Topology) -> None:
    """Raises ConfigError if ranks that should share a node run on different hosts."""
    per_node = topology.ranks_per_node
    for node in range(topology.nodes):
        ranks = range(node * per_node, (node + 1) * per_node)
        if len({hosts[rank] for rank in ranks}) > 1:
            where = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks)
            raise ConfigError(
                f"node {node} holds the consecutive ranks {ranks[0]} to {ranks[-1]}, but {where}: "
                + _flags(_PLACE_FLAGS, seat, topology)
            )


def join(seat: Seat, topology: Topology, timeout_s: float) -> Membership:
    """Meet the other ranks: store, host names, process group. Collective.

    Raises:
        ConfigError: The launcher placed ranks on nodes in another way than configured, or does not
            say where to meet; says what to do.
        RankTimeout: Names the ranks that did not come.
    """
    _share_cores(seat)
    # That some ranks start later than others says nothing about them.
    start_s = max(timeout_s, START_S)
    store = PrefixStore("crossdock", _open_store(seat, timedelta(seconds=start_s)))
    store.set(f"process/{seat.rank}", json.dumps(astuple(Process.this())))
    fields = _get_of_all(store, "process", seat.world_size, start_s)
    processes = tuple(Process(*values) for values in fields)
    check_hosts([process.host.split()[0] for process in processes], seat, topology)
    dist.init_process_group(
        "gloo",
        store=PrefixStore("group", store),
        rank=seat.rank,
        world_size=seat.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    return Membership(seat=seat, store=store, processes=processes, timeout_s=timeout_s)


def _seat(launcher: Launcher, environ: Mapping[str, str], names: tuple[str, ...]) -> Seat:
    rank, world_size = _number(launcher, environ, names[0]), _number(launcher, environ, names[1])
    # Slurm gives tasks by node, such as 4(x2).
    local_world_size = re.match(r"\d+", environ.get(names[3], ""))
    return Seat(
        launcher=launcher,
        rank=rank,
        world_size=world_size,
        local_rank=_number(launcher, environ, names[2]) if names[2] in environ else 0,
        local_world_size=int(local_world_size[0]) if local_world_size else world_size,
    )


def _number(launcher: Launcher, environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not re.fullmatch(r"\d{1,9}", text):
        raise ConfigError(
            f"{name}={text!r} in the environment is no number, though {launcher} seems to have "
            "started this process: unset it, or start with the launcher"
        )
    return int(text)


def _flags(table: Mapping[Launcher, str], seat: Seat, topology: Topology) -> str:
    return table[seat.launcher].format(
        nodes=topology.nodes, ranks_per_node=topology.ranks_per_node, ranks=topology.world_size
    )


def _share_cores(seat: Seat) -> None:
    """Torchrun sets OMP_NUM_THREADS; elsewhere each rank would take all cores."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // seat.local_world_size))


def _get_of_all(store: Store, name: str, num_ranks: int, timeout_s: float) -> list[Any]:
    missing, values = [], []
    limit = timedelta(seconds=timeout_s)
    for rank in range(num_ranks):
        key = f"{name}/{rank}"
        try:
            store.wait([key], limit)
            values.append(json.loads(store.get(key)))
        except RuntimeError:
            missing.append(rank)
            limit = timedelta(milliseconds=10)  # the others had as much time
    if missing:
        ranks = ", ".join(map(str, missing))
        raise RankTimeout(
            f"no word from rank {ranks} within {timeout_s:g} s (waiting for: {name})",
            ranks=tuple(missing),
        )
    return values


def _open_store(seat: Seat, limit: timedelta) -> Store:
    """The store that all ranks share, and the environment that torchrun would have set."""
    given = {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    if not given and seat.launcher == "Slurm":
        os.environ["MASTER_ADDR"] = first_host(os.environ["SLURM_STEP_NODELIST"])
        os.environ["MASTER_PORT"] = str(20000 + int(os.environ["SLURM_JOB_ID"]) % 20000)
        given = True
    store = _store_at_address(seat, limit) if given else _store_by_mpi(seat, limit)
    os.environ.update(
        RANK=str(seat.rank),
        WORLD_SIZE=str(seat.world_size),
        LOCAL_RANK=str(seat.local_rank),
        LOCAL_WORLD_SIZE=str(seat.local_world_size),
    )
    return store


def _store_at_address(seat: Seat, limit: timedelta) -> Store:
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    serves = seat.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return TCPStore(
            address, int(port), None, is_master=serves, timeout=limit, wait_for_workers=False
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"cannot meet the other ranks at MASTER_ADDR {address}, MASTER_PORT {port}: {reason}"
        ) from error


def _store_by_mpi(seat: Seat, limit: timedelta) -> Store:
    """Rank 0 opens the store at a free port and tells the others over MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"{seat.launcher} does not say where ranks meet, and mpi4py cannot ({error}): "
            "pip install 'crossdock[mpi]', or set MASTER_ADDR (the host of rank 0) and MASTER_PORT "
            "(a free port there) for all ranks"
        ) from None
    comm = MPI.COMM_WORLD
    if comm.Get_size() != seat.world_size:
        raise ConfigError(
            f"{seat.launcher} started {seat.world_size} ranks, but mpi4py sees {comm.Get_size()}: "
            f"it was built for another MPI ({MPI.Get_library_version().split(',')[0]}); use the "
            "mpirun of that MPI, or set MASTER_ADDR and MASTER_PORT"
        )
    hosts = comm.allgather(socket.gethostname())
    address = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
    store = None
    if seat.rank == 0:
        store = TCPStore(address, 0, None, is_master=True, timeout=limit, wait_for_workers=False)
    port = comm.bcast(store.port if store else None)
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
    return store or TCPStore(address, port, None, is_master=False, timeout=limit)


def first_host(nodelist: str) -> str:
    """The first host of Slurm's compressed list: ``gpu[07-12,20],cpu1`` begins with ``gpu07``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    if first is None:
        raise ConfigError(f"SLURM_STEP_NODELIST = {nodelist!r} names no host")
    return re.sub(r"\[([^,\-\]]+)[^\]]*\]", r"\1", first[0])
