"""Where a run's expert choices come from: a recorded trace, or a distribution.

Tokens are numbered through the whole run: token i of the tokens that rank r dispatches in step s is
number ``s * total + offset_r + i``, where ``offset_r`` counts the tokens of the ranks before r. A
source answers for any numbers, so that every rank can tell any token's routing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from crossdock.launch.config import Job
from crossdock.launch.hashing import hash64, uniform
from crossdock.launch.trace import Trace, read_trace

__all__ = ["RoutingSource", "SyntheticRouting", "TraceRouting", "make_routing"]


class RoutingSource(Protocol):
    """Expert choices by token number."""

    def at(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Routing of the tokens with these numbers (int64 [T]).

        Returns:
            topk_idx int64 [T, K] of distinct experts, topk_weights fp32 [T, K].
        """
        ...

    def num_wraps(self, num_tokens: int) -> int:
        """How often a run of that many tokens in all starts over."""
        ...


@dataclass(frozen=True, eq=False)
class TraceRouting:
    """Recorded choices, from one layer on; each time its N tokens are used up, the next layer."""

    trace: Trace
    layer: int = 0

    def at(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Routing [T, K] of the tokens with these numbers."""
        wraps = tokens.div(self.trace.num_tokens, rounding_mode="floor")
        layer = (self.layer + wraps) % self.trace.num_layers
        token = tokens % self.trace.num_tokens
        return (
            self.trace.topk_idx[layer, token].long(),
            self.trace.topk_weights[layer, token].float(),
        )

    def num_wraps(self, num_tokens: int) -> int:
        """How often a run of that many tokens in all moves to the next layer."""
        return max(num_tokens - 1, 0) // self.trace.num_tokens


@dataclass(frozen=True, kw_only=True)
class SyntheticRouting:
    """Choices drawn without replacement from a Zipf distribution; exponent 0 is uniform.

    Which experts are popular is shuffled by the seed. Drawing K of E without replacement with
    probabilities p is taking the K smallest of E exponential variables of rates p (Efraimidis and
    Spirakis 2006).
    """

    num_experts: int
    top_k: int
    exponent: float
    seed: int

    def at(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Routing [T, K] of the tokens with these numbers."""
        expert = torch.arange(self.num_experts)
        popularity_rank = hash64(expert, self.seed).argsort().argsort()
        rate = (popularity_rank + 1).double().pow(-self.exponent)
        draws = uniform(tokens.unsqueeze(1) * self.num_experts + expert, self.seed + 1)
        arrival = -draws.log() / rate
        topk_idx = arrival.topk(self.top_k, largest=False).indices
        column = torch.arange(self.top_k)
        weights = uniform(tokens.unsqueeze(1) * self.top_k + column, self.seed + 2)
        weights = weights.sort(descending=True).values
        return topk_idx, (weights / weights.sum(1, keepdim=True)).float()

    def num_wraps(self, num_tokens: int) -> int:
        """A distribution never starts over."""
        return 0


def make_routing(job: Job) -> RoutingSource:
    """The routing that a configuration asks for.

    Raises:
        ConfigError: The trace cannot be used.
    """
    section, moe = job.config.run.routing, job.config.moe
    if job.trace is not None:
        return TraceRouting(read_trace(job.trace), section.layer)
    return SyntheticRouting(
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        exponent=section.zipf or 0.0,
        seed=job.config.run.seed,
    )
