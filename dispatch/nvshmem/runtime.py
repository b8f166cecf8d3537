"""NVSHMEM in this process: start, symmetric memory, the addresses of peers, stop."""

from __future__ import annotations

import ctypes
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crossdock.dispatch.digest import digest_of
from crossdock.dispatch.nvshmem.device import compile_with_nvshmem
from crossdock.dispatch.nvshmem.heap import check_heaps, heap_environment
from crossdock.dispatch.transports.base import Transport
from crossdock.scratch.errors import ConfigError, TransportUnavailable
from crossdock.scratch.kernels import arch_of, checked

__all__ = ["Runtime", "Symmetric", "gpu_number", "import_bindings", "pretended_reach"]

logger = logging.getLogger(__name__)

INSTALL = "pip install 'crossdock[cu13]' (or cu12) nvshmem4py-cu13 (or -cu12)"
# Where no transport of NVSHMEM's needs its proxy thread, that serves device-side exit and wait
# time-outs alone, which we do not use, and yet keeps a core of every rank busy. Set, this stops it
# there, and only there (NVSHMEM's documentation, "Environment Variables").
_PROXY = "NVSHMEM_DISABLE_LOCAL_ONLY_PROXY"
_PROBE = 16  # bytes
_GRANULE = 512 << 20  # bytes by which NVSHMEM's heap grows (NVSHMEM_CUMEM_GRANULARITY)
_ALIGN = 512  # of what it hands out


@dataclass(frozen=True, eq=False)
class Symmetric:
    """Memory that every rank has as much of.

    Attributes:
        buffer: uint8 [num_bytes], this rank's own.
        addresses: [R] address of each rank's, as this rank reaches it; 0 where only puts do.
    """

    buffer: Tensor
    addresses: list[int]


class Runtime:
    """NVSHMEM over the ranks of a host transport. Collective, like all that allocates or frees.

    Args:
        host: Brings the unique id to all ranks.
        device: This rank's GPU.
        symmetric_heap: Bytes of symmetric memory, taken now and never more; None to grow.

    Attributes:
        reach: bool [R, R] on the CPU, the same on all ranks: whether (row index) has an address for
            the memory of (column).

    Raises:
        ConfigError: CROSSDOCK_NVSHMEM_PUTS is neither "all" nor a number of ranks.
        TransportUnavailable: NVSHMEM is not installed or did not start; says what to do.
        DisagreementError: Ranks ask for different heaps.
        CapacityError: Some GPU has no room for the heap.
    """

    def __init__(
        self, host: Transport, device: torch.device, symmetric_heap: int | None = None
    ) -> None:
        self._device = device
        self._rank = host.rank
        self._num_ranks = host.world_size
        self._modules: dict[Path, Any] = {}
        self._heap = symmetric_heap
        self._taken: dict[int, int] = {}
        self._bindings = import_bindings()
        pretended = pretended_reach(host.world_size)[host.rank]
        os.environ.setdefault(_PROXY, "1")
        with heap_environment(symmetric_heap):
            self._start(host)
        probe = self._bindings.malloc(_PROBE)
        found = [bool(self._bindings.ptr(probe, rank)) for rank in range(host.world_size)]
        self._bindings.free(probe)
        self.reach = host.exchange((torch.tensor(found) & pretended).long()).bool()

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
        addresses = [
            self._bindings.ptr(address, rank) if reached else 0
            for rank, reached in enumerate(self.reach[self._rank].tolist())
        ]
        buffer = torch.as_tensor(_Span(address, num_bytes), device=self._device)
        return Symmetric(buffer, addresses)

    def free(self, memory: Symmetric) -> None:
        """Give memory back on every rank. Collective."""
        address = memory.buffer.data_ptr()
        del self._taken[address]
        self._bindings.free(address)

    def read(self, to: Tensor, memory: Symmetric, begin: int, rank: int) -> None:
        """Copy from a rank's symmetric memory, in order of the current stream.

        Args:
            to: uint8 [n] on this device; in symmetric memory too, if there is no address.
            memory: Of which the rank's part is wanted.
            begin: Byte at which to begin.
            rank: Whose.
        """
        from cuda.bindings import driver

        stream = torch.cuda.current_stream(self._device).cuda_stream
        if memory.addresses[rank]:
            source = memory.addresses[rank] + begin
            checked(driver.cuMemcpyDtoDAsync(to.data_ptr(), source, to.numel(), stream))
        else:
            source = memory.buffer.data_ptr() + begin
            self._bindings.getmem_on_stream(to.data_ptr(), source, to.numel(), rank, stream)

    def load_kernel(self, path: Path, name: str) -> int:
        """The driver's CUfunction of a kernel that calls NVSHMEM, until :meth:`stop`.

        Raises:
            JitError: See ``jit.compile_cuda``.
        """
        from cuda.bindings import driver

        if path not in self._modules:
            cubin = compile_with_nvshmem(path, arch=arch_of(self._device))
            (module,) = checked(driver.cuModuleLoadData(cubin))
            status = self._bindings.cumodule_init(int(module))
            if status:
                raise RuntimeError(f"NVSHMEM does not initialise {path.name}: status {status}")
            self._modules[path] = module
        (function,) = checked(driver.cuModuleGetFunction(self._modules[path], name.encode()))
        return int(function)

    def stop(self) -> None:
        """Give everything back. Collective; a new runtime may be started afterwards."""
        from cuda.bindings import driver

        for module in self._modules.values():
            self._bindings.cumodule_finalize(int(module))
            checked(driver.cuModuleUnload(module))
        self._modules.clear()
        self._bindings.hostlib_finalize()


def pretended_reach(ranks: int) -> Tensor:
    """Who may use the address that it has for whose memory, bool [R, R]: to try puts on one GPU.

    CROSSDOCK_NVSHMEM_PUTS says it: "all" (nobody but the rank itself), the number of ranks of a
    node (nobody of another node), or nothing (everybody).

    Raises:
        ConfigError: It is something else.
    """
    given = os.environ.get("CROSSDOCK_NVSHMEM_PUTS")
    if given is None:
        return torch.ones(ranks, ranks, dtype=torch.bool)
    size = "1" if given == "all" else given
    if not (size.isascii() and size.isdecimal() and int(size)):
        raise ConfigError(
            f"CROSSDOCK_NVSHMEM_PUTS = {given!r}: all, or how many ranks a node is to have"
        )
    node = torch.arange(ranks) // int(size)
    return node[:, None] == node


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
    return digest_of(str(torch.cuda.get_device_properties(device).uuid).encode())


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
