"""The oracle: what dispatch and combine mean, in plain torch and plain loops, on one process.

Every fast path is compared with this one. Nothing here is clever, and nothing else uses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from crossdock.dispatch.placement import ExpertPlacement
from crossdock.dispatch.wire import dequantize, quantize

__all__ = [
    "ReferencePairs",
    "ReferenceRows",
    "reference_by_expert",
    "reference_combine",
    "reference_dispatch",
    "reference_weighted_sums",
]


@dataclass(frozen=True, kw_only=True)
class ReferenceRows:
    """Rows that one rank receives; fields as in ``ReceivedRows``, without unused capacity.

    Attributes:
        x: [n, H], in the dtype of the inputs (an fp8 wire is dequantised).
        topk_idx: int64 [n, K] local ids, -1 elsewhere.
        topk_weights: fp32 [n, K].
        source: int64 [n, 2], (rank, token).
        rows_per_expert: int64 [num_local_experts].
    """

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    source: Tensor
    rows_per_expert: Tensor


@dataclass(frozen=True, kw_only=True)
class ReferencePairs:
    """Rows of the expert-major layout: one a pair, without the rows that alignment adds.

    Attributes:
        x: [P, H], in the dtype of the inputs.
        expert: int64 [P] local ids, ascending.
        weight: fp32 [P].
        source: int64 [P, 3], (rank, token, column).
    """

    x: Tensor
    expert: Tensor
    weight: Tensor
    source: Tensor


def reference_dispatch(
    x: list[Tensor],
    topk_idx: list[Tensor],
    topk_weights: list[Tensor],
    placement: ExpertPlacement,
    *,
    algorithm: Literal["alltoall", "allgather"] = "alltoall",
    wire: Literal["payload", "fp8"] = "payload",
) -> list[ReferenceRows]:
    """Rows of every rank, from the tokens of every rank.

    Args:
        x: [R] tensors [T_r, H].
        topk_idx: [R] integer tensors [T_r, K].
        topk_weights: [R] fp32 tensors [T_r, K].
        placement: Who owns which expert.
        algorithm: With ``"allgather"`` every rank receives every token.
        wire: With ``"fp8"`` rows are quantised and dequantised.
    """
    received = []
    for rank in range(placement.ep_size):
        expert_map = placement.expert_map(rank).tolist()
        rows, ids, weights, source = [], [], [], []
        for sender in range(placement.ep_size):
            for token in range(len(x[sender])):
                chosen = topk_idx[sender][token].tolist()
                local = [expert_map[e] if e >= 0 else -1 for e in chosen]
                if algorithm == "alltoall" and all(e < 0 for e in local):
                    continue
                rows.append(x[sender][token])
                ids.append(local)
                given = topk_weights[sender][token].tolist()
                weights.append([w if e >= 0 else 0.0 for w, e in zip(given, local, strict=True)])
                source.append([sender, token])
        top_k = topk_idx[0].shape[1]
        stacked = torch.stack(rows) if rows else x[0][:0]
        local_ids = torch.tensor(ids, dtype=torch.int64).view(-1, top_k)
        counts = [int((local_ids == e).sum()) for e in range(placement.num_local_experts(rank))]
        received.append(
            ReferenceRows(
                x=dequantize(*quantize(stacked), stacked.dtype) if wire == "fp8" else stacked,
                topk_idx=local_ids,
                topk_weights=torch.tensor(weights, dtype=torch.float32).view(-1, top_k),
                source=torch.tensor(source, dtype=torch.int64).view(-1, 2),
                rows_per_expert=torch.tensor(counts, dtype=torch.int64),
            )
        )
    return received


def reference_by_expert(rows: ReferenceRows) -> ReferencePairs:
    """The pairs of one rank's rows by local expert, ties by (source rank, token)."""
    pairs = [
        (expert, row, column)
        for row, experts in enumerate(rows.topk_idx.tolist())
        for column, expert in enumerate(experts)
        if expert >= 0
    ]
    expert, row, column = torch.tensor(sorted(pairs), dtype=torch.int64).view(-1, 3).unbind(1)
    return ReferencePairs(
        x=rows.x[row],
        expert=expert,
        weight=rows.topk_weights[row, column],
        source=torch.cat([rows.source[row], column[:, None]], dim=1),
    )


def reference_weighted_sums(y: Tensor, pairs: ReferencePairs, rows: ReferenceRows) -> Tensor:
    """Results [n, H] of one rank's rows, from those of its pairs: what an unpermute gives.

    The fp32 sum of weight x result by ascending column, each step rounded once as by a fused
    multiply-add, and the sum rounded to y's dtype.

    Args:
        y: [P, H], one result a pair.
        pairs: Of the rank.
        rows: Of the rank.
    """
    places = {(rank, token): row for row, (rank, token) in enumerate(rows.source.tolist())}
    sums = torch.zeros(len(rows.x), y.shape[1])
    for pair in pairs.source[:, 2].argsort(stable=True).tolist():
        rank, token, _ = pairs.source[pair].tolist()
        row = sums[places[rank, token]]
        row.copy_(row.double() + pairs.weight[pair].double() * y[pair].double())
    return sums.to(y.dtype)


def reference_combine(
    y: list[Tensor],
    source: list[Tensor],
    num_tokens: list[int],
    dtype: torch.dtype,
    *,
    order: Literal["rank", "two-level"] = "rank",
    ranks_per_node: int = 1,
) -> list[Tensor]:
    """Results of every rank's tokens, from the partial results of every rank's rows.

    ``order="rank"``: fp32 sum in ascending rank order, rounded once. ``order="two-level"``: fp32
    sum in ascending rank order within each node, rounded to y's dtype, then fp32 sum of those in
    ascending node order, rounded once.

    Args:
        y: [R] tensors [n_r, H], one partial result a row.
        source: [R] int64 [n_r, 2], where each row came from.
        num_tokens: [R] tokens of each rank.
        dtype: Of the result.
        order: Order of the sum.
        ranks_per_node: Consecutive ranks that form a node, for ``"two-level"``.
    """
    group = ranks_per_node if order == "two-level" else len(y)
    hidden = y[0].shape[1]
    totals = [torch.zeros(tokens, hidden) for tokens in num_tokens]
    for begin in range(0, len(y), group):
        partial = [torch.zeros(tokens, hidden) for tokens in num_tokens]
        for rank in range(begin, min(begin + group, len(y))):
            for row, (home, token) in zip(y[rank], source[rank].tolist(), strict=True):
                partial[home][token] += row.float()
        for home, part in enumerate(partial):
            totals[home] += part.to(y[0].dtype).float() if order == "two-level" else part
    return [total.to(dtype) for total in totals]
