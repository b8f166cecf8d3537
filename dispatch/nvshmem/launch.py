"""The kernels of a dispatcher, one call each, on the current stream."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from crossdock.dispatch.nvshmem.layout import CHUNK, MAX_RANKS
from crossdock.dispatch.wire import WireFormat
from crossdock.scratch.kernels import Kernel, load_kernel

__all__ = ["SOURCES", "Kernels", "variants"]

SOURCES = Path(__file__).parent.parent / "cuda"
THREADS = 384  # of a block that moves rows; its registers let two of them share an SM
BLOCKS_PER_SM = 2
C_TYPES = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half", torch.float32: "float"}
ID_TYPES = {torch.int32: "int", torch.int64: "long long"}


def variants() -> list[tuple[str, dict[str, str | int]]]:
    """Every source with every set of macros that a dispatcher may ask for."""
    types = C_TYPES.values()
    found: list[tuple[str, dict[str, str | int]]] = [("signals.cu", {})]
    found += [("route.cu", {"ID": name}) for name in ID_TYPES.values()]
    found += [("rows.cu", {"ELEM": name, "FP8": fp8}) for name in types for fp8 in (0, 1)]
    found += [("combine.cu", {"PARTIAL": a, "OUT": b}) for a in types for b in types]
    return found


class Kernels:
    """Kernels for one wire format on one device.

    Args:
        wire: Decides how rows are read and written.
        device: Whose kernels.
        num_sms: Streaming multiprocessors that rows may occupy; None for all.
        group: int64, the kernels' ``Group``.
    """

    def __init__(
        self, wire: WireFormat, device: torch.device, num_sms: int | None, group: Tensor
    ) -> None:
        self._wire = wire
        self._device = device
        self._group = group
        present = torch.cuda.get_device_properties(device).multi_processor_count
        # Blocks spread over all multiprocessors before two share one.
        self._blocks = present * BLOCKS_PER_SM if num_sms is None else min(num_sms, present)
        self._rows = self._load("rows", {"ELEM": C_TYPES[wire.dtype], "FP8": int(wire.fp8)})
        self._arrive = self._load("arrive", source="signals")
        self._ready = self._load("ready", source="signals")
        self._meet = self._load("meet", source="signals")
        self._routes = {d: self._load("route", {"ID": c}) for d, c in ID_TYPES.items()}
        # Loading may not be recorded in a graph, so it does not wait for first use.
        self._combines = {
            dtype: self._load("combine", {"PARTIAL": name, "OUT": C_TYPES[wire.dtype]})
            for dtype, name in C_TYPES.items()
        }

    def route(self, ids: Tensor, weights: Tensor, way: Tensor, *, everywhere: bool) -> None:
        """Check ids [T, K] and weights, and find every row's place."""
        blocks = max(1, -(-len(ids) // CHUNK))
        self._routes[ids.dtype](
            blocks,
            CHUNK,
            self._group,
            ids,
            weights,
            way,
            len(ids),
            int(everywhere),
            device=self._device,
        )

    def rows(self, slot: Tensor, x: Tensor, way: Tensor, pair_limit: int, *, poison: bool) -> None:
        """Exchange records and write rows to their places."""
        self._rows(
            self._blocks,
            THREADS,
            self._group,
            slot,
            x,
            way,
            len(x),
            pair_limit,
            int(poison),
            device=self._device,
        )

    def arrive(self, slot: Tensor) -> None:
        """Wait for everybody's rows."""
        self._arrive(1, MAX_RANKS, self._group, slot, device=self._device)

    def ready(self) -> None:
        """Announce that this rank's results may be read."""
        self._ready(1, MAX_RANKS, self._group, device=self._device)

    def meet(self) -> None:
        """Wait until all ranks have announced theirs."""
        self._meet(1, MAX_RANKS, self._group, device=self._device)

    def combine(self, slot: Tensor, way: Tensor, partial: torch.dtype, out: Tensor) -> None:
        """Read results of as many columns as ``out`` [T, width] has, and sum them into it."""
        self._combines[partial](
            self._blocks,
            THREADS,
            self._group,
            slot,
            way,
            len(out),
            out,
            out.stride(0),
            out.shape[1],
            device=self._device,
        )

    def _load(
        self, name: str, defines: dict[str, str | int] | None = None, *, source: str | None = None
    ) -> Kernel:
        path = SOURCES / f"{source or name}.cu"
        return load_kernel(path, name, device=self._device, defines=defines)
