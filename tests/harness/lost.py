"""Ranks that may be killed or stopped: fresh processes, and nobody who cleans up after a failure.

Launchers kill the survivors of a lost rank; here nobody does, so that what the survivors do by
themselves can be seen.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.harness.child import Seat, process_context, take_seat

START_S = 60.0


@dataclass
class LoneRank:
    """The parent's view of one process."""

    seat: Seat
    process: BaseProcess
    link: Connection

    def receive(self, timeout_s: float = START_S) -> Any:
        """The next thing the rank says, or an AssertionError with its log and stacks."""
        try:
            if self.link.poll(timeout_s):
                return self.link.recv()
        except EOFError:
            self.process.join(5)
        raise AssertionError(
            f"rank {self.seat.rank} said nothing (exit code {self.process.exitcode})\n"
            + self._stacks()
            + self.seat.log.read_text(errors="replace")
        )

    def seconds_to_exit(self, timeout_s: float) -> float:
        """How long the process takes to end by itself; fails after ``timeout_s``."""
        started = time.monotonic()
        self.process.join(timeout_s)
        assert not self.process.is_alive(), (
            f"rank {self.seat.rank} did not exit in {timeout_s} s\n{self._stacks()}"
        )
        return time.monotonic() - started

    def _stacks(self) -> str:
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.3)
        return self.seat.stacks.read_text() if self.seat.stacks.exists() else ""


@contextmanager
def lone_ranks(
    world_size: int, fn: Callable[..., None], *args: Any, rank0_hosts_store: bool = False
) -> Iterator[list[LoneRank]]:
    """Processes that run ``fn(seat, link, *args)`` once each; all are gone afterwards.

    ``link`` is the rank's line to the parent. With ``rank0_hosts_store`` the rendezvous store dies
    with rank 0, as under mpirun; otherwise it lives in the parent, as under torchrun.
    """
    context = process_context()
    store = None
    if not rank0_hosts_store:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port if store else _free_port()
    with tempfile.TemporaryDirectory(prefix="crossdock-lone-") as folder:
        ranks = []
        try:
            for rank in range(world_size):
                seat = Seat(
                    rank=rank,
                    world_size=world_size,
                    port=port,
                    folder=Path(folder),
                    hosts_store=rank0_hosts_store and rank == 0,
                )
                ours, theirs = context.Pipe()
                process = context.Process(target=_live, args=(seat, theirs, fn, args), daemon=True)
                process.start()
                theirs.close()
                ranks.append(LoneRank(seat, process, ours))
            yield ranks
        finally:
            for lone in ranks:
                lone.process.kill()  # also ends a stopped process
                lone.process.join()
                lone.link.close()


def _live(seat: Seat, link: Connection, fn: Callable[..., None], args: tuple[Any, ...]) -> None:
    take_seat(seat)
    try:
        fn(seat, link, *args)
    except BaseException:
        traceback.print_exc()
        raise


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
