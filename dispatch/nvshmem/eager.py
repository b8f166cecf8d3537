"""Eager dispatches that ranks agree on by kernels alone: what the host makes of their matrix."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from crossdock.dispatch.mover import Agreed
from crossdock.dispatch.nvshmem.layout import Header, Kind, matrix_words
from crossdock.dispatch.slots import SlotPlan
from crossdock.dispatch.transports.nvshmem import NvshmemTransport

__all__ = ["Matrix", "pinned_words"]

# Members of an enumeration are slow to look up.
_FINE, _HEADER, _KIND, _TOKEN = map(int, (Kind.FINE, Header.HEADER, Header.KIND, Header.TOKEN))
_LOOK_S = 0.1  # between looks for ranks that died


class Matrix:
    """The records of all ranks, which a kernel writes to pinned memory.

    Args:
        transport: Of the ranks.
        plan: The mover's.

    Attributes:
        words: int64, where the kernel writes: the call, then [R, header, rows [R], pairs [R]].
    """

    def __init__(self, transport: NvshmemTransport, plan: Callable[..., SlotPlan]) -> None:
        self._transport = transport
        self._plan = plan
        ranks = self._ranks = transport.world_size
        self.words = pinned_words(matrix_words(ranks))
        self._call = memoryview(self.words.numpy())  # type: ignore[arg-type]
        self._records = self.words.numpy()[1:].reshape(ranks, -1)
        self._mine = self._records[transport.rank]
        self._heads = self._records[:, :_TOKEN]
        self._rows = self._records[:, _HEADER : _HEADER + ranks]
        self._ones = np.ones(ranks, dtype=np.int64)

    def wait(self, call: int) -> None:
        """Wait for the kernel of a call; what it wrote is valid until the next one is launched.

        Raises:
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
        heads = self._heads.tolist()
        for kind, said, chosen, _ in heads:
            if kind != _FINE or said != call or chosen != slot:
                return None
        # Sums over ranks, all at once: a product takes much less of the host than numpy's sum.
        sums: list[int] = self._ones.dot(self._records).tolist()
        pairs = sums[-self._ranks :]
        plan = self._plan(self._rows.copy(), sums[_HEADER : -self._ranks])
        if max(plan.received) > capacity:
            return None
        for (_, _, _, limit), need in zip(heads, plan.pairs_to_hold(pairs), strict=True):
            if 0 <= limit < need:
                return None
        return Agreed(call, plan, pairs, [slot] * self._ranks)

    def mine(self) -> tuple[bool, list[int], list[int]]:
        """Whether this rank's ids and weights can be used; its rows and pairs to each rank, [R]."""
        words: list[int] = self._mine.tolist()
        return words[_KIND] == _FINE, words[_HEADER : -self._ranks], words[-self._ranks :]


def pinned_words(count: int) -> Tensor:
    """Zeros int64 [count] on the host, which kernels write to."""
    return torch.zeros(count, dtype=torch.int64, pin_memory=True)
