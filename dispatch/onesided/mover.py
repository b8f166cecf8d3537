"""Rows written once, at their final place on the receiver; results read where they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from crossdock.dispatch.algorithms.base import Algorithm, ordered_sum
from crossdock.dispatch.buckets import BucketMemory
from crossdock.dispatch.handle import Handle
from crossdock.dispatch.mover import Load, PackedMover
from crossdock.dispatch.onesided.transport import OneSidedTransport, SharedMemory
from crossdock.dispatch.routing import Counts, Routing
from crossdock.dispatch.rows import ReceivedRows
from crossdock.dispatch.transports.base import Work
from crossdock.dispatch.unpack import describe
from crossdock.dispatch.wire import WireFormat, gather_rows, num_blocks

__all__ = ["OneSidedMover"]

_PART_ALIGN = 64  # a cache line
_ROW_ALIGN = 16  # what experts may count on


@dataclass(frozen=True)
class _Bucket:
    """Some rank's bucket, as this rank reaches it; the parts lie one after the other.

    Attributes:
        x: [C, H] payload, in rows of a multiple of 16 bytes.
        y: [C, H] in the model's dtype.
        topk_idx: int64 [C, K].
        topk_weights: fp32 [C, K].
        source: int64 [C, 2].
        scale: fp32 [C, ceil(H / 128)], if the wire is fp8.
    """

    x: Tensor
    y: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    source: Tensor
    scale: Tensor | None = None

    @staticmethod
    def num_bytes(capacity: int, wire: WireFormat) -> int:
        """Size of a bucket's shared memory."""
        return sum(_round_up(capacity * part.row_bytes, _PART_ALIGN) for part in _parts(wire))

    @classmethod
    def of(cls, buffer: Tensor, capacity: int, wire: WireFormat) -> _Bucket:
        """The bucket in uint8 [num_bytes]."""
        tensors, begin = [], 0
        for part in _parts(wire):
            rows = buffer[begin : begin + capacity * part.row_bytes].view(capacity, part.row_bytes)
            tensors.append(rows.view(part.dtype)[:, : part.width])
            begin += _round_up(capacity * part.row_bytes, _PART_ALIGN)
        return cls(*tensors)


class _Part(NamedTuple):
    """A part of a bucket: elements of a row, and bytes from one row to the next."""

    dtype: torch.dtype
    width: int
    row_bytes: int

    @classmethod
    def dense(cls, dtype: torch.dtype, width: int) -> _Part:
        """Nothing between rows."""
        return cls(dtype, width, width * dtype.itemsize)


def _parts(wire: WireFormat) -> Iterator[_Part]:
    """In the order of :class:`_Bucket`."""
    payload_bytes = wire.hidden * wire.payload_dtype.itemsize
    yield _Part(wire.payload_dtype, wire.hidden, _round_up(payload_bytes, _ROW_ALIGN))
    yield _Part.dense(wire.dtype, wire.hidden)
    yield _Part.dense(torch.int64, wire.top_k)
    yield _Part.dense(torch.float32, wire.top_k)
    yield _Part.dense(torch.int64, 2)
    if wire.fp8:
        yield _Part.dense(torch.float32, num_blocks(wire.hidden))


def _round_up(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


class _SharedBucketMemory(BucketMemory):
    """A bucket that all ranks reach, metadata and all. ``y`` is there from the start."""

    def __init__(self, capacity: int, wire: WireFormat, transport: OneSidedTransport) -> None:
        super().__init__(0, wire, transport.device)
        self.capacity = capacity
        self.shared: SharedMemory = transport.allocate(_Bucket.num_bytes(capacity, wire))
        bucket = _Bucket.of(self.shared.buffer, capacity, wire)
        self.x, self.scale = bucket.x, bucket.scale
        self.topk_idx, self.topk_weights = bucket.topk_idx, bucket.topk_weights
        self.source = bucket.source
        self._y = bucket.y
        self.connected = False


class OneSidedMover(PackedMover):
    """Over transports whose ranks reach each other's memory.

    A step writes to a bucket only after every rank's record of that step, which a rank posts after
    its reads for the combine before; so neither rows nor results are overwritten while somebody
    needs them. For the same reason results are read at once, not when the caller waits for them.
    """

    connects = True
    transport: OneSidedTransport

    def __init__(
        self,
        algorithm: Algorithm,
        wire: WireFormat,
        num_slots: int,
        transport: OneSidedTransport,
    ) -> None:
        super().__init__(algorithm, wire, num_slots)
        self.transport = transport
        # By rank and slot.
        self._buckets: dict[tuple[int, int], _Bucket] = {}

    def allocate(self, capacity: int) -> BucketMemory:
        """Memory that others can reach."""
        return _SharedBucketMemory(capacity, self.wire, self.transport)

    def connect(self, memories: Sequence[tuple[int, BucketMemory]]) -> Callable[[], None]:
        """Map what other ranks have newly taken; those that have nothing new say so."""
        mine: list[_SharedBucketMemory] = []
        offers: list[tuple[SharedMemory, list[int]]] = []
        for slot, memory in memories:
            assert isinstance(memory, _SharedBucketMemory)
            mine.append(memory)
            new_here = not memory.connected
            offered = memory.shared if new_here else self.transport.allocate(0)
            offers.append((offered, [slot, memory.capacity, new_here]))
        new = {}
        for by_rank in self.transport.share(offers):
            for rank, (buffer, (slot, capacity, is_new)) in enumerate(by_rank):
                if is_new:
                    new[rank, slot] = _Bucket.of(buffer, capacity, self.wire)

        def commit() -> None:
            self._buckets |= new
            for memory in mine:
                memory.shared.settle()
                memory.connected = True

        return commit

    def load(self, slot: int, x: Tensor, routing: Counts) -> Load:
        """Quantise if the wire does; rows are gathered when their places are known."""
        return Load(*self.wire.encode(x))

    def send(self, load: Load, handle: Handle, memory: BucketMemory, *, staged: bool) -> Work:
        """Gather each destination's rows straight into its bucket, and announce them."""
        rank, plan, routing = self.transport.rank, handle.plan, handle.routing
        assert isinstance(routing, Routing)
        first = plan.first[rank].tolist()
        counts = plan.send_rows(rank)
        # Where every rank gets every row, one set of ids and weights serves them all.
        once = len(routing.packed) != sum(counts)
        tokens, payloads, scales = [], [], []
        begin = 0
        for peer, count in enumerate(counts):
            self.transport.bytes_to[peer] += count * self.wire.row_bytes
            if count:
                rows = slice(0, count) if once else slice(begin, begin + count)
                places = slice(first[peer], first[peer] + count)
                bucket = self._buckets[peer, handle.slots[peer]]
                tokens.append(routing.packed[rows])
                payloads.append(bucket.x[places])
                if bucket.scale is not None:
                    scales.append(bucket.scale[places])
                bucket.topk_idx[places] = routing.ids[rows]
                bucket.topk_weights[places] = routing.weights[rows]
                bucket.source[places, 0] = rank
                bucket.source[places, 1] = routing.packed[rows]
                begin += count
        gather_rows(load.rows, tokens, payloads)
        if load.extra is not None:
            gather_rows(load.extra, tokens, scales)
        return _Arrival(
            self.transport,
            [peer for peer, n in enumerate(plan.recv_rows(rank)) if n],
            self.transport.announce_rows(),
        )

    def receive(self, memory: BucketMemory, handle: Handle, *, debug: bool) -> ReceivedRows:
        """The metadata is in place already."""
        return describe(memory, handle, self.wire, self.algorithm, debug=debug)

    def load_back(self, slot: int, y: Tensor, handle: Handle, memory: BucketMemory) -> Load:
        """Nothing to do for ``rows.y``; other results are copied there."""
        if y.dtype != self.wire.dtype:
            return super().load_back(slot, y, handle, memory)
        own = memory.y()
        if y.data_ptr() != own.data_ptr() or not y.is_contiguous():
            num_rows = handle.plan.received[self.transport.rank]
            own[:num_rows].copy_(y[:num_rows])
        return Load(own)

    def send_back(
        self, load: Load, handle: Handle, out: Tensor, *, staged: bool
    ) -> Callable[[], None]:
        """Sum results where they lie; the agreement has said that they are there."""
        if load.rows.dtype != self.wire.dtype:
            return super().send_back(load, handle, out, staged=staged)
        rank, plan, routing = self.transport.rank, handle.plan, handle.routing
        assert isinstance(routing, Routing)
        first, counts = plan.first[rank].tolist(), plan.send_rows(rank)
        parts = []
        for peer, count in enumerate(counts):
            # What others read here counts as sent to them.
            num_bytes = plan.recv_rows(rank)[peer] * self.wire.hidden * self.wire.dtype.itemsize
            self.transport.bytes_to[peer] += num_bytes
            if count:
                y = self._buckets[peer, handle.slots[peer]].y
                parts.append(y[first[peer] : first[peer] + count])
            else:
                parts.append(load.rows[:0])
        ordered_sum(parts, torch.split(routing.tokens, counts), out)
        return _nothing

    def release(self) -> None:
        """Let go of other ranks' memory too."""
        super().release()
        self._buckets.clear()


class _Arrival:
    """Rows that other ranks write to this rank's bucket."""

    def __init__(self, transport: OneSidedTransport, sources: list[int], epoch: int) -> None:
        self._transport, self._sources, self._epoch = transport, sources, epoch

    def wait(self) -> None:
        self._transport.await_rows(self._sources, self._epoch)


def _nothing() -> None:
    """Results were summed at once."""
