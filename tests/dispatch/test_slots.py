"""Slot arithmetic: who writes where, from the matrix of counts."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from crossdock.dispatch.slots import SlotPlan


@st.composite
def counts(draw) -> list[list[int]]:
    size = draw(st.integers(1, 6))
    row = st.lists(st.integers(0, 9), min_size=size, max_size=size)
    return draw(st.lists(row, min_size=size, max_size=size))


@given(counts())
def test_senders_fill_each_bucket_in_rank_order_without_gap_or_overlap(matrix):
    plan = SlotPlan(np.array(matrix))
    for receiver in range(len(matrix)):
        place = 0
        for sender in range(len(matrix)):
            assert int(plan.first[sender, receiver]) == place
            place += matrix[sender][receiver]
        assert plan.received[receiver] == place
    assert plan.total == sum(map(sum, matrix))


@given(counts())
def test_what_is_sent_is_what_is_received(matrix):
    plan = SlotPlan(np.array(matrix))
    for rank in range(len(matrix)):
        assert plan.send_rows(rank) == matrix[rank]
        assert plan.recv_rows(rank) == [row[rank] for row in matrix]
