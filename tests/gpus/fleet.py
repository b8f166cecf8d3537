"""Which ranks a test runs on: how many, joined by what, one a GPU, all on one, or on CPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch

from crossdock.dispatch import connect
from crossdock.dispatch.transports.base import Transport
from crossdock.launch.rig import rig_environment
from tests.harness.pool import Pool

HANG_S = 120.0  # the first call of a fleet starts CUDA, NCCL and NVSHMEM
SIZES = (2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Ranks that are joined alike.

    ``inner`` is hierarchical's transport within a node; its two nodes are halves of the ranks.
    """

    size: int
    transport: str
    inner: str = "auto"
    device: Literal["cpu", "cuda"] = "cuda"
    shares_gpu: bool = False

    def __str__(self) -> str:
        levels = f"-{self.inner}" if self.transport == "hierarchical" else ""
        where = "-one_gpu" if self.shares_gpu else ""
        return f"{self.size}-{self.transport}{levels}{where}"

    @property
    def ranks_per_node(self) -> int | None:
        """Of hierarchical; the oracle sums in another order then."""
        return max(1, self.size // 2) if self.transport == "hierarchical" else None

    @property
    def last(self) -> int:
        """The rank that errs where one has to."""
        return self.size - 1

    def connect(self, rank: int, environment: Mapping[str, str]) -> Transport:
        """Join the fleet; ``environment`` is for a GPU that is shared."""
        if self.shares_gpu:
            port = int(os.environ["MASTER_PORT"])
            os.environ.update(rig_environment(rank, self.size, port, 100 // self.size))
            os.environ.update(environment)
        device = "cpu"
        if self.device == "cuda":
            device = "cuda:0" if self.shares_gpu else f"cuda:{rank}"
        options: dict[str, Any] = {}
        if self.transport == "hierarchical":
            options = {"inner": self.inner, "ranks_per_node": self.ranks_per_node}
        return connect(self.transport, device=device, **options)


CPU_FLEETS = (
    Fleet(size=4, transport="gloo", device="cpu"),
    Fleet(size=4, transport="shm", device="cpu"),
    Fleet(size=4, transport="hierarchical", inner="shm", device="cpu"),
)
ONE_GPU_FLEETS = (
    Fleet(size=1, transport="nccl"),
    Fleet(size=1, transport="hierarchical", inner="nccl"),
    Fleet(size=4, transport="nvshmem", shares_gpu=True),
)
GPU_FLEETS = tuple(
    fleet
    for size in SIZES
    for fleet in (
        Fleet(size=size, transport="nccl"),
        Fleet(size=size, transport="nvshmem"),
        Fleet(size=size, transport="hierarchical", inner="nccl"),
        Fleet(size=size, transport="hierarchical", inner="nvshmem"),
    )
)
FLEETS = (*CPU_FLEETS, *ONE_GPU_FLEETS, *GPU_FLEETS)


def on(
    fleets: tuple[Fleet, ...] = FLEETS, *, only: Callable[[Fleet], bool] = lambda fleet: True
) -> pytest.MarkDecorator:
    """Run the test on each fleet, where there are GPUs for it."""
    params = [
        pytest.param(fleet, marks=_marks(fleet), id=str(fleet)) for fleet in fleets if only(fleet)
    ]
    return pytest.mark.parametrize("fleet", params)


def _marks(fleet: Fleet) -> list[pytest.MarkDecorator]:
    if fleet.device == "cpu":  # one of them tries the suite in every run
        return [] if fleet.transport == "gloo" else [pytest.mark.slow]
    if fleet in ONE_GPU_FLEETS:
        return [pytest.mark.gpu]
    return [getattr(pytest.mark, f"gpu_{fleet.size}")]


class Crew:
    """``crew(fn, *args)`` is ``[fn(transport, *args) of every rank]`` of a fleet.

    Ranks stay, and so does their transport, until one of them fails.
    """

    def __init__(self, fleet: Fleet, environment: Mapping[str, str]) -> None:
        self.fleet = fleet
        self._environment = dict(environment)
        self._pool: Pool | None = None

    def __call__(self, fn: Callable[..., Any], *args: Any, hang_s: float = HANG_S) -> list[Any]:
        if self._pool is None or not self._pool.usable:
            self._pool = Pool(self.fleet.size)
        return self._pool.run(call_on, self.fleet, self._environment, fn, *args, hang_s=hang_s)

    def close(self) -> None:
        """End the ranks, together if they are well."""
        if self._pool is not None and self._pool.usable:
            self._pool.run(leave, hang_s=HANG_S)
            self._pool.close()
        self._pool = None


_joined: list[Transport] = []


def call_on(
    pooled: Transport, fleet: Fleet, environment: dict[str, str], fn: Callable[..., Any], *args: Any
) -> Any:
    """In a rank's process: the call, over the fleet's transport."""
    if not _joined:
        _joined.append(fleet.connect(pooled.rank, environment))
    value = fn(_joined[0], *args)
    if fleet.device == "cuda":
        torch.cuda.synchronize()
    return value


def leave(pooled: Transport) -> None:
    """In a rank's process: close the fleet's transport."""
    while _joined:
        _joined.pop().close()
