"""What one rank does wrong is everybody's error, and a lost rank is named by all others."""

from __future__ import annotations

import signal
from multiprocessing.connection import Connection
from typing import Any

import pytest

import tests.dispatch.test_lost_ranks as lost
from crossdock.dispatch import errors
from tests.dispatch.cases import simple_case
from tests.dispatch.test_errors_everywhere import (
    MISTAKES,
    an_expert_twice_in_a_token,
    an_id_of_num_experts,
    check_everywhere,
    good_bad_good,
    ids_on_another_device,
    x_of_the_wrong_hidden,
)
from tests.gpus import checks
from tests.gpus.conftest import Crews
from tests.gpus.fleet import Crew, Fleet, on
from tests.gpus.reference import check_step
from tests.harness.child import Seat
from tests.harness.lost import lone_ranks

GPU_TIMEOUT_S = 6.0  # the first step, which is under it too, starts NCCL
GPU_EXIT_S = 20.0
KILLED = ("gloo", "nvshmem", "nvshmem-one_gpu", "hierarchical-nccl")


@pytest.mark.parametrize(
    "mistake",
    [
        an_id_of_num_experts,
        an_expert_twice_in_a_token,
        x_of_the_wrong_hidden,
        ids_on_another_device,
    ],
    ids=lambda mistake: mistake.__name__,
)
@on()
def test_a_mistake_of_one_rank(crew: Crew, fleet: Fleet, seed, mistake):
    tokens = [[6 + rank % 3 for rank in range(fleet.size)]] * 3
    case = simple_case(tokens, top_k=3, unrouted=0.0, seed=seed)
    results = crew(good_bad_good, mistake, (fleet.last,), "alltoall", case)
    tries = [seen for seen, _ in results]
    check_everywhere(tries, errors.RoutingError, (fleet.last,), MISTAKES[mistake])
    for rank, (_, good) in enumerate(results):
        check_step(case, 2, rank, good, fleet.ranks_per_node)


@on()
def test_a_step_too_large_for_a_lock(crew: Crew, fleet: Fleet, seed):
    case = simple_case([(10,) * fleet.size, (400,) * fleet.size], hidden=64, seed=seed)
    said = crew(checks.a_step_too_large_for_a_lock_is_refused, case)
    assert len(set(said)) == 1
    assert "bucket" in said[0]


def live(
    seat: Seat, link: Connection, fleet: Fleet, environment: dict[str, str], *args: Any
) -> None:
    """A rank of ``test_lost_ranks`` that works in a fleet."""
    lost.open_transport = lambda seat: fleet.connect(seat.rank, environment)
    timeout_s = lost.TIMEOUT_S if fleet.device == "cpu" else GPU_TIMEOUT_S
    tokens = [[6 + rank % 3 for rank in range(fleet.size)], [4] * fleet.size]
    lost.CASE = simple_case(tokens, timeout_s=timeout_s)
    lost.live(seat, link, *args)


@on(only=lambda fleet: fleet.size > 1 and fleet.transport in ("gloo", "nccl", "nvshmem"))
def test_a_stopped_rank_is_named(monkeypatch, crews: Crews, fleet: Fleet):
    watch(monkeypatch, crews, fleet, signal.SIGSTOP, "dispatch")


# Under MPS the others live on if the killed rank had nothing on the GPU.
@on(only=lambda fleet: str(fleet).partition("-")[2] in KILLED)
def test_a_killed_rank_is_named(monkeypatch, crews: Crews, fleet: Fleet):
    watch(monkeypatch, crews, fleet, signal.SIGKILL, "combine")


def watch(
    monkeypatch: pytest.MonkeyPatch, crews: Crews, fleet: Fleet, number: int, when: str
) -> None:
    environment = dict(crews.environment(fleet))

    def ranks(_: int, fn: object, *args: Any, **options: Any) -> Any:
        return lone_ranks(fleet.size, live, fleet, environment, *args, **options)

    monkeypatch.setattr(lost, "lone_ranks", ranks)
    if fleet.device == "cuda":
        monkeypatch.setattr(lost, "TIMEOUT_S", GPU_TIMEOUT_S)
        monkeypatch.setattr(lost, "EXIT_S", GPU_EXIT_S)
    lost.watch((fleet.last,), number, when)
