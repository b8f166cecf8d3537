"""Small messages beside MPI's collectives, for finding out who is missing."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MpiNotices"]

_TAG = 2


class MpiNotices:
    """Keys and values that every rank sends to all others; see :class:`watch.Notices`.

    Messages are short enough for MPI to take them without waiting for the receiver. Those to a rank
    that is gone stay pending, which harms nobody.

    Args:
        mpi: mpi4py's MPI module.
        comm: Of the ranks; nothing else on it uses this module's tag.
        serial: Number of the transport on this communicator; notices of others are not read.
    """

    def __init__(self, mpi: Any, comm: MPI.Intracomm, serial: int) -> None:
        self._mpi = mpi
        self._comm = comm
        self._serial = serial
        self._known: dict[str, str] = {}
        self._pending: list[tuple[MPI.Request, bytes]] = []

    def set(self, key: str, value: str) -> None:
        """Know it, and tell all others."""
        self._known[key] = value
        self._forget_sent()
        message = json.dumps([self._serial, key, value]).encode()
        for peer in range(self._comm.Get_size()):
            if peer != self._comm.Get_rank():
                request = self._comm.Isend([message, self._mpi.BYTE], peer, _TAG)
                self._pending.append((request, message))

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are known, by what has arrived so far."""
        self._receive()
        return all(key in self._known for key in keys)

    def get(self, key: str) -> bytes:
        """A known key's value."""
        return self._known[key].encode()

    def compare_set(self, key: str, expected: str, desired: str) -> None:
        """Set the key if nobody was heard to."""
        self._receive()
        if self._known.get(key, "") == expected:
            self.set(key, desired)

    def flush(self, seconds: float) -> None:
        """Let MPI send what it has not sent yet, for a while at most."""
        deadline = time.monotonic() + seconds
        while self._pending and time.monotonic() < deadline:
            self._forget_sent()
            time.sleep(0.001)

    def _forget_sent(self) -> None:
        self._pending = [(r, message) for r, message in self._pending if not r.Test()]

    def _receive(self) -> None:
        status = self._mpi.Status()
        while True:
            message = self._comm.Improbe(self._mpi.ANY_SOURCE, _TAG, status)
            if message is None:
                return
            raw = bytearray(status.Get_count(self._mpi.BYTE))
            message.Recv([raw, self._mpi.BYTE])
            serial, key, value = json.loads(raw)
            if serial == self._serial:
                self._known[key] = value
