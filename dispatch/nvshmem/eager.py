"""Eager dispatches that ranks agree on by kernels alone: what the host makes of their matrix."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from crossdock.dispatch.mover import Agreed
from crossdock.dispatch.nvshmem.layout import Header, Kind, matrix_words, records_at
from crossdock.dispatch.slots import SlotPlan
from crossdock.dispatch.transports.nvshmem import NvshmemTransport

__all__ = ["Matrix", "Ways", "pinned_words"]

# Members of an enumeration are slow to look up.
_FINE, _HEADER, _KIND = map(int, (Kind.FINE, Header.HEADER, Header.KIND))
_LOOK_S = 0.5  # between looks for ranks that died or failed


class Matrix:
    """The records of all ranks, which a kernel writes to pinned memory, and what they come to.

    A step between two layers finds the processor's caches cold, so that each library it calls into
    costs more than what it does there: what is read of a step that nothing is unusual about are
    a few words, and as Python ints.

    Args:
        transport: Of the ranks.
        plan: The mover's.

    Attributes:
        words: int64, where the kernel writes: the call; whether all records are of it and of one
            slot, and without trouble; rows [R] and pairs [R] that each rank receives; limits of
            pairs [R]; records [R, header, rows [R], pairs [R]].
    """

    def __init__(self, transport: NvshmemTransport, plan: Callable[..., SlotPlan]) -> None:
        self._transport = transport
        self._plan = plan
        ranks = self._ranks = transport.world_size
        self.words = pinned_words(matrix_words(ranks))
        self._call = memoryview(self.words.numpy())  # type: ignore[arg-type]
        self._verdict, self._records = (
            self._call[1 : records_at(ranks)],
            self._call[records_at(ranks) :],
        )
        record_words = _HEADER + 2 * ranks
        self._mine = self._records[transport.rank * record_words :][:record_words]

    def wait(self, call: int) -> None:
        """Wait for the kernel of a call; what it wrote is valid until the next one is launched.

        Raises:
            PeerFailed: A rank has said that it failed.
            RankTimeout: A rank did not come in time, or is dead.
        """
        looked = time.monotonic()
        while self._call[0] != call:
            if self._call[0] == -call:
                self._transport.require_working()
            if time.monotonic() - looked > _LOOK_S:
                self._transport.look_for_dead("dispatch")
                looked = time.monotonic()

    def judge(self, call: int, slot: int, capacity: int) -> Agreed | None:
        """What ranks have agreed on; None if they have to go on in the exchange of the hosts.

        They all come to the same end, for they see the same matrix. They go on between hosts if a
        rank has trouble or is in another call (its record is an older call's then), or if the step
        does not fit.

        Args:
            call: Number of the call.
            slot: That this rank chose.
            capacity: Rows that the slot holds, on every rank.
        """
        is_fine, *words = self._verdict.tolist()
        if not is_fine:
            return None
        ranks = self._ranks
        pairs, limits = words[ranks : 2 * ranks], words[2 * ranks :]
        plan = self._plan(partial(_counts_in, bytes(self._records), ranks), words[:ranks])
        if max(plan.received) > capacity:
            return None
        if max(limits) >= 0:
            for limit, need in zip(limits, plan.pairs_to_hold(pairs), strict=True):
                if 0 <= limit < need:
                    return None
        return Agreed(call, plan, pairs, [slot] * ranks)

    def mine(self) -> tuple[bool, list[int], list[int]]:
        """Whether this rank's ids and weights can be used; its rows and pairs to each rank, [R]."""
        words: list[int] = self._mine.tolist()
        return words[_KIND] == _FINE, words[_HEADER : -self._ranks], words[-self._ranks :]


def _counts_in(records: bytes, ranks: int) -> npt.NDArray[np.int64]:
    """int64 [R, R]: rows of each rank to each, by their records."""
    words = np.frombuffer(records, dtype=np.int64).reshape(ranks, -1)
    return words[:, _HEADER : _HEADER + ranks]


class Ways:
    """Device memory for the routing of eager steps, used again when a step's handle is gone.

    Launches of a transport follow each other whatever streams they are on, so what is given back
    may be taken at once. Each is for a power of two of tokens; it holds as much as was in use at a
    time.

    Args:
        device: Whose memory.
        words: That a number of tokens needs.
    """

    def __init__(self, device: torch.device, words: Callable[[int], int]) -> None:
        self._device = device
        self._words = words
        self._sizes: dict[int, int] = {}  # by the exponent
        self._free: dict[int, list[Tensor]] = {}  # by the size

    def take(self, num_tokens: int) -> Tensor:
        """Uninitialised int64, enough for so many tokens."""
        exponent = (num_tokens - 1).bit_length()
        size = self._sizes.get(exponent)
        if size is None:
            size = self._sizes[exponent] = self._words(1 << exponent)
            self._free[size] = []
        free = self._free[size]
        return free.pop() if free else torch.empty(size, dtype=torch.int64, device=self._device)

    def give(self, way: Tensor) -> None:
        """Nobody needs it any more."""
        self._free[way.shape[0]].append(way)


def pinned_words(count: int) -> Tensor:
    """Zeros int64 [count] on the host, which kernels write to."""
    return torch.zeros(count, dtype=torch.int64, pin_memory=True)
