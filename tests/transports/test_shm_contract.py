"""What holds for every transport holds for shared memory."""

from __future__ import annotations

import pytest

from tests.dispatch.in_place import *  # noqa: F403
from tests.dispatch.test_buckets import *  # noqa: F403
from tests.dispatch.test_errors_everywhere import *  # noqa: F403
from tests.dispatch.test_exactness import *  # noqa: F403
from tests.dispatch.test_handles import *  # noqa: F403
from tests.dispatch.test_partition import *  # noqa: F403
from tests.dispatch.test_poison import *  # noqa: F403
from tests.dispatch.test_ragged import *  # noqa: F403
from tests.dispatch.test_wire import *  # noqa: F403
from tests.transports.over import Over, leave_out_what_does_not_use

# Memory that torch does not allocate runs out in other ways: test_shm.py.
del test_growth_that_fails_on_one_rank_leaves_all_as_they_were  # noqa: F821
leave_out_what_does_not_use(globals(), "ranks", "gloo")


@pytest.fixture(scope="session")
def ranks(pools):
    return Over("shm", pools)


@pytest.fixture(scope="session")
def gloo(pools):
    return Over("shm", pools)
