"""Eager dispatches that ranks agree on by kernels alone: what the host makes of their matrix."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
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
        plan: Places of rows, from int64 [R, R] rows of each rank to each.

    Attributes:
        words: int64, where the kernel writes: the call, then [R, header, rows [R], pairs [R]].
    """

    def __init__(
        self, transport: NvshmemTransport, plan: Callable[[npt.NDArray[np.int64]], SlotPlan]
    ) -> None:
        self._transport = transport
        self._plan = plan
        self.words = pinned_words(matrix_words(transport.world_size))
        self._call = memoryview(self.words.numpy())  # type: ignore[arg-type]
        self._records = self.words.numpy()[1:].reshape(transport.world_size, -1)
        self._mine = memoryview(self._records[transport.rank])
        self._rows = self._records[:, _HEADER : _HEADER + transport.world_size]
        self._pairs = self._records[:, _HEADER + transport.world_size :]

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
        limits = []
        for kind, said, chosen, limit in self._records[:, :_TOKEN].tolist():
            if kind != _FINE or said != call or chosen != slot:
                return None
            limits.append(limit)
        plan = self._plan(self._rows.copy())
        pairs: list[int] = np.add.reduce(self._pairs).tolist()
        if max(plan.received) > capacity or any(
            0 <= limit < need for limit, need in zip(limits, plan.pairs_to_hold(pairs), strict=True)
        ):
            return None
        return Agreed(call, plan, pairs, [slot] * len(pairs))

    @property
    def is_fine(self) -> bool:
        """Whether this rank's ids and weights can be used."""
        return bool(self._mine[_KIND] == _FINE)

    def counts(self) -> tuple[Tensor, Tensor]:
        """This rank's int64 [R] rows and pairs to each rank."""
        rank = self._transport.rank
        return torch.from_numpy(self._rows[rank].copy()), torch.from_numpy(self._pairs[rank].copy())


def pinned_words(count: int) -> Tensor:
    """Zeros int64 [count] on the host, which kernels write to."""
    return torch.zeros(count, dtype=torch.int64, pin_memory=True)
