"""MPI: what is its own."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import pytest
import torch

import tests.dispatch.test_lost_ranks as lost
from crossdock.dispatch import connect, errors
from crossdock.dispatch.transports import mpi, mpi_library
from crossdock.dispatch.transports.base import Transport
from crossdock.launch import doctor
from tests.dispatch.cases import Case, Step, all_steps, attempt, simple_case
from tests.dispatch.oracle import check_steps
from tests.harness.child import Seat
from tests.transports.mpi_job import MpiJob, OverMpi, first_ranks


@pytest.fixture(scope="session")
def ranks(mpi_pools):
    return OverMpi("mpi", mpi_pools)


@pytest.fixture(scope="session")
def shm_over_mpi(mpi_pools):
    return OverMpi("shm", mpi_pools)


@pytest.mark.parametrize("algorithm", ["alltoall", "allgather"])
def test_shared_memory_whose_ranks_meet_by_mpi(shm_over_mpi, algorithm):
    case = simple_case([(33, 0, 17), (5, 70, 0)], algorithm=algorithm)
    check_steps(case, shm_over_mpi(3, all_steps, case))


def big_messages(transport: Transport, num_rows: int) -> bool:
    """Rows of 4 KiB each way, far past what MPI sends eagerly."""
    row = torch.arange(4096, dtype=torch.int32).to(torch.uint8)
    sent = row.repeat(num_rows, 1).add_(transport.rank)
    got = torch.empty(2 * num_rows, 4096, dtype=torch.uint8)
    both = torch.cat([sent, sent])
    transport.all_to_all(both, [num_rows] * 2, got, [num_rows] * 2).wait()
    wanted = torch.cat([row.repeat(num_rows, 1).add_(rank) for rank in (0, 1)])
    return torch.equal(got, wanted)


def test_long_messages(ranks):
    assert all(ranks(2, big_messages, 3000))


def subgroup(transport: Transport, case) -> list | None:
    """Ranks 1 and 2 of the world are ranks 0 and 1 of a communicator of their own."""
    from mpi4py import MPI

    color = 0 if transport.rank in (1, 2) else MPI.UNDEFINED
    comm = first_ranks(3).Split(color)
    if comm == MPI.COMM_NULL:
        return None
    half = connect("mpi", group=comm)
    try:
        return all_steps(half, case)
    finally:
        half.close()


def test_a_communicator_of_some_of_the_ranks_counts_its_own(ranks):
    case = simple_case([(9, 4), (0, 5)])
    seen = ranks(3, subgroup, case)
    assert seen[0] is None
    check_steps(case, seen[1:])


def use_a_process_group(transport: Transport):
    return attempt(lambda: connect("mpi", group=object()))


def test_another_kind_of_group_is_refused(ranks):
    for seen in ranks(2, use_a_process_group):
        assert type(seen.error) is errors.ConfigError
        assert "mpi4py" in str(seen.error)


def start_without_mpirun(transport: Transport):
    with patch.dict(os.environ, WORLD_SIZE="9"):
        return attempt(lambda: connect("mpi"))


def test_ranks_that_another_launcher_started_are_told(ranks):
    for seen in ranks(2, start_without_mpirun):
        assert type(seen.error) is errors.TransportUnavailable
        assert "mpirun" in str(seen.error)


def test_without_mpi4py_the_error_says_what_to_install():
    with (
        patch.dict("sys.modules", {"mpi4py": None}),
        pytest.raises(errors.TransportUnavailable, match="pip install"),
    ):
        mpi_library.load_mpi()


def cuda_awareness(transport: Transport) -> bool:
    return mpi_library.is_cuda_aware()


def test_the_wheels_say_that_they_are_not_cuda_aware(ranks):
    assert ranks(2, cuda_awareness) == [False, False]


def test_doctor_says_it_too(mpirun):
    findings = {finding.name: finding for finding in doctor.find_machine()}
    assert "; not CUDA-aware" in findings["mpi4py"].detail


# ---- rows on a GPU ------------------------------------------------------------------------------


def steps_on_a_gpu(comm: Any, case: Case, staged: bool) -> list[Step]:
    """All ranks on one GPU; rows go to MPI as it likes them, or through pinned memory."""
    aware = not staged and mpi_library.is_cuda_aware()
    with patch.object(mpi, "is_cuda_aware", return_value=aware):
        transport = connect("mpi", group=comm, device="cuda:0")
    try:
        return all_steps(transport, case)
    finally:
        transport.close()


@pytest.mark.gpu
@pytest.mark.parametrize("staged", [True, False], ids=["pinned", "as MPI says"])
@pytest.mark.parametrize("wire", ["payload", "fp8"])
@pytest.mark.parametrize("algorithm", ["alltoall", "allgather"])
def test_rows_on_a_gpu(mpi_pools, algorithm, wire, staged):
    case = simple_case([(33, 17), (5, 0), (300, 700)], algorithm=algorithm, wire=wire, hidden=256)
    check_steps(case, mpi_pools.call(2, steps_on_a_gpu, case, staged, hang_s=120.0))


# ---- lost ranks ---------------------------------------------------------------------------------


def live_by_mpi(seat: Seat, link: Connection, *args) -> None:
    lost.open_transport = lambda _: connect("mpi")
    lost.live(seat, link, *args)


@pytest.mark.parametrize(("victim", "when"), [(1, "construction"), (0, "dispatch"), (1, "combine")])
def test_a_stopped_rank_is_named_and_the_job_ends(mpirun, victim, when):
    """Survivors raise in time; when they exit, the job is aborted, the stopped rank included."""
    job = MpiJob(3, live_by_mpi, (victim,), signal.SIGSTOP, when)
    try:
        gone_at = job.links[victim].recv()[1]
        survivors = [link for rank, link in enumerate(job.links) if rank != victim]
        for link in survivors:
            assert link.poll(lost.TIMEOUT_S + 10), job.output.read_text()
            lost.check_loss(link.recv(), (victim,), gone_at)
        for link in survivors:
            link.send("leave")
        assert job.process.wait(30) != 0
        deadline = time.monotonic() + 3
        while any(rank.is_alive() for rank in job.ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(rank.is_alive() for rank in job.ranks)
    finally:
        job.close()


def test_a_killed_rank_ends_the_job(mpirun):
    job = MpiJob(3, live_by_mpi, (1,), signal.SIGKILL, "dispatch")
    try:
        job.links[1].recv()
        for link in (job.links[0], job.links[2]):
            link.send("leave")
        assert job.process.wait(lost.TIMEOUT_S + 10) != 0
        assert not any(rank.is_alive() for rank in job.ranks)
    finally:
        job.close()
