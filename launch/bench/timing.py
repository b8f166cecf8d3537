"""Times of several candidates in one run, taken in turns, slowest rank of each round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch

from crossdock.dispatch.transports.base import Transport

__all__ = ["Times", "measure"]


@dataclass(frozen=True, kw_only=True)
class Times:
    """Milliseconds of one candidate; each sample is the slowest rank's.

    Attributes:
        median: Of all rounds.
        p95: 95th percentile.
        p99: 99th percentile.
        least: Fastest round.
        rounds: How many rounds.
    """

    median: float
    p95: float
    p99: float
    least: float
    rounds: int

    def as_json(self) -> dict[str, float]:
        """The same as a dictionary."""
        return asdict(self)


def measure(
    transport: Transport,
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warm_up: int = 3,
) -> dict[str, Times]:
    """Time candidates on all ranks together. Collective.

    In every round each candidate runs once, all ranks starting together, so that whatever else the
    machine does falls on all alike.

    Args:
        transport: Brings ranks together and gathers their times.
        candidates: By name, in the order in which a round runs them.
        rounds: Rounds that count.
        warm_up: Rounds before them that do not.
    """
    samples = torch.zeros(len(candidates), rounds, dtype=torch.int64)
    for round_ in range(-warm_up, rounds):
        for row, candidate in enumerate(candidates.values()):
            _synchronize(transport)
            transport.exchange(torch.zeros(1, dtype=torch.int64))
            began = time.perf_counter_ns()
            candidate()
            _synchronize(transport)
            if round_ >= 0:
                samples[row, round_] = time.perf_counter_ns() - began
    slowest = transport.exchange(samples.flatten()).amax(0).view_as(samples)
    return {
        name: _summary(row.double() / 1e6) for name, row in zip(candidates, slowest, strict=True)
    }


def _summary(milliseconds: torch.Tensor) -> Times:
    least, middle, p95, p99 = torch.quantile(
        milliseconds, torch.tensor([0.0, 0.5, 0.95, 0.99], dtype=torch.float64)
    ).tolist()
    return Times(median=middle, p95=p95, p99=p99, least=least, rounds=len(milliseconds))


def _synchronize(transport: Transport) -> None:
    if transport.device.type == "cuda":
        torch.cuda.synchronize(transport.device)
