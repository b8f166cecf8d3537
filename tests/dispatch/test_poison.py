"""With debug on, memory that nobody filled is NaN, and no NaN reaches a result."""

from __future__ import annotations

import pytest
import torch

from crossdock.dispatch.transports.base import Transport
from tests.dispatch.cases import Case, all_steps, send, simple_case
from tests.dispatch.oracle import check_steps


def tails(transport: Transport, case: Case) -> list[tuple[int, bool, bool]]:
    """For each step: rows in the tail, whether x is all NaN there, and y everywhere."""
    seen = []
    with case.dispatcher(transport) as dispatcher:
        for step in range(case.num_steps):
            rows, handle = send(dispatcher, case.batch(step, transport.rank), transport.device)
            n = rows.num_rows
            seen.append(
                (
                    rows.capacity - n,
                    bool(rows.x[n:].float().isnan().all()),
                    bool(rows.y[n:].isnan().all()),
                )
            )
            rows.y[:n] = 1.0
            dispatcher.combine(rows.y, handle)
    return seen


@pytest.mark.parametrize("wire", ["payload", "fp8"])
@pytest.mark.parametrize("algorithm", ["alltoall", "allgather"])
def test_unused_tails_are_nan_after_a_large_step_too(ranks, algorithm, wire):
    case = simple_case(
        [(30, 33), (2, 1), (0, 0)], top_k=2, unrouted=0.0, algorithm=algorithm, wire=wire
    )
    for steps in ranks(2, tails, case):
        assert any(tail > 0 for tail, _, _ in steps)
        for _, x_is_nan, y_is_nan in steps:
            assert x_is_nan
            assert y_is_nan


@pytest.mark.parametrize("algorithm", ["alltoall", "allgather"])
def test_small_steps_after_large_ones_find_no_old_rows(ranks, algorithm):
    case = simple_case([(30, 33), (2, 1), (0, 1)], dtype=torch.float32, algorithm=algorithm)
    check_steps(case, ranks(2, all_steps, case))
