"""CUDA graphs of what is measured, and how long their replays take on the slowest rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from crossdock.dispatch.transports.base import Transport

__all__ = ["capture", "make_event", "measure_graphs", "medians"]

T = TypeVar("T")

WARM_UP = 5


def capture(call: Callable[[], T]) -> tuple[Callable[[], None], T]:
    """Record a call in a graph: what replays it, and what it returned."""
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog goes on with calls of its own, in another thread.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = call()
    return graph.replay, result


def measure_graphs(
    transport: Transport, candidates: Mapping[str, Callable[[], None]], rounds: int
) -> dict[str, float]:
    """Time what is launched on the current stream, in turns, all ranks starting together.

    Returns:
        By name, us of the slowest rank, median of the rounds.
    """
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
    return medians(transport, list(candidates), samples)


def medians(transport: Transport, names: Sequence[str], samples: Tensor) -> dict[str, float]:
    """By name, us of the slowest rank, from int64 nanoseconds [n, rounds] of this rank."""
    slowest = torch.stack(
        [transport.exchange(row.clone()).amax(0).double().median() / 1e3 for row in samples]
    )
    return dict(zip(names, slowest.tolist(), strict=True))


def make_event() -> torch.cuda.Event:
    """One that knows the time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
