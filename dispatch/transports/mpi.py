"""MPI, by mpi4py: any implementation, no torch process group.

No call here blocks inside MPI. Everything is started without blocking and then tested, with a
deadline, so that a lost rank is an error and not a hang. Who is missing is found out over small
messages beside the collectives (``mpi_notices``).

A rank that is lost leaves MPI in a state in which finalisation would wait for ever. The error is
raised as on every other transport; when the interpreter exits after it, the job is ended by
``MPI_Abort``, because there is no other way out of it.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from crossdock.dispatch.transports.base import Transport, Work
from crossdock.dispatch.transports.mpi_library import is_cuda_aware, load_mpi
from crossdock.dispatch.transports.mpi_notices import MpiNotices
from crossdock.dispatch.transports.watch import Process, Watch, grace_of, slice_of
from crossdock.scratch.errors import ConfigError, CrossdockError, TransportUnavailable

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MpiTransport"]

_RECORDS = "the exchange of records"
_ROWS_TAG = 1
_PROCESS_BYTES = 512
_BUSY_S = 0.005  # how long to keep the core, yielding it to whoever is ready, before sleeping
_LONGEST_NAP_S = 0.001
_FLUSH_S = 0.5


class MpiTransport(Transport):
    """Ranks of an MPI communicator.

    Rows on a GPU go to MPI as they are where it is CUDA-aware, and through pinned memory elsewhere.

    Args:
        comm: mpi4py intracommunicator; ``COMM_WORLD`` by default. A duplicate of it is used, one
            for all transports on the same communicator.
        device: Where rows live.
        timeout_s: Seconds after which a rank that does not answer is a RankTimeout.

    Raises:
        TransportUnavailable: No mpi4py, no MPI library, or one that was not started by its mpirun.
        ConfigError: ``comm`` is no intracommunicator.
    """

    name = "mpi"

    def __init__(
        self, comm: MPI.Intracomm | None = None, *, device: torch.device, timeout_s: float
    ) -> None:
        self._mpi = load_mpi()
        if comm is None:
            comm = self._mpi.COMM_WORLD
            _require_started(comm)
        elif not isinstance(comm, self._mpi.Intracomm):
            raise ConfigError(
                f"mpi joins the ranks of an mpi4py communicator; group is {type(comm).__name__}"
            )
        super().__init__(comm.Get_rank(), comm.Get_size(), device, timeout_s)
        self._step = 0
        self._watch: Watch | None = None
        self._row_types: dict[int, MPI.Datatype] = {}
        # Buffers of requests that never completed: MPI may still write to them.
        self._abandoned: list[object] = []
        self._comm, serial = self._duplicate(comm)
        self._direct = device.type == "cuda" and is_cuda_aware()
        atexit.register(self._abort_if_broken)
        self._notices = MpiNotices(self._mpi, self._comm, serial)
        self._watch = Watch(self._notices, self.rank, self._gather_processes())

    def _exchange(self, record: Tensor) -> Tensor:
        matrix = torch.empty(self.world_size, len(record), dtype=torch.int64)
        mine, all_of_it = record.contiguous().numpy(), matrix.numpy()
        request = self._comm.Iallgather([mine, self._mpi.INT64_T], [all_of_it, self._mpi.INT64_T])
        self._start([request], _RECORDS, mine, all_of_it).wait()
        return matrix

    def _all_to_all(
        self, send: Tensor, send_rows: list[int], recv: Tensor, recv_rows: list[int]
    ) -> Work:
        row = self._row_type(send.shape[1])
        outgoing, incoming = self._outgoing(send), self._incoming(recv)
        sends, recvs = torch.split(outgoing, send_rows), torch.split(incoming, recv_rows)
        recvs[self.rank].copy_(sends[self.rank])
        requests = []
        # Everybody begins with another peer.
        for distance in range(1, self.world_size):
            peer = (self.rank - distance) % self.world_size
            if recv_rows[peer]:
                spec = [_buffer(recvs[peer]), recv_rows[peer], row]
                requests.append(self._comm.Irecv(spec, peer, _ROWS_TAG))
        for distance in range(1, self.world_size):
            peer = (self.rank + distance) % self.world_size
            if send_rows[peer]:
                spec = [_buffer(sends[peer]), send_rows[peer], row]
                requests.append(self._comm.Isend(spec, peer, _ROWS_TAG))
        return self._start(
            requests, "the exchange of rows", outgoing, incoming, into=(recv, incoming)
        )

    def _all_gather(self, send: Tensor, recv: Tensor, rows: list[int]) -> Work:
        row = self._row_type(send.shape[1])
        outgoing, incoming = self._outgoing(send), self._incoming(recv)
        request = self._comm.Iallgatherv(
            [_buffer(outgoing), rows[self.rank], row], [_buffer(incoming), rows, None, row]
        )
        return self._start(
            [request], "the gather of rows", outgoing, incoming, into=(recv, incoming)
        )

    def close(self) -> None:
        """Leave; the duplicate stays with its communicator, because freeing it would wait."""
        if self.ledger.broken is None:
            atexit.unregister(self._abort_if_broken)

    # ---- waiting -------------------------------------------------------------------------------

    def _start(
        self,
        requests: list[MPI.Request],
        during: str,
        *buffers: object,
        into: tuple[Tensor, Tensor] | None = None,
    ) -> _Waiting:
        self._step += 1
        return _Waiting(self, requests, self._step, during, buffers, into)

    def wait_for(
        self, requests: list[MPI.Request], step: int, during: str, buffers: object
    ) -> None:
        """Test requests until they are complete, and say who never came if they are not."""
        started = time.monotonic()
        limit = self.timeout_s
        next_look = started + slice_of(limit).total_seconds()
        while not self._mpi.Request.Testall(requests):
            now = time.monotonic()
            if now >= next_look:
                next_look = now + slice_of(limit).total_seconds()
                if self._is_hopeless(step, during, late=now > started + limit - grace_of(limit)):
                    self._abandoned.append((requests, buffers))
                    raise self._lost(step, during)
            if now - started < _BUSY_S:
                os.sched_yield()
            else:
                time.sleep(min(_LONGEST_NAP_S, (now - started) / 100))

    def _is_hopeless(self, step: int, during: str, *, late: bool) -> bool:
        if self._watch is None:
            return late
        self._watch.publish(step)
        return late or self._watch.verdict() is not None or self._watch.has_dead()

    def tell_failure(self, said: str) -> None:
        """Send it to all, who look for it while they wait."""
        assert self._watch is not None
        self._watch.condemn({self.rank: said})
        self._notices.flush(_FLUSH_S)

    def heard(self) -> dict[int, str] | None:
        """What another rank sent."""
        return self._watch.verdict() if self._watch is not None else None

    def declare_lost(self, during: str) -> CrossdockError:
        """Say who is missing, after a wait over other communicators of these ranks was in vain.

        All ranks that are there come to this, or to the next exchange.
        """
        return self._lost(self._step + 1, during)

    def _lost(self, step: int, during: str) -> CrossdockError:
        missing = self._watch.find_missing(step, grace_of(self.timeout_s)) if self._watch else {}
        return self.break_with(missing, during)

    def _abort_if_broken(self) -> None:
        if self.ledger.broken is not None and not self._mpi.Is_finalized():
            self._mpi.COMM_WORLD.Abort(1)

    # ---- construction --------------------------------------------------------------------------

    def _duplicate(self, comm: MPI.Intracomm) -> tuple[MPI.Intracomm, int]:
        """This communicator's duplicate, made once, and how many transports it has had before."""
        key = _duplicates_key(self._mpi)
        kept: Any = comm.Get_attr(key)
        if kept is None:
            duplicate, request = comm.Idup()
            self._start([request], "the duplication of the communicator", duplicate).wait()
            kept = [duplicate, 0]
            comm.Set_attr(key, kept)
        kept[1] += 1
        return kept[0], kept[1]

    def _gather_processes(self) -> list[Process]:
        said = json.dumps(astuple(Process.this())).encode()
        mine = torch.zeros(_PROCESS_BYTES, dtype=torch.uint8)
        mine[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        words = self.exchange(mine.view(torch.int64)).view(torch.uint8)
        return [Process(*json.loads(bytes(row.tolist()).rstrip(b"\0"))) for row in words]

    # ---- buffers -------------------------------------------------------------------------------

    def _outgoing(self, rows: Tensor) -> Tensor:
        """Rows where MPI can read them, complete."""
        if rows.device.type == "cpu":
            return rows
        if not self._direct:
            rows = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True).copy_(rows)
        torch.cuda.current_stream(self.device).synchronize()
        return rows

    def _incoming(self, rows: Tensor) -> Tensor:
        """Room for rows where MPI can write them."""
        if rows.device.type == "cpu" or self._direct:
            return rows
        return torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)

    def _row_type(self, row_bytes: int) -> MPI.Datatype:
        """A row as one MPI element, so that counts fit 32 bits where bytes do not."""
        known = self._row_types.get(row_bytes)
        if known is None:
            known = self._row_types[row_bytes] = self._mpi.BYTE.Create_contiguous(row_bytes)
            known.Commit()
        return known


class _Waiting:
    """Rows or records on their way."""

    def __init__(
        self,
        transport: MpiTransport,
        requests: list[MPI.Request],
        step: int,
        during: str,
        buffers: object,
        into: tuple[Tensor, Tensor] | None,
    ) -> None:
        self._transport, self._requests, self._step = transport, requests, step
        self._during, self._buffers, self._into = during, buffers, into

    def wait(self) -> None:
        self._transport.wait_for(self._requests, self._step, self._during, self._buffers)
        if self._into is not None and self._into[0] is not self._into[1]:
            self._into[0].copy_(self._into[1])


def _buffer(rows: Tensor) -> Any:
    """Rows as mpi4py takes them: a CPU tensor as an array, a GPU tensor by its array interface."""
    return rows.numpy() if rows.device.type == "cpu" else rows


_keys: list[int] = []


def _duplicates_key(mpi: Any) -> int:
    if not _keys:
        _keys.append(mpi.Comm.Create_keyval())
    return _keys[0]


def _require_started(world: MPI.Intracomm) -> None:
    """A program that its mpirun did not start sees a world of one."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE"):
        expected = os.environ.get(name)
        if expected is not None and int(expected) != world.Get_size():
            raise TransportUnavailable(
                f"MPI sees {world.Get_size()} rank(s), but {name} is {expected}: start with the "
                "mpirun of the MPI that mpi4py loads, or use gloo or shm under other launchers"
            )
