"""How a rank waits for a collective of torch's."""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta

import pytest

from crossdock.dispatch import errors
from crossdock.dispatch.transports.base import Transport
from crossdock.dispatch.transports.process_group import ProcessGroupTransport
from tests.harness.pool import Pools
from tests.harness.ranks import Ranks


class EndsBetweenTwoWaits:
    """A collective that a first wait is too short for, and that has ended when one looks."""

    def __init__(self, error: str = "") -> None:
        self.error = error
        self.num_waits = 0

    def wait(self, limit: timedelta) -> None:
        self.num_waits += 1
        if self.num_waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return self.num_waits > 0


def wait_for_late_ends(transport: Transport) -> tuple[int, str]:
    assert isinstance(transport, ProcessGroupTransport)
    work = EndsBetweenTwoWaits()
    transport.wait_for(work, transport._step, "a test")
    failed = EndsBetweenTwoWaits("Connection closed by peer")
    with pytest.raises(errors.RankTimeout, match="in a test") as caught:
        transport.wait_for(failed, transport._step, "a test")
    return work.num_waits, str(caught.value.__cause__)


def test_what_ends_between_a_wait_and_a_look_has_ended_well_unless_it_says_otherwise():
    with closing(Pools()) as pools:  # of its own, for the transport is broken at the end
        ranks = Ranks("gloo", pools)
        assert ranks(1, wait_for_late_ends) == [(2, "Connection closed by peer")]
