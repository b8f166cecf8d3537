"""A slot's receive bucket in symmetric memory: senders write all of a row at its final place."""

from __future__ import annotations

import torch
from torch import Tensor

from crossdock.dispatch.buckets import BucketMemory
from crossdock.dispatch.nvshmem.layout import MAX_RANKS, BucketLayout
from crossdock.dispatch.nvshmem.runtime import Symmetric
from crossdock.dispatch.wire import WireFormat, num_blocks

__all__ = ["SymmetricBucket"]


class SymmetricBucket(BucketMemory):
    """A bucket that is described first, and takes its memory when all ranks do.

    Attributes:
        layout: Places of its parts.
        num_bytes: Of symmetric memory, an outbox for distant ranks included.
        memory: Once taken.
        table: int64 on the device, the kernels' ``Slot``.
        x: [C, H] payload.
        scale: fp32 [C, ceil(H / 128)], or None.
        num_rows: int64 [1] on the device.
        num_pairs: int64 [1] on the device.
        rows_per_expert: int64 [num_local_experts] on the device.
        offsets: int64 [num_local_experts + 1] on the device: where each expert's pairs begin, in
            the expert-major layout.
        captured: Whether a graph holds its addresses.
    """

    def __init__(
        self,
        capacity: int,
        wire: WireFormat,
        device: torch.device,
        num_local_experts: int,
        *,
        source_words: int = 2,
        has_outbox: bool = False,
    ) -> None:
        self.layout = BucketLayout.of(capacity, wire, source_words=source_words)
        self.num_bytes = self.layout.num_bytes * (2 if has_outbox else 1)
        self._source_words = source_words
        self.memory: Symmetric | None = None
        self.captured = False
        self._device = device
        self._num_local_experts = num_local_experts
        # Views are made again when there is something to view.
        super().__init__(0, wire, device)
        self.capacity = capacity
        self._state = torch.zeros(5 + 2 * num_local_experts, dtype=torch.int64, device=device)
        self.num_rows, self.num_pairs = self._state[2:3], self._state[3:4]
        self.rows_per_expert = self._state[4 : 4 + num_local_experts]
        self.offsets = self._state[4 + num_local_experts :]
        self.results = torch.empty(0, wire.hidden, dtype=wire.dtype, device=device)
        if capacity == 0:
            self._view(torch.empty(0, dtype=torch.uint8, device=device), [])

    def take(self, memory: Symmetric) -> None:
        """Lie in ``memory`` from now on; behind the bucket there is the outbox, if it has one."""
        self.memory = memory
        buffer, outbox = memory.buffer.tensor_split([self.layout.num_bytes])
        self._view(buffer, [address or outbox.data_ptr() for address in memory.addresses])

    def y(self) -> Tensor:
        """[C, H] in the model's dtype."""
        return self.results

    def results_as(self, dtype: torch.dtype, width: int) -> Tensor:
        """[C, width] of the memory for results, in another dtype or of fewer columns."""
        num_bytes = self.capacity * width * dtype.itemsize
        return self._results[:num_bytes].view(dtype).view(self.capacity, width)

    def poison_results(self) -> None:
        """NaN in all results; other unused memory is filled by the kernel."""
        self.results.fill_(float("nan"))

    def _view(self, buffer: Tensor, addresses: list[int]) -> None:
        wire, at, rows = self._wire, self.layout, self.capacity

        def part(begin: int, width: int, dtype: torch.dtype) -> Tensor:
            num_bytes = rows * width * dtype.itemsize
            return buffer[begin : begin + num_bytes].view(dtype).view(rows, width)

        self.x = part(0, wire.hidden, wire.payload_dtype)
        self.scale = part(at.scale, num_blocks(wire.hidden), torch.float32) if wire.fp8 else None
        self.topk_idx = part(at.ids, wire.top_k, torch.int64)
        self.topk_weights = part(at.weights, wire.top_k, torch.float32)
        self.source = part(at.source, self._source_words, torch.int64)
        self._results = buffer[at.y :]
        self.results = part(at.y, wire.hidden, wire.dtype)
        words = [rows, at.scale, at.ids, at.weights, at.source, at.y]
        words += [self._state.data_ptr(), self._state[4:].data_ptr()]
        words += addresses + [0] * (MAX_RANKS - len(addresses))
        self.table = torch.tensor(words, dtype=torch.int64, device=self._device)
