"""Ranks started by mpirun, each with a line to the test; and a pool of them that stays.

``python -m tests.transports.mpi_job ADDRESS FOLDER`` is what mpirun starts.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import pytest
import torch

from crossdock.dispatch import connect
from tests.harness.child import Seat
from tests.harness.pool import HANG_S, Pool, pack, unpack

START_S = 60.0


def mpirun_command() -> list[str] | None:
    """mpirun of this environment, with what lets it start more ranks than cores; None without."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        return None
    version = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    return [found, "--oversubscribe"] if "Open MPI" in version else [found]


class Ended:
    """A rank's process as ``Pool`` looks at processes."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.exitcode: int | None = None  # mpirun knows, and does not tell

    def is_alive(self) -> bool:
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return status.rpartition(")")[2].split()[0] not in "ZX"

    def join(self, timeout: float | None = None) -> None:
        deadline = time.monotonic() + (timeout if timeout is not None else START_S)
        while self.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)

    def kill(self) -> None:
        if self.is_alive():
            os.kill(self.pid, signal.SIGKILL)


class MpiJob:
    """``world_size`` processes that run ``fn(seat, link, *args)`` under one mpirun."""

    def __init__(self, world_size: int, fn: Callable[..., None], *args: Any) -> None:
        command = mpirun_command()
        assert command is not None
        self.folder = tempfile.TemporaryDirectory(prefix="crossdock-mpi-")
        address = os.path.join(self.folder.name, "line")
        environ = os.environ | {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMP_NUM_THREADS": "1",
        }
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environ.pop(name, None)
        self.output = Path(self.folder.name) / "mpirun.log"
        with Listener(address, family="AF_UNIX") as listener, self.output.open("wb") as output:
            command += ["-n", str(world_size), sys.executable, "-m", __name__]
            self.process = subprocess.Popen(
                [*command, address, self.folder.name],
                env=environ,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            listener._listener._socket.settimeout(START_S)  # type: ignore[attr-defined]
            try:
                greetings = [_greet(listener) for _ in range(world_size)]
            except TimeoutError:
                _end(self.process)  # and its ranks, or they would slow down what follows
                said = self.output.read_text()
                pytest.fail(f"mpirun started no {world_size} ranks in {START_S} s: {said}")
            lines = sorted(greetings, key=lambda line: line[0])
        self.links: list[Connection] = [link for _, _, link in lines]
        self.ranks = [Ended(pid) for _, pid, _ in lines]
        for link in self.links:
            link.send_bytes(pack((fn, args)))

    def close(self) -> None:
        """End whatever is left of it."""
        for link in self.links:
            link.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            for rank in self.ranks:
                rank.kill()
            self.process.kill()
            self.process.wait()
        self.folder.cleanup()


class MpiPool(Pool):
    """The pool's way of calling functions, over ranks that mpirun started."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.kind = "gloo"
        self._job = MpiJob(world_size, serve)
        self._folder = self._job.folder
        self._links = self._job.links
        self._processes = self._job.ranks

    def close(self) -> None:
        self._job.close()
        self._links, self._processes = [], []

    def _seats(self) -> list[Seat]:
        return [
            seat_of(rank, self.world_size, self._folder.name) for rank in range(self.world_size)
        ]


class MpiPools:
    """Four ranks of one mpirun that stays; smaller worlds are its first ranks."""

    SIZE = 4

    def __init__(self) -> None:
        self._pool: MpiPool | None = None

    def call(
        self, world_size: int, fn: Callable[..., Any], *args: Any, hang_s: float = HANG_S
    ) -> list[Any]:
        """``[fn(comm, *args) of every rank]``."""
        if world_size > self.SIZE:
            pytest.skip(f"MPI is tried with up to {self.SIZE} ranks")
        if self._pool is not None and not self._pool.usable:
            self.close()
        self._pool = self._pool or MpiPool(self.SIZE)
        return self._pool.run(call_on_first, world_size, fn, *args, hang_s=hang_s)[:world_size]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


class OverMpi:
    """Like ``tests.harness.ranks.Ranks``: "mpi", or another transport whose ranks meet by MPI."""

    is_local = False

    def __init__(self, kind: str, pools: MpiPools) -> None:
        self.kind = kind
        self._pools = pools

    def __call__(
        self, world_size: int, fn: Callable[..., Any], *args: Any, hang_s: float = HANG_S
    ) -> list[Any]:
        return self._pools.call(world_size, call_over_mpi, self.kind, fn, *args, hang_s=hang_s)


@cache
def first_ranks(world_size: int) -> Any:
    """A communicator of the first ranks; all ranks ask for it together."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return world.Split(0 if world.Get_rank() < world_size else 1)


def call_on_first(world_size: int, fn: Callable[..., Any], *args: Any) -> Any:
    from mpi4py import MPI

    comm = first_ranks(world_size)
    return fn(comm, *args) if MPI.COMM_WORLD.Get_rank() < world_size else None


def call_over_mpi(comm: Any, kind: str, fn: Callable[..., Any], *args: Any) -> Any:
    transport = connect(kind, group=comm)
    try:
        return fn(transport, *args)
    finally:
        transport.close()


def serve(seat: Seat, link: Connection) -> None:
    """Take calls until the test hangs up."""
    while True:
        try:
            fn, args = unpack(link.recv_bytes())
        except EOFError:
            return
        try:
            reply = pack((True, fn(*args)))
        except BaseException:
            reply = pack((False, traceback.format_exc()))
        link.send_bytes(reply)


def seat_of(rank: int, world_size: int, folder: str) -> Seat:
    return Seat(rank=rank, world_size=world_size, port=0, folder=Path(folder))


def _end(mpirun: subprocess.Popen[bytes]) -> None:
    mpirun.terminate()
    try:
        mpirun.wait(10)
    except subprocess.TimeoutExpired:
        mpirun.kill()
        mpirun.wait()


def _greet(listener: Listener) -> tuple[int, int, Connection]:
    link = listener.accept()
    rank, pid = link.recv()
    return rank, pid, link


def main(address: str, folder: str) -> None:
    from mpi4py import MPI

    torch.set_num_threads(1)
    seat = seat_of(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), folder)
    log = os.open(seat.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, file=seat.stacks.open("w"), all_threads=True)
    with Client(address, family="AF_UNIX") as link:
        link.send((seat.rank, os.getpid()))
        fn, args = unpack(link.recv_bytes())
        fn(seat, link, *args)


if __name__ == "__main__":
    main(*sys.argv[1:])
