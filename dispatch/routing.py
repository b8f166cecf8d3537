"""Which ranks each token goes to: once per rank, however many experts it wants there."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from crossdock.dispatch.agreement import Problem, ProblemKind
from crossdock.dispatch.placement import ExpertPlacement

__all__ = ["Counts", "RouteTable", "Routing", "find_problem"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Counts:
    """What all ranks have to know of one rank's routing.

    Attributes:
        rows: [R] rows to each rank.
        pairs: [R] (row, local expert) pairs to each rank.
    """

    rows: list[int]
    pairs: list[int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Routing(Counts):
    """One rank's tokens, by destination.

    Attributes:
        packed: int64 [n], token of each row that is put on the wire.
        ids: int32 [n, K], expert ids that those rows carry (what they mean is the algorithm's).
        weights: fp32 [n, K], weights that they carry.
        tokens: int64 [S], token of each row that comes home, by ascending (rank, token).
    """

    packed: Tensor
    ids: Tensor
    weights: Tensor
    tokens: Tensor


class RouteTable:
    """A placement as lookup tables on the device, with one more entry for -1, "no expert"."""

    def __init__(self, placement: ExpertPlacement, device: torch.device) -> None:
        self.ep_size = placement.ep_size
        self.num_experts = placement.num_experts
        # Index -1 reads the last entry.
        owner = torch.cat([placement.owner, torch.tensor([self.ep_size])])
        local = torch.cat([placement.local_ids, torch.tensor([-1])])
        self._owner = owner.to(device, torch.int32)
        self._local_id = local.to(device, torch.int32)

    def route(self, topk_idx: Tensor, topk_weights: Tensor) -> Routing:
        """Rows to the owners of each token's experts, once per owner, with local ids.

        A row's ids are -1 and its weights 0 where expert k lives elsewhere.

        Args:
            topk_idx: int64 [T, K], ids in [-1, E).
            topk_weights: fp32 [T, K].
        """
        # Unlike indexing, take reads single numbers without setting up rows of them.
        owner = torch.take(self._owner, topk_idx)
        wanted = self._wanted(owner)
        destination, tokens = wanted.nonzero().unbind(1)
        tokens = tokens.contiguous()
        # Masks as bits: all ones where an expert lives elsewhere. Ids become -1, weights 0.0.
        elsewhere = owner.index_select(0, tokens).ne(destination.int()[:, None]).int().neg_()
        ids = torch.take(self._local_id, topk_idx).index_select(0, tokens)
        weights = topk_weights.index_select(0, tokens)
        ids.bitwise_or_(elsewhere)
        weights.view(torch.int32).bitwise_and_(elsewhere.bitwise_not_())
        return Routing(
            packed=tokens,
            ids=ids,
            weights=weights,
            tokens=tokens,
            rows=wanted.sum(1).tolist(),
            pairs=self._count(owner),
        )

    def count_pairs(self, topk_idx: Tensor) -> list[int]:
        """[R] (token, expert) pairs that each rank owns."""
        return self._count(torch.take(self._owner, topk_idx))

    def count_rows(self, topk_idx: Tensor) -> list[int]:
        """[R] tokens that want each rank."""
        rows: list[int] = self._wanted(torch.take(self._owner, topk_idx)).sum(1).tolist()
        return rows

    def _wanted(self, owner: Tensor) -> Tensor:
        """Bool [R, T]: whether a token wants a rank, from the owners [T, K] of its experts."""
        wanted = torch.zeros(self.ep_size + 1, len(owner), dtype=torch.bool, device=owner.device)
        return wanted.scatter_(0, owner.t().long(), True)[: self.ep_size]

    def _count(self, owner: Tensor) -> list[int]:
        counts = torch.bincount(owner.flatten(), minlength=self.ep_size + 1)
        pairs: list[int] = counts[: self.ep_size].tolist()
        return pairs


def find_problem(topk_idx: Tensor, topk_weights: Tensor, num_experts: int) -> Problem | None:
    """What is wrong with ids and weights of matching shape [T, K], if anything is.

    An id must be in [-1, E) and stand once in its token; the weight of a real expert must be
    finite.
    """
    if topk_idx.numel() == 0:
        return None
    least, most = _extremes(topk_idx)
    if least < -1 or most >= num_experts:
        token, k = _first((topk_idx >= num_experts) | (topk_idx < -1))
        return Problem(
            ProblemKind.ROUTING,
            f"topk_idx[{token}, {k}] = {int(topk_idx[token, k])}: expert ids are 0 to "
            f"{num_experts - 1}, or -1 for none",
        )
    ordered = topk_idx.int().sort(dim=1).values
    repeated = ordered[:, 1:] == ordered[:, :-1]
    if repeated.any():
        repeated &= ordered[:, 1:] >= 0  # -1 may stand more than once
        if repeated.any():
            token, k = _first(repeated)
            return Problem(
                ProblemKind.ROUTING,
                f"topk_idx[{token}] names expert {int(ordered[token, k])} more than once: "
                "add up its weights and put -1 in the other places",
            )
    # Extremes are finite only if all weights are; but those of no expert may be anything.
    if not all(map(math.isfinite, _extremes(topk_weights))):
        bad = ~topk_weights.isfinite() & (topk_idx >= 0)
        if bad.any():
            token, k = _first(bad)
            return Problem(
                ProblemKind.ROUTING,
                f"topk_weights[{token}, {k}] = {float(topk_weights[token, k])} for expert "
                f"{int(topk_idx[token, k])}: weights must be finite",
            )
    return None


def _extremes(values: Tensor) -> tuple[float, float]:
    """The least and the largest; NaN if one is."""
    least, most = torch.stack(torch.aminmax(values)).tolist()
    return least, most


def _first(mask: Tensor) -> tuple[int, int]:
    token, k = mask.nonzero()[0].tolist()
    return token, k
