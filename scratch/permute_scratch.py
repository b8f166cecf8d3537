"""Index memory of a permutation, shared by all layers of one shape, kept across weight reloads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from crossdock.scratch.errors import ConfigError, LockedError
from crossdock.scratch.memory import GrowingBuffer, indexed_device, is_capturing
from crossdock.scratch.workspace import WorkspaceManager

__all__ = ["MAX_TILES", "PermuteScratch", "padded_experts", "permute_scratch"]

MAX_TILES = 128
"""Blocks that the kernels divide the ids among; each counts its experts into a row of its own."""


def padded_experts(num_local_experts: int) -> int:
    """The next power of two, at least a warp's 32."""
    return max(32, 1 << max(0, num_local_experts - 1).bit_length())


class PermuteScratch:
    """Where ``permute`` writes which row each pair came from. Index metadata only.

    Nothing in it depends on hidden size, top-k or dtype. It grows to exactly the pairs asked for:
    the received counts are known before, and a few bytes a pair are not worth a reserve. What a
    graph needs is that the largest count was seen before the lock.

    Attributes:
        num_experts: E, all experts of the layer, over all ranks.
        num_local_experts: Experts of this rank.
        device: Where the memory lies.
        offsets: int64 [num_local_experts + 1]. The pairs of local expert e are
            ``offsets[e]:offsets[e + 1]``.
        tile_counts: int32 [MAX_TILES, padded_experts(num_local_experts)] on CUDA, else empty.

    Args:
        num_experts: See above.
        num_local_experts: See above; 0 is legal.
        device: See above.
        is_locked: Asked before growing; True refuses.
    """

    def __init__(
        self,
        num_experts: int,
        num_local_experts: int,
        device: torch.device | str,
        *,
        is_locked: Callable[[], bool] = lambda: False,
    ) -> None:
        if not 0 <= num_local_experts <= num_experts:
            raise ConfigError(
                f"num_local_experts = {num_local_experts} of num_experts = {num_experts}: "
                "from 0 to num_experts"
            )
        self.num_experts = num_experts
        self.num_local_experts = num_local_experts
        self.device = indexed_device(device)
        self.offsets = torch.zeros(num_local_experts + 1, dtype=torch.int64, device=device)
        num_counts = MAX_TILES * padded_experts(num_local_experts)
        self.tile_counts = torch.empty(
            num_counts if self.device.type == "cuda" else 0, dtype=torch.int32, device=device
        )
        self._is_locked = is_locked
        self._buffer = GrowingBuffer(self.device)
        self._capacity = 0

    @property
    def capacity(self) -> int:
        """Pairs that fit."""
        return self._capacity

    @property
    def num_bytes(self) -> int:
        """Bytes that it occupies."""
        return self._buffer.num_bytes + self.offsets.nbytes + self.tile_counts.nbytes

    def reserve(self, pairs: int) -> None:
        """Makes room for ``pairs`` pairs; returns at once if they fit.

        Raises:
            LockedError: They do not fit and the workspace is locked, or a graph is being captured
                in a workspace that is not locked.
        """
        if not self._is_locked() and is_capturing(self.device):
            raise LockedError(
                "Permute scratch is used during graph capture: lock() the workspace before, so "
                "that the addresses in the graph stay valid"
            )
        if pairs <= self._capacity:
            return
        if self._is_locked():
            raise LockedError(
                f"Scratch growth is not allowed after locking: {pairs} pairs wanted, "
                f"{self._capacity} present (num_experts={self.num_experts}, "
                f"num_local_experts={self.num_local_experts}); warm up with the largest batch "
                "before lock(), or unlock() first"
            )
        self._capacity = 0  # should the allocation fail
        self._buffer.grow(pairs * torch.int32.itemsize)
        self._capacity = pairs

    def source(self, pairs: int) -> Tensor:
        """int32 [pairs]: room for the row of each pair."""
        return self._buffer.view(0, (pairs,), torch.int32)

    def release_captured(self) -> None:
        """Lets go of outgrown memory that graphs held; those graphs must not be replayed again."""
        self._buffer.release_captured()


def permute_scratch(
    workspace: WorkspaceManager,
    *,
    num_experts: int,
    num_local_experts: int,
    device: torch.device | str,
) -> PermuteScratch:
    """The permute scratch of this shape in the current (ubatch, lane) of ``workspace``.

    Layers of one shape share it, and so do expert objects that a weight reload rebuilds after
    locking: they find the same object with the same addresses.

    Raises:
        LockedError: There is none of this shape and the workspace is locked.
    """
    key = (PermuteScratch, num_experts, num_local_experts, indexed_device(device))
    return workspace.get_persistent_resource(
        key,
        lambda: PermuteScratch(
            num_experts, num_local_experts, device, is_locked=workspace.is_locked
        ),
    )
