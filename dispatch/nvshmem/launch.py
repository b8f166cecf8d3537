"""The kernels of a dispatcher, one call each, on the current stream."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crossdock.dispatch.nvshmem.layout import CHUNK, MAX_RANKS, WARP
from crossdock.dispatch.nvshmem.runtime import Runtime
from crossdock.dispatch.wire import WireFormat
from crossdock.scratch.kernels import load_kernel

__all__ = ["PUTS", "SOURCES", "Kernels", "Launch", "PairKernels", "Ring", "Shape", "variants"]

SOURCES = Path(__file__).parent.parent / "cuda"
PUTS = SOURCES / "puts.cu"  # what calls NVSHMEM, compiled otherwise
C_TYPES = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half", torch.float32: "float"}
ID_TYPES = {torch.int32: "int", torch.int64: "long long"}

# The current stream of the device of an index, as the driver knows it; the current one's index.
# Much cheaper than torch's objects for them. A torch without CUDA has neither.
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)


class Shape(NamedTuple):
    """How a kernel that moves rows spreads over a GPU.

    Attributes:
        units: Of 8 elements that a lane takes at a time.
        threads: Of a block.
        blocks: On a multiprocessor; with ``threads``, this bounds the registers.
        stages: Of a lane's units, in shared memory, that are under way or worked on; at least 2.
    """

    units: int
    threads: int
    blocks: int
    stages: int

    def shared_bytes(self, itemsize: int, rows: int) -> int:
        """Of a block, for stages that hold so many rows of elements of this size."""
        return self.stages * rows * self.units * self.threads * 8 * itemsize

    def within(self, limit: int, itemsize: int, rows: int) -> Shape:
        """With as many stages as ``limit`` bytes of a multiprocessor's shared memory hold."""
        of_a_stage = self.shared_bytes(itemsize, rows) // self.stages
        stages = (limit // self.blocks - _STATIC_BYTES) // of_a_stage
        return self._replace(stages=max(2, min(self.stages, stages)))

    def macros(self) -> dict[str, str | int]:
        """As the sources know them."""
        return {name.upper(): value for name, value in self._asdict().items()}


# Of those tried on an H200; see docs/benchmarks.
ROWS = Shape(4, 128, 1, 6)
ROWS_FP8 = Shape(4, 128, 2, 4)
COMBINE = Shape(4, 128, 2, 2)
COMBINE_ROWS = 4  # results of a stage, BATCH in sums.cuh
ROUTE_PAIRS_THREADS = 256
_STATIC_BYTES = 4 << 10  # at most, of shared memory besides stages
_HOPPER = 227 << 10  # bytes of a multiprocessor's shared memory


def variants(shared_bytes: int = _HOPPER) -> list[tuple[str, dict[str, str | int]]]:
    """Every source with every set of macros that a dispatcher may ask for on such a GPU."""
    found: list[tuple[str, dict[str, str | int]]] = [("signals.cu", {})]
    found += [("route.cu", {"ID": name}) for name in ID_TYPES.values()]
    for dtype, name in C_TYPES.items():
        for fp8 in (False, True):
            rows = _rows_shape(dtype, fp8=fp8, shared_bytes=shared_bytes)
            found.append(("rows.cu", {"ELEM": name, "FP8": int(fp8), **rows.macros()}))
        combine = _combine_shape(dtype, shared_bytes=shared_bytes)
        for out in C_TYPES.values():
            found.append(("combine.cu", {"PARTIAL": name, "OUT": out, **combine.macros()}))
    pairs = {"route.cu": "route_pairs.cu", "rows.cu": "pairs.cu", "combine.cu": "combine_pairs.cu"}
    return found + [(pairs[name], macros) for name, macros in found if name in pairs]


def _rows_shape(dtype: torch.dtype, *, fp8: bool, shared_bytes: int) -> Shape:
    return (ROWS_FP8 if fp8 else ROWS).within(shared_bytes, dtype.itemsize, 1)


def _combine_shape(partial: torch.dtype, *, shared_bytes: int) -> Shape:
    return COMBINE.within(shared_bytes, partial.itemsize, COMBINE_ROWS)


class Launch:
    """One kernel, launched with as little as the driver needs: 64-bit words and a stream.

    Args:
        path: The source.
        name: The function.
        num_words: Its parameters, each a pointer or a ``long long``.
        device: Whose context; must be current when it is called.
        defines: Macros.
        shared_bytes: Of a block, besides what the source declares.
        runtime: Loads it, if it calls NVSHMEM; then it has no macros.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        num_words: int,
        *,
        device: torch.device,
        defines: dict[str, str | int],
        shared_bytes: int = 0,
        runtime: Runtime | None = None,
    ) -> None:
        self._index = device.index
        self._shared_bytes = shared_bytes
        if runtime is None:
            self._kernel = load_kernel(path, name, device=device, defines=defines)
            if shared_bytes:
                self._kernel.allow_shared_bytes(shared_bytes, device)
            self._handle = ctypes.c_void_p(self._kernel.handle)
        else:
            self._handle = ctypes.c_void_p(runtime.load_kernel(path, name))
        self._words = (ctypes.c_longlong * num_words)()
        at = ctypes.addressof(self._words)
        self._pointers = (ctypes.c_void_p * num_words)(*range(at, at + 8 * num_words, 8))
        self._stream = ctypes.c_void_p()
        self._launch = _driver().cuLaunchKernel

    def __call__(self, grid: int, block: int, *words: int) -> None:
        """Launch on the current stream.

        Raises:
            RuntimeError: The driver refused.
        """
        self._words[:] = words  # type: ignore[call-overload]
        self._stream.value = raw_stream(self._index)
        status = self._launch(
            self._handle,
            grid,
            1,
            1,
            block,
            1,
            1,
            self._shared_bytes,
            self._stream,
            self._pointers,
            None,
        )
        if status:
            raise RuntimeError(f"cuLaunchKernel: CUDA error {status}")


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


class Ring:
    """The kernel that tells every rank which call this one takes to the exchange of the hosts.

    Args:
        device: Whose kernel; must be current.
        calls: int64, the transport's ``Group``.
        runtime: If some rank is distant from another.
    """

    def __init__(self, device: torch.device, calls: Tensor, runtime: Runtime | None) -> None:
        self._calls = calls
        path = SOURCES / "signals.cu" if runtime is None else PUTS
        self._ring = Launch(path, "ring", 2, device=device, defines={}, runtime=runtime)

    def __call__(self, call: int) -> None:
        """Launch on the current stream."""
        self._ring(1, MAX_RANKS, self._calls.data_ptr(), call)


class Kernels:
    """Kernels for one wire format on one device, which must be current.

    Args:
        wire: Decides how rows are read and written.
        device: Whose kernels.
        num_sms: Streaming multiprocessors that rows may occupy; None for all.
        group: int64, the kernels' ``Group``.
        everywhere: Every rank gets a row of every token.
        poison: Unused memory of a bucket becomes NaN.
    """

    # Names and parameters of the kernels, which are others in another layout.
    _route_kernel, _route_words, _route_threads = "route", 9, CHUNK
    _rows_kernel, _rows_words = "rows", 9
    _combine_kernel = "combine"

    def __init__(
        self,
        wire: WireFormat,
        device: torch.device,
        num_sms: int | None,
        group: Tensor,
        *,
        everywhere: bool,
        poison: bool,
    ) -> None:
        self._device = device
        self._route_options: tuple[int, ...] = (everywhere,)
        self._rows_options: tuple[int, ...] = (poison,)
        self._group_tensor = group  # kept alive
        self._group = group.data_ptr()
        model = C_TYPES[wire.dtype]
        shared_bytes = _shared_bytes(device)
        self._rows_shape = _rows_shape(wire.dtype, fp8=wire.fp8, shared_bytes=shared_bytes)
        macros = self._rows_shape.macros() | {"ELEM": model, "FP8": int(wire.fp8)}
        present = torch.cuda.get_device_properties(device).multi_processor_count
        self._rows_blocks = _blocks(self._rows_shape, present, num_sms)
        self._rows_threads = self._rows_shape.threads + WARP  # one writes metadata
        self._combine_blocks = _blocks(COMBINE, present, num_sms)
        stages = self._rows_shape.shared_bytes(wire.dtype.itemsize, 1)
        self._rows = self._load(self._rows_kernel, self._rows_words, macros, shared_bytes=stages)
        self._arrive = self._load("arrive", 2, {}, source="signals")
        self._ready = self._load("ready", 1, {}, source="signals")
        self._meet = self._load("meet", 1, {}, source="signals")
        self._routes = {
            dtype: self._load(self._route_kernel, self._route_words, {"ID": c})
            for dtype, c in ID_TYPES.items()
        }
        # Loading may not be recorded in a graph, so it does not wait for first use.
        self._combines = {}
        for dtype, name in C_TYPES.items():
            shape = _combine_shape(dtype, shared_bytes=shared_bytes)
            self._combines[dtype] = self._load(
                self._combine_kernel,
                8,
                shape.macros() | {"PARTIAL": name, "OUT": model},
                shared_bytes=shape.shared_bytes(dtype.itemsize, COMBINE_ROWS),
            )

    def route(
        self,
        ids: Tensor,
        weights: Tensor,
        way: Tensor,
        call: int,
        slot: int = 0,
        pair_limit: int = -1,
    ) -> None:
        """Check ids [T, K] and weights, and find every row's place; agree on it in a ``call``."""
        tokens = ids.shape[0]
        self._routes[ids.dtype](
            max(1, -(-tokens // CHUNK)),
            self._route_threads,
            self._group,
            ids.data_ptr(),
            weights.data_ptr(),
            way.data_ptr(),
            tokens,
            *self._route_options,
            call,
            slot,
            pair_limit,
        )

    def rows(
        self,
        slot: Tensor,
        x: Tensor,
        way: Tensor,
        call: int,
        pair_limit: int,
        staged: bool,
    ) -> None:
        """Write rows to their places, and unless staged wait for everybody's.

        Records are exchanged before, unless :meth:`route` has done so in the ``call``.
        """
        self._rows(
            self._rows_blocks,
            self._rows_threads,
            self._group,
            slot.data_ptr(),
            x.data_ptr(),
            way.data_ptr(),
            x.shape[0],
            call,
            pair_limit,
            *self._rows_options,
            staged,
        )

    def arrive(self, slot: Tensor) -> None:
        """Wait for everybody's rows of a staged step."""
        self._arrive(1, MAX_RANKS, self._group, slot.data_ptr())

    def ready(self) -> None:
        """Announce that this rank's results may be read."""
        self._ready(1, MAX_RANKS, self._group)

    def meet(self) -> None:
        """Wait until all ranks have announced theirs."""
        self._meet(1, MAX_RANKS, self._group)

    def combine(
        self, slot: Tensor, way: Tensor, partial: torch.dtype, out: Tensor, *, announced: bool
    ) -> None:
        """Read results of as many columns as ``out`` [T, width] has, and sum them into it.

        Unless :meth:`ready` has announced this rank's results, that comes first.
        """
        self._combines[partial](
            self._combine_blocks,
            COMBINE.threads,
            self._group,
            slot.data_ptr(),
            way.data_ptr(),
            out.shape[0],
            out.data_ptr(),
            out.stride(0),
            out.shape[1],
            announced,
        )

    def _load(
        self,
        name: str,
        num_words: int,
        defines: dict[str, str | int],
        *,
        source: str | None = None,
        shared_bytes: int = 0,
    ) -> Launch:
        return Launch(
            SOURCES / f"{source or name}.cu",
            name,
            num_words,
            device=self._device,
            defines=defines,
            shared_bytes=shared_bytes,
        )


class PairKernels(Kernels):
    """The same calls for the expert-major layout.

    Args:
        wire: As for :class:`Kernels`.
        device: Likewise.
        num_sms: Likewise.
        group: Likewise.
        poison: Likewise.
        alignment: Rows of which each expert's first is a multiple.
    """

    _route_kernel, _route_words, _route_threads = "route_pairs", 8, ROUTE_PAIRS_THREADS
    _rows_kernel, _rows_words = "pairs", 10
    _combine_kernel = "combine_pairs"

    def __init__(
        self,
        wire: WireFormat,
        device: torch.device,
        num_sms: int | None,
        group: Tensor,
        *,
        poison: bool,
        alignment: int,
    ) -> None:
        super().__init__(wire, device, num_sms, group, everywhere=False, poison=poison)
        self._route_options, self._rows_options = (), (alignment, poison)


def _blocks(shape: Shape, present: int, num_sms: int | None) -> int:
    """Of a grid on so many multiprocessors, of which it may have ``num_sms``."""
    # Blocks spread over all multiprocessors before two share one.
    return present * shape.blocks if num_sms is None else min(num_sms, present)


@cache
def _shared_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)
