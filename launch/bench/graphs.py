"""CUDA graphs of what is measured, and how long their replays take on the slowest rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from crossdock.dispatch.transports.base import Transport

__all__ = ["SlowestRank", "capture", "make_event", "measure_graphs", "slowest_rank"]

T = TypeVar("T")

WARM_UP = 5
SAMPLES_AT_ONCE = 64  # what a record between hosts has room for


class SlowestRank(NamedTuple):
    """By name, us of the slowest rank of each round.

    Attributes:
        medians: Of all rounds.
        tails: 95th percentiles.
    """

    medians: dict[str, float]
    tails: dict[str, float]


def capture(call: Callable[[], T]) -> tuple[Callable[[], None], T]:
    """Record a call in a graph: what replays it, and what it returned."""
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog goes on with calls of its own, in another thread.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = call()
    return graph.replay, result


def measure_graphs(
    transport: Transport, candidates: Mapping[str, Callable[[], None]], rounds: int
) -> SlowestRank:
    """Time what is launched on the current stream, in turns, all ranks starting together."""
    samples = torch.zeros(len(candidates), rounds, dtype=torch.int64)
    begin, end = make_event(), make_event()
    for round_ in range(-WARM_UP, rounds):
        for row, call in enumerate(candidates.values()):
            transport.exchange(torch.zeros(1, dtype=torch.int64))
            begin.record()
            call()
            end.record()
            end.synchronize()
            if round_ >= 0:
                samples[row, round_] = round(begin.elapsed_time(end) * 1e6)
    return slowest_rank(transport, list(candidates), samples)


def slowest_rank(transport: Transport, names: Sequence[str], samples: Tensor) -> SlowestRank:
    """What all ranks say together, from int64 nanoseconds [n, rounds] of this rank. Collective."""
    parts = torch.split(samples.flatten(), SAMPLES_AT_ONCE)
    slowest = torch.cat([transport.exchange(part.clone()).amax(0) for part in parts])
    at = torch.tensor([0.5, 0.95], dtype=torch.float64)
    medians, tails = torch.quantile(slowest.view_as(samples).double() / 1e3, at, dim=1).tolist()
    return SlowestRank(dict(zip(names, medians, strict=True)), dict(zip(names, tails, strict=True)))


def make_event() -> torch.cuda.Event:
    """One that knows the time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
