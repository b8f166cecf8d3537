"""N processes that stay: started once, reused by every test, watched by the parent.

A rank that dies or hangs fails the test at once, with what every rank printed and where each one
was. A pool in which anything failed is thrown away; the next test gets a fresh one.
"""

from __future__ import annotations

import io
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from tests.harness.child import Seat, open_transport, process_context, take_seat

HANG_S = 20.0
GRACE_S = 10.0  # for the other ranks, once one has failed
LOG_TAIL = 3000

RankFunction = Callable[..., Any]


class RanksFailed(AssertionError):
    """Some ranks of the pool raised, died or hung; the message has every rank's side of it."""


class Pool:
    """``world_size`` processes that run functions sent by name."""

    def __init__(self, world_size: int, kind: Literal["gloo", "nccl"] = "gloo") -> None:
        self.world_size = world_size
        self.kind = kind
        self._folder = tempfile.TemporaryDirectory(prefix="crossdock-ranks-")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._links: list[Connection] = []
        self._processes = []
        context = process_context()
        for seat in self._seats():
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(seat, theirs), daemon=True)
            process.start()
            theirs.close()
            self._links.append(ours)
            self._processes.append(process)

    def run(self, fn: RankFunction, *args: Any, hang_s: float = HANG_S) -> list[Any]:
        """``[fn(transport, *args) of rank 0, of rank 1, ...]``.

        Raises:
            RanksFailed: ``fn`` raised on a rank, or a rank died, or did not answer in ``hang_s``.
        """
        try:
            results, failures = self._call(pack((fn, args)), hang_s)
            if failures:
                raise RanksFailed(self._report(failures))
        except BaseException:  # an interrupt too: late replies must not meet the next call
            self.close()
            raise
        return [results[rank] for rank in range(self.world_size)]

    def _call(self, call: bytes, hang_s: float) -> tuple[dict[int, Any], dict[int, str]]:
        for link in self._links:
            link.send_bytes(call)
        deadline = time.monotonic() + hang_s
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = set(range(self.world_size))
        while waiting:
            sources = {self._links[rank]: rank for rank in waiting}
            ready = wait(list(sources), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                stacks = self._stacks(waiting)
                failures |= {rank: "did not answer\n" + stacks[rank] for rank in waiting}
                break
            for link in ready:
                rank = sources[link]
                waiting.discard(rank)
                try:
                    good, value = unpack(link.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(5)
                    good, value = False, f"died, exit code {self._processes[rank].exitcode}\n"
                if good:
                    results[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return results, failures

    @property
    def usable(self) -> bool:
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """End every process, however it stands."""
        for link in self._links:
            link.close()
        deadline = time.monotonic() + 2
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._links, self._processes = [], []
        self._folder.cleanup()

    def _seats(self) -> list[Seat]:
        return [
            Seat(
                rank=rank,
                world_size=self.world_size,
                port=self._store.port,
                folder=Path(self._folder.name),
                kind=self.kind,
            )
            for rank in range(self.world_size)
        ]

    def _stacks(self, ranks: Sequence[int] | set[int]) -> dict[int, str]:
        for rank in ranks:
            if self._processes[rank].is_alive():
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.3)
        return {seat.rank: _text(seat.stacks) for seat in self._seats() if seat.rank in ranks}

    def _report(self, failures: dict[int, str]) -> str:
        parts = [f"{len(failures)} of {self.world_size} ranks failed"]
        for seat in self._seats():
            if seat.rank in failures:
                parts.append(f"--- rank {seat.rank}: {failures[seat.rank]}")
                if log := _text(seat.log)[-LOG_TAIL:]:
                    parts.append(f"    printed:\n{log}")
        return "\n".join(parts)


class Pools:
    """The pools of a test session, one for each world size, started when first asked for."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, str], Pool] = {}

    def get(self, world_size: int, kind: Literal["gloo", "nccl"] = "gloo") -> Pool:
        key = (world_size, kind)
        pool = self._pools.get(key)
        if pool is None or not pool.usable:
            if pool is not None:
                pool.close()
            pool = self._pools[key] = Pool(world_size, kind)
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


def _serve(seat: Seat, link: Connection) -> None:
    """A rank's life: take calls until the parent hangs up."""
    take_seat(seat)
    while True:
        try:
            call = link.recv_bytes()
        except EOFError:
            break
        try:
            fn, args = unpack(call)
            transport = open_transport(seat)
            try:
                reply = pack((True, fn(transport, *args)))
            finally:
                transport.close()
        except BaseException:
            reply = pack((False, traceback.format_exc()))
        link.send_bytes(reply)
    os._exit(0)  # the parent is done with this rank: no farewell collectives


def pack(message: Any) -> bytes:
    """Pickle by value; unlike plain pickle, torch.save knows fp8 tensors."""
    buffer = io.BytesIO()
    torch.save(message, buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
