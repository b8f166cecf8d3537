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
    """Skip what needs a GPU where there is none; leave out the whole grids unless asked for."""
    if "slow" not in config.getoption("markexpr"):
        left_out = [item for item in items if "slow" in item.keywords]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if "slow" not in item.keywords]
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        for name, wanted in {"gpu": 1, "gpu_2": 2, "gpu_4": 4, "gpu_8": 8}.items():
            if name in item.keywords and present < wanted:
                gpus = "a CUDA GPU" if wanted == 1 else f"{wanted} CUDA GPUs"
                item.add_marker(pytest.mark.skip(reason=f"needs {gpus}"))
