"""What holds for transports whose ranks read results where they lie."""

from __future__ import annotations

from crossdock.dispatch import errors
from tests.dispatch.oracle import check_step
from tests.dispatch.test_handles import CASE, check_same_error, misuse


def test_out_is_no_place_that_other_ranks_read(ranks):
    results = ranks(2, misuse, "combine into out among the results", 1)
    check_same_error([seen for seen, _ in results], errors.RoutingError)
    assert "out lies in rows.y" in str(results[0][0].error)
    for rank, (_, good) in enumerate(results):
        check_step(CASE, 1, rank, good)
