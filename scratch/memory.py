"""A byte buffer that grows, and that remembers which of its memory a CUDA graph may still hold."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ALIGNMENT", "GrowingBuffer", "aligned", "indexed_device", "is_capturing"]

ALIGNMENT = 256
"""Bytes that every view into a buffer starts at a multiple of."""


def aligned(num_bytes: int) -> int:
    """``num_bytes`` rounded up to a multiple of ``ALIGNMENT``."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def indexed_device(device: torch.device | str) -> torch.device:
    """``cuda`` as ``cuda:N``, so that a device equals the one that its tensors name."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def is_capturing(device: torch.device) -> bool:
    """True while the current stream of a CUDA ``device`` records a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class GrowingBuffer:
    """One contiguous run of bytes; grows by replacement, never shrinks.

    Growth drops the old memory before it takes the new, so the peak is the larger of the two and
    not their sum. Memory that was handed out during graph capture is the exception: the graph has
    its address, so it stays alive until ``release_captured()``.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self._in_graph = False
        self._captured: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that are there now."""
        return self._bytes.numel()

    def grow(self, num_bytes: int) -> None:
        """Replaces the memory by ``num_bytes`` of uninitialised memory."""
        if self._in_graph:
            self._captured.append(self._bytes)
            self._in_graph = False
        self._bytes = torch.empty(0, dtype=torch.uint8, device=self.device)
        memory = torch.empty(num_bytes + ALIGNMENT - 1, dtype=torch.uint8, device=self.device)
        start = -memory.data_ptr() % ALIGNMENT  # CPU allocations are aligned to 64 bytes only
        self._bytes = memory[start : start + num_bytes]

    def view(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor over the bytes from ``start`` on."""
        self._in_graph |= is_capturing(self.device)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self._bytes[start : start + num_bytes].view(dtype).view(shape)

    def release_captured(self) -> None:
        """Lets go of outgrown memory that graphs held; those graphs must not be replayed again."""
        self._captured.clear()
