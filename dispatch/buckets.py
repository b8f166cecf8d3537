"""Receive buckets: power-of-two capacity from the rows that really came."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from crossdock.dispatch.wire import WireFormat

__all__ = ["Bucket", "BucketMemory", "next_power_of_two"]

_NAN_BYTE = 0xFF  # NaN in every dtype that travels: bf16, fp16, fp32 and e4m3


def next_power_of_two(rows: int) -> int:
    """The smallest power of two at or above ``rows``; 0 for 0."""
    return 1 << (rows - 1).bit_length() if rows else 0


class BucketMemory:
    """What a bucket of one capacity holds.

    Attributes:
        capacity: C, rows.
        raw: uint8 [C, row_bytes], rows as they came; nothing where their parts lie apart.
        x: [C, H] payload.
        scale: fp32 [C, ceil(H / 128)], or None.
        topk_idx: int64 [C, K], -1 past the valid rows.
        topk_weights: fp32 [C, K].
        source: int64 [C, 2], (rank, token).

    Args:
        capacity: C.
        wire: Format of the rows.
        device: Where rows live.
    """

    def __init__(self, capacity: int, wire: WireFormat, device: torch.device) -> None:
        self.capacity = capacity
        self._wire = wire
        self.raw = wire.allocate(capacity, device)
        self.x, self.scale = wire.payload(self.raw), wire.scale(self.raw)
        self.topk_idx = torch.empty(capacity, wire.top_k, dtype=torch.int64, device=device)
        self.topk_weights = torch.empty(capacity, wire.top_k, dtype=torch.float32, device=device)
        self.source = torch.empty(capacity, 2, dtype=torch.int64, device=device)
        self._y: Tensor | None = None

    def y(self) -> Tensor:
        """[C, H] in the model's dtype, taken on first use."""
        if self._y is None:
            wire = self._wire
            with torch.inference_mode(False):
                self._y = torch.empty(
                    self.capacity, wire.hidden, dtype=wire.dtype, device=self.raw.device
                )
        return self._y

    def poison(self, num_rows: int) -> None:
        """NaN in all that holds no row."""
        self.x[num_rows:].view(torch.uint8).fill_(_NAN_BYTE)
        if self.scale is not None:
            self.scale[num_rows:].fill_(float("nan"))
        self.topk_weights[num_rows:].fill_(float("nan"))
        self.y().fill_(float("nan"))


class Bucket:
    """One slot's receive bucket.

    Growth is two-phase: :meth:`prepare` takes the new memory beside the old, and after all ranks
    have said that they could, :meth:`commit` swaps; otherwise :meth:`cancel` gives it back.

    Args:
        allocate: Takes the memory for a capacity.
        fixed_rows: Capacity that never changes (rounded up to a power of two); None to grow.
    """

    def __init__(
        self, allocate: Callable[[int], BucketMemory], fixed_rows: int | None = None
    ) -> None:
        self._allocate = allocate
        self.fixed = fixed_rows is not None
        self.memory = self._take(next_power_of_two(fixed_rows or 0))
        self._prepared: BucketMemory | None = None

    @property
    def capacity(self) -> int:
        """C, rows that fit now: 0 or a power of two."""
        return self.memory.capacity

    def _take(self, capacity: int) -> BucketMemory:
        # Memory taken in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            return self._allocate(capacity)

    @property
    def newest(self) -> BucketMemory:
        """The memory that was prepared, or else that in use."""
        return self._prepared or self.memory

    def prepare(self, rows: int, *, with_y: bool = False) -> None:
        """Take memory for ``rows`` if they do not fit; what allocation raises is the caller's.

        Args:
            rows: Rows to hold.
            with_y: Take ``y`` as well, rather than on its first use.
        """
        if rows > self.capacity:
            self._prepared = self._take(next_power_of_two(rows))
        if with_y:
            self.newest.y()

    def commit(self) -> None:
        """Swap in the memory that was prepared, if any."""
        if self._prepared is not None:
            self.memory, self._prepared = self._prepared, None

    def cancel(self) -> None:
        """Give back the memory that was prepared, if any."""
        self._prepared = None
