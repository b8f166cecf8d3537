"""What holds for ranks that share a GPU (``tests/nvshmem``) holds for ranks that have one each."""

from __future__ import annotations

import pytest

from tests.gpus.fleet import GPU_FLEETS, Crew, Fleet, on
from tests.nvshmem.ranks import CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@on(GPU_FLEETS, only=lambda fleet: fleet.transport == "nvshmem")
def test_every_check_holds(crew: Crew, fleet: Fleet, check):
    crew(check)
