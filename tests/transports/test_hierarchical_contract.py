"""What holds for every transport holds for two levels, with sums in two-level order."""

from __future__ import annotations

import pytest
import torch

import tests.dispatch.oracle as oracle
import tests.dispatch.test_errors_everywhere as errors_everywhere
from tests.dispatch.test_buckets import *  # noqa: F403
from tests.dispatch.test_errors_everywhere import *  # noqa: F403
from tests.dispatch.test_handles import *  # noqa: F403
from tests.dispatch.test_partition import *  # noqa: F403
from tests.dispatch.test_poison import *  # noqa: F403
from tests.transports.over import leave_out_what_does_not_use
from tests.transports.test_hierarchical import OverLevels
from tests.transports.two_level import two_level_out

leave_out_what_does_not_use(globals(), "ranks")

RANKS_PER_NODE = {2: 1, 3: 3, 4: 2}


class OverSomeLevels:
    """Nodes of one rank, one node of all ranks, or two nodes, by the number of ranks."""

    is_local = False
    kind = "hierarchical"

    def __init__(self, levels: OverLevels) -> None:
        self._levels = levels

    def __call__(self, world_size, fn, *args, **options):
        return self._levels(world_size, RANKS_PER_NODE[world_size], fn, *args, **options)


@pytest.fixture(scope="session")
def ranks(pools):
    return OverSomeLevels(OverLevels(pools, inner="shm"))


@pytest.fixture(autouse=True)
def _two_level_order(monkeypatch):
    monkeypatch.setattr(oracle, "expected_out", out_of_levels)
    monkeypatch.setattr(errors_everywhere, "expected_out", out_of_levels)


def out_of_levels(case, step, rank) -> torch.Tensor:
    return two_level_out(case, step, RANKS_PER_NODE[case.world_size])[rank]
