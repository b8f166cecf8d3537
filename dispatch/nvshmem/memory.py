"""Symmetric memory of a dispatcher: words that ranks signal by, and a bucket for each slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from crossdock.dispatch.nvshmem.bucket import SymmetricBucket
from crossdock.dispatch.nvshmem.layout import CONTROL_AT, control_stand_in, control_words
from crossdock.dispatch.nvshmem.runtime import Symmetric
from crossdock.dispatch.transports.nvshmem import NvshmemTransport

__all__ = ["SlotMemory"]


class SlotMemory:
    """Takes and frees it, together with all ranks.

    Args:
        transport: Of the ranks.
        group: int64, the kernels' ``Group``: gets the addresses of everybody's control words.
        record_words: Of a record.
        owner: Number of the dispatcher among those that the transport watches.

    Attributes:
        in_use: Each slot's bucket.
    """

    def __init__(
        self, transport: NvshmemTransport, group: Tensor, record_words: int, owner: int
    ) -> None:
        self._transport = transport
        self._group = group
        self._record_words = record_words
        self._control_bytes = 8 * control_words(
            transport.world_size, record_words, has_distant=transport.has_distant
        )
        self._control: Symmetric | None = None
        self.in_use: dict[int, SymmetricBucket] = {}
        self._outgrown: list[SymmetricBucket] = []  # whose addresses graphs hold
        self._owner = owner
        self._num_discards = 0

    def require_room(self, bucket: SymmetricBucket) -> None:
        """Raise MemoryError if this rank has none for a bucket that is to be connected; local."""
        need = bucket.num_bytes + (0 if self._control else self._control_bytes)
        if need:
            self._transport.runtime.require_room(need)

    def connect(self, buckets: Sequence[tuple[int, SymmetricBucket]]) -> Callable[[], None]:
        """Take slots' new buckets on all ranks; what is replaced is freed when they all have."""
        runtime = self._transport.runtime
        torch.cuda.synchronize(self._transport.device)  # nobody uses what is given back
        self._transport.collect_garbage()
        if self._control is None:
            self._take_control()
        # Memory taken in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            for _, bucket in buckets:
                if bucket.memory is None and bucket.capacity:
                    bucket.take(runtime.allocate(bucket.num_bytes))

        def commit() -> None:
            for slot, bucket in buckets:
                old = self.in_use.get(slot)
                self.in_use[slot] = bucket
                if old is None or old is bucket:
                    continue
                if old.captured:
                    self._outgrown.append(old)
                elif old.memory is not None:
                    runtime.free(old.memory)

        return commit

    def _take_control(self) -> None:
        rank, ranks = self._transport.rank, self._transport.world_size
        self._control = self._transport.runtime.allocate(self._control_bytes)
        self._control.buffer.zero_()
        own = self._control.buffer.data_ptr()
        addresses = torch.tensor(
            [
                address or control_stand_in(own, rank, peer, ranks, self._record_words)
                for peer, address in enumerate(self._control.addresses)
            ]
        )
        self._group[CONTROL_AT : CONTROL_AT + len(addresses)] = addresses.to(self._group.device)
        # Zeros must be there before anybody signals, which all do after the next agreement.
        torch.cuda.synchronize(self._transport.device)

    def release_captured(self) -> None:
        """Let go of outgrown buckets that graphs held."""
        self._discard([bucket.memory for bucket in self._outgrown])
        self._outgrown.clear()

    def release(self) -> None:
        """Let go of everything; memory returns when all ranks have come to that."""
        self.release_captured()
        self._discard([*(bucket.memory for bucket in self.in_use.values()), self._control])
        self.in_use.clear()
        self._control = None

    def _discard(self, memories: Sequence[Symmetric | None]) -> None:
        key = (self._owner << 32) + self._num_discards
        self._num_discards += 1
        self._transport.discard(key, [memory for memory in memories if memory is not None])
