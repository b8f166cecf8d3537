"""NVSHMEM in this process: start, symmetric memory, the addresses of peers, stop."""

from __future__ import annotations

import ctypes
import hashlib
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crossdock.dispatch.nvshmem.heap import check_heaps, heap_environment
from crossdock.dispatch.transports.base import Transport
from crossdock.scratch.errors import TransportUnavailable

__all__ = ["Runtime", "Symmetric", "gpu_number", "import_bindings"]

logger = logging.getLogger(__name__)

INSTALL = "pip install 'crossdock[cu13]' (or cu12) nvshmem4py-cu13 (or -cu12)"
_GRANULE = 512 << 20  # bytes by which NVSHMEM's heap grows (NVSHMEM_CUMEM_GRANULARITY)
_ALIGN = 512  # of what it hands out


@dataclass(frozen=True, eq=False)
class Symmetric:
    """Memory that every rank has as much of.

    Attributes:
        buffer: uint8 [num_bytes], this rank's own.
        addresses: [R] address of each rank's, as this rank reaches it.
    """

    buffer: Tensor
    addresses: list[int]


class Runtime:
    """NVSHMEM over the ranks of a host transport. Collective, like all that allocates or frees.

    Args:
        host: Brings the unique id to all ranks.
        device: This rank's GPU.
        symmetric_heap: Bytes of symmetric memory, taken now and never more; None to grow.

    Raises:
        TransportUnavailable: NVSHMEM is not installed, did not start, or cannot reach some rank's
            memory; says what to do.
        DisagreementError: Ranks ask for different heaps.
        CapacityError: Some GPU has no room for the heap.
    """

    def __init__(
        self, host: Transport, device: torch.device, symmetric_heap: int | None = None
    ) -> None:
        self._device = device
        self._num_ranks = host.world_size
        self._heap = symmetric_heap
        self._taken: dict[int, int] = {}
        self._bindings = import_bindings()
        with heap_environment(symmetric_heap):
            self._start(host)

    def _start(self, host: Transport) -> None:
        unique_id = self._bindings.uniqueid()
        as_bytes = (ctypes.c_char * 128).from_address(unique_id.ptr)
        words = torch.zeros(19, dtype=torch.int64)
        if host.rank == 0:
            self._bindings.get_uniqueid(unique_id.ptr)
            words[:16] = torch.frombuffer(bytearray(as_bytes.raw), dtype=torch.int64)
        free, _ = torch.cuda.mem_get_info(self._device)
        words[16:] = torch.tensor([gpu_number(self._device), self._heap or 0, free])
        said = host.exchange(words)
        as_bytes.raw = said[0, :16].numpy().tobytes()
        gpus, heaps, room = said[:, 16:].T.tolist()
        check_heaps(heaps, gpus, room)
        self._sharers = gpus.count(gpus[host.rank])
        attributes = self._bindings.InitAttr()
        self._bindings.set_attr_uniqueid_args(
            host.rank, host.world_size, unique_id.ptr, attributes.ptr
        )
        try:
            self._bindings.hostlib_init_attr(
                self._bindings.Flags.INIT_WITH_UNIQUEID, attributes.ptr
            )
        except Exception as error:  # the binding's own class, which is not public
            heap = f" with symmetric_heap = {self._heap} bytes" if self._heap else ""
            raise TransportUnavailable(
                f"NVSHMEM did not start{heap} ({error}): NVSHMEM_DEBUG=INFO shows why; nccl does "
                "without it"
            ) from error

    def require_room(self, num_bytes: int) -> None:
        """Look for memory before all ranks take it together; local.

        Raises:
            MemoryError: There is not as much on this GPU, or in a heap of fixed size.
        """
        if self._heap is not None:
            left = self._heap - sum(self._taken.values())
            if num_bytes > left:
                raise MemoryError(
                    f"{num_bytes} bytes of symmetric memory: {left} of the {self._heap} bytes of "
                    "symmetric_heap are left. Raise symmetric_heap, leave it out so that the heap "
                    "grows, or send fewer tokens a step"
                )
            return
        need = (num_bytes + _GRANULE) * self._sharers
        if torch.cuda.mem_get_info(self._device)[0] < need:
            torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        if free < need:
            raise MemoryError(
                f"{num_bytes} bytes of symmetric memory for each of {self._sharers} rank(s) on "
                f"this GPU, and up to {_GRANULE} that NVSHMEM's heap grows by: {free} of {total} "
                "bytes are free. Leave torch less, send fewer tokens a step, or reserve the heap "
                "before the model is loaded (symmetric_heap)"
            )

    def allocate(self, num_bytes: int) -> Symmetric:
        """Take memory on every rank. Collective; the same size on all.

        Raises:
            MemoryError: There is not as much.
            TransportUnavailable: Some rank's memory cannot be reached by plain loads and stores.
        """
        address = self._bindings.malloc(num_bytes)
        if address == 0:
            taken, heap = sum(self._taken.values()), self._heap
            raise MemoryError(
                f"NVSHMEM has no {num_bytes} bytes of symmetric memory beside the {taken} in use: "
                + (
                    "the heap grows up to NVSHMEM_MAX_MEMORY_PER_GPU, 128 GiB by default"
                    if heap is None
                    else f"raise symmetric_heap, which is {heap} bytes and may be in pieces"
                )
            )
        self._taken[address] = -(-num_bytes // _ALIGN) * _ALIGN
        addresses = [self._bindings.ptr(address, rank) for rank in range(self._num_ranks)]
        if 0 in addresses:
            raise TransportUnavailable(
                f"rank {addresses.index(0)} has no address for its memory here (no NVLink or "
                "peer access between the GPUs): use nccl, or hierarchical across nodes"
            )
        buffer = torch.as_tensor(_Span(address, num_bytes), device=self._device)
        return Symmetric(buffer, addresses)

    def free(self, memory: Symmetric) -> None:
        """Give memory back on every rank. Collective."""
        address = memory.buffer.data_ptr()
        del self._taken[address]
        self._bindings.free(address)

    def stop(self) -> None:
        """Give everything back. Collective; a new runtime may be started afterwards."""
        self._bindings.hostlib_finalize()


class _Span:
    """Device memory that torch did not take, for ``torch.as_tensor``."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def gpu_number(device: torch.device) -> int:
    """A number for a GPU, the same in every process that sees it."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return int.from_bytes(hashlib.sha256(uuid.encode()).digest()[:7], "little")


def import_bindings() -> Any:
    """The library's bindings, loaded.

    Raises:
        TransportUnavailable: It or they are not installed; says what is missing.
    """
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib
        from nvshmem import bindings

        load_nvidia_dynamic_lib("nvshmem_host")
    except (ImportError, RuntimeError) as error:  # a library not found is a RuntimeError
        raise TransportUnavailable(f"no NVSHMEM ({error}): {INSTALL}") from error
    return bindings
