"""Errors and handles over NVSHMEM are those of every transport; kernels run on the CPU."""

from __future__ import annotations

import pytest
import torch

from crossdock.dispatch import run_local
from crossdock.dispatch.transports.nvshmem import NvshmemTransport
from tests.dispatch.test_errors_everywhere import *  # noqa: F403
from tests.dispatch.test_handles import *  # noqa: F403
from tests.nvshmem.emulation import emulate
from tests.nvshmem.test_emulated import folder  # noqa: F401
from tests.transports.over import leave_out_what_does_not_use

leave_out_what_does_not_use(globals(), "ranks")


@pytest.fixture
def ranks(monkeypatch, folder):  # noqa: F811
    emulate(monkeypatch, folder)

    def run(world_size, fn, *args):
        return run_local(
            world_size, lambda host: fn(NvshmemTransport(host, torch.device("cpu")), *args)
        )

    return run
