"""What holds for every transport holds for MPI, whichever it is."""

from __future__ import annotations

import pytest

from tests.dispatch.test_buckets import *  # noqa: F403
from tests.dispatch.test_errors_everywhere import *  # noqa: F403
from tests.dispatch.test_exactness import *  # noqa: F403
from tests.dispatch.test_handles import *  # noqa: F403
from tests.dispatch.test_partition import *  # noqa: F403
from tests.dispatch.test_ragged import *  # noqa: F403
from tests.transports.mpi_job import OverMpi
from tests.transports.over import leave_out_what_does_not_use

leave_out_what_does_not_use(globals(), "ranks")


@pytest.fixture(scope="session")
def ranks(mpi_pools):
    return OverMpi("mpi", mpi_pools)
