"""The kernels of a dispatcher, one call each, on the current stream."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crossdock.dispatch.nvshmem.layout import CHUNK, MAX_RANKS
from crossdock.dispatch.wire import WireFormat
from crossdock.scratch.kernels import load_kernel

__all__ = ["SOURCES", "Kernels", "Launch", "Shape", "variants"]

SOURCES = Path(__file__).parent.parent / "cuda"
C_TYPES = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half", torch.float32: "float"}
ID_TYPES = {torch.int32: "int", torch.int64: "long long"}


class Shape(NamedTuple):
    """How a kernel that moves rows spreads over a GPU.

    Attributes:
        units: Of 8 elements that a lane takes at a time.
        threads: Of a block.
        blocks: On a multiprocessor; with ``threads``, this bounds the registers.
    """

    units: int
    threads: int
    blocks: int

    def macros(self) -> dict[str, str | int]:
        """As the sources know them."""
        return {"UNITS": self.units, "THREADS": self.threads, "BLOCKS": self.blocks}


# Of those tried on an H200; see docs/benchmarks.
ROWS = Shape(4, 384, 2)
ROWS_FP8 = Shape(4, 384, 2)
COMBINE = Shape(1, 384, 2)


def variants() -> list[tuple[str, dict[str, str | int]]]:
    """Every source with every set of macros that a dispatcher may ask for."""
    types = C_TYPES.values()
    found: list[tuple[str, dict[str, str | int]]] = [("signals.cu", {})]
    found += [("route.cu", {"ID": name}) for name in ID_TYPES.values()]
    found += [
        ("rows.cu", {"ELEM": name, "FP8": fp8, **(ROWS_FP8 if fp8 else ROWS).macros()})
        for name in types
        for fp8 in (0, 1)
    ]
    found += [
        ("combine.cu", {"PARTIAL": partial, "OUT": out, **COMBINE.macros()})
        for partial in types
        for out in types
    ]
    return found


class Launch:
    """One kernel, launched with as little as the driver needs: 64-bit words and a stream.

    Args:
        path: The source.
        name: The function.
        num_words: Its parameters, each a pointer or a ``long long``.
        device: Whose context; must be current when it is called.
        defines: Macros.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        num_words: int,
        *,
        device: torch.device,
        defines: dict[str, str | int],
    ) -> None:
        self._kernel = load_kernel(path, name, device=device, defines=defines)
        self._device = device
        self._handle = ctypes.c_void_p(self._kernel.handle)
        self._words = (ctypes.c_longlong * num_words)()
        at = ctypes.addressof(self._words)
        self._pointers = (ctypes.c_void_p * num_words)(*range(at, at + 8 * num_words, 8))
        self._launch = _driver().cuLaunchKernel

    def __call__(self, grid: int, block: int, *words: int) -> None:
        """Launch on the current stream.

        Raises:
            RuntimeError: The driver refused.
        """
        self._words[:] = words  # type: ignore[call-overload]
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        status = self._launch(
            self._handle, grid, 1, 1, block, 1, 1, 0, stream, self._pointers, None
        )
        if status:
            raise RuntimeError(f"cuLaunchKernel: CUDA error {status}")


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


class Kernels:
    """Kernels for one wire format on one device, which must be current.

    Args:
        wire: Decides how rows are read and written.
        device: Whose kernels.
        num_sms: Streaming multiprocessors that rows may occupy; None for all.
        group: int64, the kernels' ``Group``.
    """

    def __init__(
        self, wire: WireFormat, device: torch.device, num_sms: int | None, group: Tensor
    ) -> None:
        self._device = device
        self._num_sms = num_sms
        self._group_tensor = group  # kept alive
        self._group = group.data_ptr()
        model = C_TYPES[wire.dtype]
        self._rows_shape = ROWS_FP8 if wire.fp8 else ROWS
        macros = self._rows_shape.macros() | {"ELEM": model, "FP8": int(wire.fp8)}
        self._rows = self._load("rows", 8, macros)
        self._arrive = self._load("arrive", 2, {}, source="signals")
        self._ready = self._load("ready", 1, {}, source="signals")
        self._meet = self._load("meet", 1, {}, source="signals")
        self._routes = {d: self._load("route", 6, {"ID": c}) for d, c in ID_TYPES.items()}
        # Loading may not be recorded in a graph, so it does not wait for first use.
        self._combines = {
            dtype: self._load("combine", 8, COMBINE.macros() | {"PARTIAL": c, "OUT": model})
            for dtype, c in C_TYPES.items()
        }

    def route(self, ids: Tensor, weights: Tensor, way: Tensor, *, everywhere: bool) -> None:
        """Check ids [T, K] and weights, and find every row's place."""
        tokens = len(ids)
        self._routes[ids.dtype](
            max(1, -(-tokens // CHUNK)),
            CHUNK,
            self._group,
            ids.data_ptr(),
            weights.data_ptr(),
            way.data_ptr(),
            tokens,
            everywhere,
        )

    def rows(
        self, slot: Tensor, x: Tensor, way: Tensor, pair_limit: int, *, poison: bool, staged: bool
    ) -> None:
        """Exchange records, write rows to their places, and unless staged wait for everybody's."""
        self._rows(
            self._blocks(self._rows_shape),
            self._rows_shape.threads,
            self._group,
            slot.data_ptr(),
            x.data_ptr(),
            way.data_ptr(),
            len(x),
            pair_limit,
            poison,
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
            self._blocks(COMBINE),
            COMBINE.threads,
            self._group,
            slot.data_ptr(),
            way.data_ptr(),
            len(out),
            out.data_ptr(),
            out.stride(0),
            out.shape[1],
            announced,
        )

    def _blocks(self, shape: Shape) -> int:
        present = _num_sms(self._device)
        # Blocks spread over all multiprocessors before two share one.
        return present * shape.blocks if self._num_sms is None else min(self._num_sms, present)

    def _load(
        self, name: str, num_words: int, defines: dict[str, str | int], *, source: str | None = None
    ) -> Launch:
        path = SOURCES / f"{source or name}.cu"
        return Launch(path, name, num_words, device=self._device, defines=defines)


@cache
def _num_sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
