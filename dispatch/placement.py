"""Which rank owns which expert, and under which local id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from crossdock.dispatch.digest import digest_of
from crossdock.scratch.errors import ConfigError

__all__ = ["ExpertPlacement"]


@dataclass(frozen=True, eq=False)
class ExpertPlacement:
    """Owner of every expert; local ids follow the order of global ids on each rank.

    Attributes:
        owner: int64 [E] on the CPU, EP rank of each expert.
        ep_size: R, ranks of the EP group. A rank may own nothing.
    """

    owner: Tensor
    ep_size: int

    @classmethod
    def linear(cls, num_experts: int, ep_size: int) -> ExpertPlacement:
        """Consecutive experts to consecutive ranks; the first E % R ranks hold one more."""
        _check_sizes(num_experts, ep_size)
        base, extra = divmod(num_experts, ep_size)
        sizes = torch.full((ep_size,), base, dtype=torch.int64)
        sizes[:extra] += 1
        return cls(torch.repeat_interleave(torch.arange(ep_size), sizes), ep_size)

    @classmethod
    def round_robin(cls, num_experts: int, ep_size: int) -> ExpertPlacement:
        """Expert e to rank e % R."""
        _check_sizes(num_experts, ep_size)
        return cls(torch.arange(num_experts) % ep_size, ep_size)

    @classmethod
    def from_owner(
        cls, owner: Tensor | Sequence[int], ep_size: int | None = None
    ) -> ExpertPlacement:
        """An explicit owner for each expert.

        Args:
            owner: Integers [E].
            ep_size: R; the largest owner + 1 if not given.

        Raises:
            ConfigError: Not a non-empty vector of whole numbers, or an owner outside [0, R).
        """
        owner = torch.as_tensor(owner)
        if owner.dim() != 1 or owner.numel() == 0 or owner.is_floating_point():
            raise ConfigError(
                f"owner: a vector of whole numbers, one an expert; got {owner.dtype} "
                f"of shape {tuple(owner.shape)}"
            )
        owner = owner.to("cpu", torch.int64, copy=True)
        size = int(owner.max()) + 1 if ep_size is None else ep_size
        _check_sizes(owner.numel(), size)
        outside = ((owner < 0) | (owner >= size)).nonzero()
        if len(outside):
            expert = int(outside[0])
            raise ConfigError(
                f"owner[{expert}] = {int(owner[expert])}: ranks are 0 to {size - 1}, for "
                f"ep_size {size}"
            )
        return cls(owner, size)

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.owner.numel())

    @cached_property
    def local_ids(self) -> Tensor:
        """int64 [E]: each expert's id on the rank that owns it."""
        ids = torch.empty_like(self.owner)
        order = torch.argsort(self.owner, stable=True)
        counts = torch.bincount(self.owner, minlength=self.ep_size)
        starts = torch.cumsum(counts, 0) - counts
        ids[order] = torch.arange(self.num_experts) - starts[self.owner[order]]
        return ids

    @cached_property
    def digest(self) -> int:
        """63-bit hash of the owners, by which ranks find out that their placements differ."""
        raw = self.owner.numpy().tobytes() + self.ep_size.to_bytes(8, "little")
        return digest_of(raw)

    def num_local_experts(self, rank: int) -> int:
        """E_local, experts that ``rank`` owns."""
        return int((self.owner == rank).sum())

    def local_experts(self, rank: int) -> Tensor:
        """int64 [E_local]: global ids of the experts of ``rank``, in the order of local ids."""
        return (self.owner == rank).nonzero().flatten()

    def expert_map(self, rank: int) -> Tensor:
        """int32 [E]: local id of each expert on ``rank``, -1 where another rank owns it."""
        return torch.where(self.owner == rank, self.local_ids, -1).to(torch.int32)


def _check_sizes(num_experts: int, ep_size: int) -> None:
    for name, value in (("num_experts", num_experts), ("ep_size", ep_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} = {value!r}: a whole number above 0")
