"""Fixtures that every test folder may use, and what the markers mean."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from crossdock.scratch.jit import JitMissingError, toolkit_include_dirs
from tests.harness.pool import Pools
from tests.harness.ranks import ALL_KINDS, Ranks
from tests.nvshmem.emulation import emulate, run_emulated

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


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where CUDA sources are built as plain C++, each once, for tests without a GPU."""
    try:
        toolkit_include_dirs()
    except JitMissingError as error:
        pytest.skip(str(error))
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, kernels: Path) -> Callable[..., list[Any]]:
    """``emulated(world_size, fn, *args)``: threads, over NVSHMEM whose kernels run on the CPU."""
    emulate(monkeypatch, kernels)
    return run_emulated


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
