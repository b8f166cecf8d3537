"""Send-side memory of a slot: packed rows on their way out, then results on their way home."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Staging"]


class Staging:
    """One byte buffer that keeps the largest size asked of it.

    A step needs it for one thing at a time: the rows that leave have left before results come home.
    Fresh memory each time would cost a page fault for every 4 KiB.
    """

    def __init__(self, device: torch.device) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self._bytes.numel()

    def take(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised [rows, width]; what was taken before is overwritten."""
        num_bytes = rows * width * dtype.itemsize
        if num_bytes > self._bytes.numel():
            # Memory taken in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                self._bytes = self._bytes.new_empty(0)  # let go of the old before taking the new
                self._bytes = self._bytes.new_empty(num_bytes)
        return self._bytes[:num_bytes].view(dtype).view(rows, width)
