"""Steps as one rank saw them against ``crossdock.dispatch.reference``, every bit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from crossdock.dispatch.reference import ReferenceRows, reference_combine, reference_dispatch
from crossdock.dispatch.wire import dequantize
from crossdock.launch.trace import Trace, read_trace
from tests.dispatch.cases import NAN, Batch, Case, Step
from tests.dispatch.oracle import assert_same_bits, check_capacity, results_of

TRACES = Path(__file__).parents[2] / "configs" / "traces"


@dataclass(frozen=True, kw_only=True)
class TracedCase(Case):
    """A case whose tokens chose their experts in a recorded run; ``trace`` is "e64" or "e256"."""

    trace: str = "e64"

    def batch(self, step: int, rank: int) -> Batch:
        drawn = super().batch(step, rank)
        trace = _read(self.trace)
        before = sum(map(sum, self.tokens[:step])) + sum(self.tokens[step][:rank])
        at = self.seed + before + torch.arange(len(drawn.x))
        layer = at.div(trace.num_tokens, rounding_mode="floor") % trace.num_layers
        token = at % trace.num_tokens
        topk_idx = trace.topk_idx[layer, token].to(self.idx_dtype)
        weights = trace.topk_weights[layer, token].float()
        topk_idx[drawn.topk_idx < 0] = -1  # some choices are dropped, as by a router with a limit
        weights[topk_idx < 0] = NAN
        return Batch(x=drawn.x, topk_idx=topk_idx, topk_weights=weights)


@lru_cache(maxsize=2)
def _read(name: str) -> Trace:
    return read_trace(TRACES / f"routing-{name}-k8.safetensors")


def check_step(case: Case, step: int, rank: int, seen: Step, ranks_per_node: int | None) -> None:
    """All that a rank saw of a step; two-level sums if ``ranks_per_node`` is given."""
    at = f"step {step}, rank {rank} of {case}"
    rows, out = _expected(case, step, ranks_per_node)
    mine = rows[rank]
    assert seen.num_rows == len(mine.source), at
    assert torch.equal(seen.source, mine.source), at
    assert torch.equal(seen.topk_idx, mine.topk_idx), at
    assert_same_bits(seen.topk_weights, mine.topk_weights, at)
    assert torch.equal(seen.rows_per_expert, mine.rows_per_expert), at
    assert seen.num_pairs == int(mine.rows_per_expert.sum()), at
    check_capacity(seen.capacity, seen.num_rows, at)
    x = seen.x if seen.scale is None else dequantize(seen.x, seen.scale, case.config.dtype)
    assert_same_bits(x, mine.x, at)
    assert seen.out is not None
    assert not seen.out.isnan().any(), f"NaN reached a result, {at}"
    assert torch.equal(seen.out, out[rank]), at


@lru_cache(maxsize=2)
def _expected(
    case: Case, step: int, ranks_per_node: int | None
) -> tuple[list[ReferenceRows], list[Tensor]]:
    """Rows and sums of every rank."""
    batches = [case.batch(step, rank) for rank in range(case.world_size)]
    rows = reference_dispatch(
        [batch.x for batch in batches],
        [batch.topk_idx for batch in batches],
        [batch.topk_weights for batch in batches],
        case.placement(),
        algorithm=case.config.algorithm,
        wire=case.config.wire,
    )
    out = reference_combine(
        results_of(case, step, [received.topk_idx for received in rows]),
        [received.source for received in rows],
        list(case.tokens[step]),
        case.config.dtype,
        order="rank" if ranks_per_node is None else "two-level",
        ranks_per_node=ranks_per_node or 1,
    )
    return rows, out
