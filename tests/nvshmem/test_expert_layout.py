"""The expert-major layout on the CPU: its kernels' own code, its mover's and the dispatcher's."""

from __future__ import annotations

import pytest
import torch

from crossdock.dispatch import run_local
from crossdock.dispatch.transports.nvshmem import NvshmemTransport
from tests.nvshmem import expert_checks as checks
from tests.nvshmem.emulation import emulate, record_by_repeating
from tests.nvshmem.test_emulated import folder  # noqa: F401 - a fixture


def run(world_size: int, check) -> None:
    run_local(world_size, lambda host: check(NvshmemTransport(host, torch.device("cpu"))))


@pytest.mark.parametrize(
    "check", [checks.few_pairs_are_exact, *checks.CHECKS[1:]], ids=lambda check: check.__name__
)
@pytest.mark.parametrize(
    "world_size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4))]
)
def test_emulated(monkeypatch, folder, world_size, check):  # noqa: F811
    emulate(monkeypatch, folder)
    run(world_size, check)


@pytest.mark.parametrize("check", checks.CAPTURED, ids=lambda check: check.__name__)
@pytest.mark.parametrize(
    "world_size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))]
)
def test_captured(monkeypatch, folder, world_size, check):  # noqa: F811
    emulate(monkeypatch, folder)
    run(world_size, lambda transport: check(transport, record_by_repeating))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_shapes_are_exact(monkeypatch, folder, world_size):  # noqa: F811
    emulate(monkeypatch, folder)
    run(world_size, checks.pairs_and_their_sums_are_exact)
