"""Scratch memory that layers share: taken in one call, reused by the next, locked in the end."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor

from crossdock.scratch.errors import ConfigError, LockedError
from crossdock.scratch.memory import GrowingBuffer, aligned, indexed_device, is_capturing

__all__ = ["WorkspaceManager", "simultaneous_bytes"]

T = TypeVar("T")
Request = tuple[Sequence[int], torch.dtype]


@runtime_checkable
class _HoldsCaptured(Protocol):
    def release_captured(self) -> None: ...


def simultaneous_bytes(*requests: Request) -> int:
    """Bytes that ``get_simultaneous`` needs for these (shape, dtype), alignment included."""
    return sum(aligned(torch.Size(shape).numel() * dtype.itemsize) for shape, dtype in requests)


class _Compartment:
    """What one (ubatch, lane) owns."""

    def __init__(self, device: torch.device) -> None:
        self.buffer = GrowingBuffer(device)
        self.resources: dict[Hashable, Any] = {}


class WorkspaceManager:
    """One byte buffer and one dictionary of persistent resources for each (ubatch, lane).

    A lane is a stream of work whose steps run one after another; work that runs side by side
    needs lanes (or ubatches) of its own, because every call hands out the same bytes. The current
    one is chosen per thread by ``use``; a thread that never chose is in ubatch 0, lane 0.

    Args:
        device: Where the memory lies.
        num_ubatches: Micro-batches that are in flight at the same time.
        num_lanes: Lanes of each micro-batch.
    """

    def __init__(
        self, device: torch.device | str, num_ubatches: int = 1, num_lanes: int = 1
    ) -> None:
        if num_ubatches < 1 or num_lanes < 1:
            raise ConfigError(
                f"num_ubatches = {num_ubatches}, num_lanes = {num_lanes}: each is at least 1"
            )
        self.device = indexed_device(device)
        self.num_ubatches = num_ubatches
        self.num_lanes = num_lanes
        self._compartments = {
            (ubatch, lane): _Compartment(self.device)
            for ubatch in range(num_ubatches)
            for lane in range(num_lanes)
        }
        self._chosen = threading.local()
        self._locked = False

    @contextmanager
    def use(self, *, ubatch: int = 0, lane: int = 0) -> Iterator[WorkspaceManager]:
        """Makes (ubatch, lane) the current one of this thread inside the ``with`` block.

        Raises:
            ConfigError: There is no such ubatch or lane.
        """
        if (ubatch, lane) not in self._compartments:
            raise ConfigError(
                f"workspace.use(ubatch={ubatch}, lane={lane}): this workspace was made with "
                f"num_ubatches={self.num_ubatches}, num_lanes={self.num_lanes}"
            )
        before = self._current_key()
        self._chosen.key = (ubatch, lane)
        try:
            yield self
        finally:
            self._chosen.key = before

    def get_simultaneous(self, *requests: Request) -> list[Tensor]:
        """Uninitialised tensors that lie side by side in the current buffer.

        Every call starts again at offset 0: take all that is needed at the same time in one call.

        Args:
            *requests: (shape, dtype) of each tensor.

        Returns:
            Contiguous tensors, each starting at a multiple of 256 bytes.

        Raises:
            LockedError: The buffer is too small and the workspace is locked, or a graph is being
                captured in a workspace that is not locked.
        """
        buffer = self._current().buffer
        wanted = simultaneous_bytes(*requests)
        if not self._locked and is_capturing(self.device):
            raise LockedError(
                f"{_caller()} takes workspace during graph capture: lock() it before, so that the "
                "addresses in the graph stay valid"
            )
        if wanted > buffer.num_bytes:
            if self._locked:
                ubatch, lane = self._current_key()
                raise LockedError(
                    f"{_caller()} wants {_megabytes(wanted)} of workspace, "
                    f"{_megabytes(buffer.num_bytes)} are present in ubatch {ubatch}, lane {lane}, "
                    "and the workspace is locked: warm up with the largest batch before lock(), "
                    "or unlock() first"
                )
            buffer.grow(wanted)
        views = []
        start = 0
        for shape, dtype in requests:
            views.append(buffer.view(start, tuple(shape), dtype))
            start += simultaneous_bytes((shape, dtype))
        return views

    def get_persistent_resource(self, key: Hashable, factory: Callable[[], T]) -> T:
        """The object under ``key`` of the current (ubatch, lane), made by ``factory`` once.

        Raises:
            LockedError: There is none and the workspace is locked.
        """
        resources = self._current().resources
        if key not in resources:
            if self._locked:
                raise LockedError(
                    f"{_caller()} asks for the persistent resource {key!r}, which does not exist, "
                    "and the workspace is locked: use it once before lock(), or unlock() first"
                )
            resources[key] = factory()
        return cast(T, resources[key])

    def lock(self) -> None:
        """Forbids growth and new resources, in every ubatch and lane."""
        self._locked = True

    def unlock(self) -> None:
        """Allows growth again. Graphs captured before keep the memory that they hold."""
        self._locked = False

    def is_locked(self) -> bool:
        """True between ``lock()`` and ``unlock()``."""
        return self._locked

    def capacity_bytes(self) -> int:
        """Bytes that ``get_simultaneous`` can hand out in the current (ubatch, lane) as it is."""
        return self._current().buffer.num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers together; persistent resources not counted."""
        return sum(compartment.buffer.num_bytes for compartment in self._compartments.values())

    def release_captured(self) -> None:
        """Frees memory that was outgrown while graphs held it: they must not be replayed again."""
        for compartment in self._compartments.values():
            compartment.buffer.release_captured()
            for resource in compartment.resources.values():
                if isinstance(resource, _HoldsCaptured):
                    resource.release_captured()

    def _current_key(self) -> tuple[int, int]:
        return getattr(self._chosen, "key", (0, 0))

    def _current(self) -> _Compartment:
        return self._compartments[self._current_key()]


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.3f} MB"


def _caller() -> str:
    """file:line of the nearest caller outside this module."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
