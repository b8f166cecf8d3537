"""What a link between GPUs carries at best: all ranks copy to all their peers at once."""

from __future__ import annotations

import torch
from torch import Tensor

from crossdock.dispatch.nvshmem import launch
from crossdock.dispatch.nvshmem.launch import SOURCES
from crossdock.dispatch.nvshmem.runtime import Symmetric
from crossdock.dispatch.transports.base import Transport

__all__ = ["NVLINK_GB_S", "NVLINK_SOURCE", "PEER_SHAPES", "PeerCopy"]

NVLINK_GB_S = 450.0
NVLINK_SOURCE = "NVIDIA H200 data sheet: NVLink 900 GB/s, both directions of a GPU together"
PEER_SHAPES = (
    {"UNITS": 4, "THREADS": 512, "BLOCKS": 1},
    {"UNITS": 4, "THREADS": 256, "BLOCKS": 4},
    {"UNITS": 4, "THREADS": 512, "BLOCKS": 2},
    {"UNITS": 8, "THREADS": 512, "BLOCKS": 1},
)
"""Of the kernel: 16-byte units that a lane takes at a time, threads of a block, blocks of an SM."""

_UNIT = 16


class PeerCopy:
    """The bytes that cross in one step, from each rank to each other one, and nothing else.

    What a rank keeps for itself is left out. Rows land where a dispatch puts them: in ascending
    order of their source ranks.

    Args:
        transport: Of these ranks; their GPUs reach each other's memory.
        memory: Room for what each rank receives, its own rows included.
        counts: int64 [R, R] rows from each rank (first) to each (second).
        row_bytes: Of a row, a multiple of 16.
    """

    def __init__(
        self, transport: Transport, memory: Symmetric, counts: Tensor, row_bytes: int
    ) -> None:
        rank, ranks = transport.rank, transport.world_size
        self._transport, self._memory = transport, memory
        self._counts, self._row_bytes = counts, row_bytes
        self._places = counts.cumsum(0) - counts
        # Ranks begin with different peers.
        peers = [(rank + i) % ranks for i in range(1, ranks)]
        lengths = counts[rank, peers] * row_bytes
        begins = lengths.cumsum(0) - lengths
        targets = [
            memory.addresses[peer] + int(self._places[rank, peer]) * row_bytes for peer in peers
        ]
        device = transport.device
        self.source = torch.full((int(lengths.sum()),), rank, dtype=torch.uint8, device=device)
        self._parts = list(zip(begins.tolist(), lengths.tolist(), targets, strict=True))
        self._begin = (begins // _UNIT).to(device)
        self._length = (lengths // _UNIT).to(device)
        self._to = torch.tensor(targets, dtype=torch.int64, device=device)
        self._kernels = [
            launch.Launch(SOURCES / "peers.cu", "copy_parts", 6, device=device, defines=dict(shape))
            for shape in PEER_SHAPES
        ]
        self._streams: list[torch.cuda.Stream] = []

    def forget(self) -> None:
        """Wipe what the others have copied here. Collective."""
        torch.cuda.synchronize(self._transport.device)
        self._memory.buffer.fill_(0xFF)
        torch.cuda.synchronize(self._transport.device)
        self._transport.exchange(torch.zeros(1, dtype=torch.int64))

    def by_kernel(self, index: int) -> None:
        """Plain 16-byte loads and stores in that of ``PEER_SHAPES``, on the current stream."""
        shape = PEER_SHAPES[index]
        properties = torch.cuda.get_device_properties(self._transport.device)
        tensors = (self.source, self._begin, self._length, self._to)
        self._kernels[index](
            properties.multi_processor_count * shape["BLOCKS"],
            shape["THREADS"],
            *(tensor.data_ptr() for tensor in tensors),
            len(self._parts),
            max(length for _, length, _ in self._parts) // _UNIT,
        )

    def by_engines(self) -> None:
        """The driver's copies, one stream a peer; the current stream waits for all."""
        from cuda.bindings import driver

        device = self._transport.device
        if not self._streams:
            self._streams = [torch.cuda.Stream(device) for _ in self._parts]  # type: ignore[no-untyped-call]
        here = torch.cuda.current_stream(device)
        for stream, (begin, length, target) in zip(self._streams, self._parts, strict=True):
            stream.wait_stream(here)
            if length:
                source = self.source.data_ptr() + begin
                (status,) = driver.cuMemcpyDtoDAsync(target, source, length, stream.cuda_stream)
                assert status == driver.CUresult.CUDA_SUCCESS
        for stream in self._streams:
            here.wait_stream(stream)

    def verify(self) -> None:
        """See that what all ranks have copied has arrived. Collective.

        Raises:
            AssertionError: It has not.
        """
        transport, here = self._transport, self._transport.rank
        torch.cuda.synchronize(transport.device)
        transport.exchange(torch.zeros(1, dtype=torch.int64))
        for source, rows in enumerate(self._counts[:, here].tolist()):
            begin = int(self._places[source, here]) * self._row_bytes
            if source != here:
                arrived = self._memory.buffer[begin : begin + rows * self._row_bytes]
                assert bool((arrived == source).all()), f"bytes of rank {source} are missing"
        transport.exchange(torch.zeros(1, dtype=torch.int64))
