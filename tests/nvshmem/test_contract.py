"""Errors and handles over NVSHMEM are those of every transport; kernels run on the CPU."""

from __future__ import annotations

import pytest

from tests.dispatch.cases import all_steps, simple_case
from tests.dispatch.in_place import *  # noqa: F403
from tests.dispatch.test_errors_everywhere import *  # noqa: F403
from tests.dispatch.test_handles import *  # noqa: F403
from tests.transports.over import leave_out_what_does_not_use

# Its rows are no multiple of 8 elements.
del test_two_dispatchers_share_a_transport  # noqa: F821
del test_a_layout_that_the_transport_cannot_do_is_refused  # noqa: F821 - it can
leave_out_what_does_not_use(globals(), "ranks")


@pytest.fixture
def ranks(emulated):
    # Some tests mind the time, which is no time to build kernels.
    emulated(1, all_steps, simple_case([(3,)]))
    return emulated
