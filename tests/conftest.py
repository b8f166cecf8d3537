"""Fixtures that every test folder may use, and what the markers mean."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.harness.pool import Pools
from tests.harness.ranks import ALL_KINDS, Ranks

settings.register_profile("crossdock", deadline=None, print_blob=True)
settings.load_profile("crossdock")


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Real processes by world size, started when first asked for."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture(scope="session", params=ALL_KINDS)
def ranks(request: pytest.FixtureRequest, pools: Pools) -> Ranks:
    """``ranks(world_size, fn, *args)``, over each transport."""
    return Ranks(request.param, pools)


@pytest.fixture(scope="session")
def local(pools: Pools) -> Ranks:
    """``local(world_size, fn, *args)``: threads of this process."""
    return Ranks("local", pools)


@pytest.fixture(scope="session")
def gloo(pools: Pools) -> Ranks:
    """``gloo(world_size, fn, *args)``: processes."""
    return Ranks("gloo", pools)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this machine or this run is not for; pytest counts it as deselected."""
    unwanted = set() if torch.cuda.is_available() else {"gpu"}
    if "slow" not in config.getoption("markexpr"):
        unwanted.add("slow")
    left_out = [item for item in items if not unwanted.isdisjoint(item.keywords)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
