"""What a rank's process does before any test code runs in it."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, get_context
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from crossdock.dispatch import connect
from crossdock.dispatch.transports.base import Transport

PR_SET_PDEATHSIG = 1  # linux/prctl.h
GROUP_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where a rank sits: all that its process must know to join the others.

    ``hosts_store`` says who serves the rendezvous: this rank (rank 0 under mpirun), or a process
    that outlives the ranks (the agent under torchrun; here the parent).
    """

    rank: int
    world_size: int
    port: int
    folder: Path
    hosts_store: bool = False
    kind: Literal["gloo", "nccl"] = "gloo"

    @property
    def log(self) -> Path:
        return self.folder / f"rank{self.rank}.log"

    @property
    def stacks(self) -> Path:
        return self.folder / f"rank{self.rank}.stacks"

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.rank) if self.kind == "nccl" else torch.device("cpu")


def process_context() -> BaseContext:
    """Processes forked from a clean server that has imported torch, so that a rank starts at once.

    The server never starts a thread or a GPU context, and ends with the test run.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "pytest", "hypothesis"])
    return context


def take_seat(seat: Seat) -> None:
    """Send output to the rank's log, answer SIGUSR1 with all stacks, join the process group."""
    die_with_the_server()
    log = os.open(seat.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=seat.stacks.open("w"), all_threads=True)
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(seat.rank),
        LOCAL_RANK=str(seat.rank),
        WORLD_SIZE=str(seat.world_size),
        LOCAL_WORLD_SIZE=str(seat.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(seat.port),
        GLOO_SOCKET_IFNAME="lo",
    )
    if seat.kind == "nccl":
        torch.cuda.set_device(seat.device)
    store = dist.TCPStore(
        "127.0.0.1",
        seat.port,
        seat.world_size,
        is_master=seat.hosts_store,
        wait_for_workers=False,
        timeout=GROUP_TIMEOUT,
    )
    dist.init_process_group(
        seat.kind,
        store=store,
        rank=seat.rank,
        world_size=seat.world_size,
        timeout=GROUP_TIMEOUT,
    )


def die_with_the_server() -> None:
    """Leave no rank behind, a stopped one least of all, when the test run itself is killed.

    The fork server ends when nobody holds its line any more. Its children hold it too, so that they
    could start processes of their own; a rank starts none and lets go.
    """
    os.close(forkserver._forkserver._forkserver_alive_fd)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def open_transport(seat: Seat) -> Transport:
    """The transport under test, over the default process group."""
    return connect(seat.kind, device=seat.device if seat.kind == "nccl" else None)
