"""The tokens of a job's first step, on any rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from crossdock.launch.batch import make_batch
from crossdock.launch.config import Job
from crossdock.launch.hashing import hidden_states
from crossdock.launch.routing import make_routing

__all__ = ["Tokens", "tokens_of"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """Inputs of a dispatch.

    Attributes:
        x: [T, H].
        topk_idx: int64 [T, K].
        topk_weights: fp32 [T, K].
    """

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor

    def first(self, count: int) -> Tokens:
        """The first ``count`` of them."""
        return Tokens(
            x=self.x[:count],
            topk_idx=self.topk_idx[:count],
            topk_weights=self.topk_weights[:count],
        )

    def to(self, device: torch.device) -> Tokens:
        """The same on a device."""
        return Tokens(
            x=self.x.to(device),
            topk_idx=self.topk_idx.to(device),
            topk_weights=self.topk_weights.to(device),
        )


def tokens_of(job: Job, rank: int) -> Tokens:
    """Tokens that a rank dispatches in the first step; any rank can make them."""
    batch = make_batch(job, rank)
    numbers = batch.to_ep(batch.numbers)
    topk_idx, topk_weights = make_routing(job).at(numbers)
    x = hidden_states(numbers, job.config.moe.hidden, seed=job.config.run.seed, dtype=job.dtype)
    return Tokens(x=x, topk_idx=topk_idx, topk_weights=topk_weights)
