"""Sums as two levels make them: within each node first."""

from __future__ import annotations

from torch import Tensor

from crossdock.dispatch.reference import reference_combine
from tests.dispatch.cases import Case
from tests.dispatch.oracle import expected_rows, results_of


def two_level_out(case: Case, step: int, ranks_per_node: int) -> list[Tensor]:
    """[R] sums of every rank."""
    rows = [expected_rows(case, step, rank) for rank in range(case.world_size)]
    return reference_combine(
        results_of(case, step, [expected.topk_idx for expected in rows]),
        [expected.source for expected in rows],
        list(case.tokens[step]),
        case.config.dtype,
        order="two-level",
        ranks_per_node=ranks_per_node,
    )
