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

__all__ = ["ReferenceRows", "reference_combine", "reference_dispatch"]


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
