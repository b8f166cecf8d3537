from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from crossdock.dispatch import Topology
from crossdock.launch.join import (
    Membership,
    Seat,
    check_hosts,
    check_world_size,
    find_seat,
    first_host,
)
from crossdock.scratch.errors import ConfigError, RankTimeout

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
TWO_NODES = Topology(nodes=2, ranks_per_node=4, dp=8)


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        (TORCHRUN, "torchrun"),
        (OPEN_MPI, "Open MPI"),
        (MPICH, "MPICH"),
        (SRUN, "Slurm"),
        (SRUN | {"PMI_RANK": "5", "PMI_SIZE": "8"}, "Slurm"),
        (OPEN_MPI | SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, "Open MPI"),
        (MPICH | SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, "MPICH"),
        (TORCHRUN | {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0"}, "torchrun"),
        (OPEN_MPI | {"MASTER_ADDR": "a", "MASTER_PORT": "1"}, "Open MPI"),
    ],
)
def test_each_launcher_is_known_by_its_variables(environ, launcher):
    seat = find_seat(environ)
    assert seat is not None
    assert seat.launcher == launcher
    assert (seat.rank, seat.world_size, seat.local_rank, seat.local_world_size) == (5, 8, 1, 4)


@pytest.mark.parametrize("environ", [{}, {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}])
def test_without_a_launcher_there_is_no_seat(environ):
    assert find_seat(environ) is None


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_a_seat_that_is_no_number_is_told(name):
    with pytest.raises(ConfigError, match=f"{name}='x'"):
        find_seat(TORCHRUN | {name: "x"})


def seat_of(environ: dict[str, str]) -> Seat:
    seat = find_seat(environ)
    assert seat is not None
    return seat


@pytest.mark.parametrize(
    ("environ", "advice"),
    [
        (TORCHRUN, "--nnodes 2 --nproc-per-node 2"),
        (OPEN_MPI, "-n 4"),
        (MPICH, "-n 4"),
        (SRUN, "--nodes 2 --ntasks-per-node 2"),
    ],
)
def test_another_number_of_ranks_names_the_flag(environ, advice):
    with pytest.raises(ConfigError, match="started 8 ranks") as caught:
        check_world_size(seat_of(environ), Topology(nodes=2, ranks_per_node=2, dp=4))
    assert advice in str(caught.value)
    check_world_size(seat_of(environ), TWO_NODES)


@pytest.mark.parametrize(
    ("environ", "advice"),
    [
        (OPEN_MPI, "--map-by slot"),
        (SRUN, "--distribution=block"),
        (MPICH, "-ppn 4"),
        (TORCHRUN, "--node-rank"),
    ],
)
def test_ranks_dealt_out_in_turn_name_the_flag(environ, advice):
    with pytest.raises(ConfigError, match="rank 1 on b") as caught:
        check_hosts(["a", "b"] * 4, seat_of(environ), TWO_NODES)
    assert advice in str(caught.value)


def test_nodes_of_consecutive_ranks_are_fine_also_on_one_host():
    check_hosts(["a"] * 4 + ["b"] * 4, seat_of(SRUN), TWO_NODES)
    check_hosts(["a"] * 8, seat_of(SRUN), TWO_NODES)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu7", "gpu7"),
        ("gpu[07-12,20],cpu1", "gpu07"),
        ("a1,b[1-2]", "a1"),
        ("r[1-2]n[03,05]-ib", "r1n03-ib"),
        ("gpu[3]", "gpu3"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodelist, host):
    assert first_host(nodelist) == host


def memberships(store: dist.Store, num_ranks: int) -> list[Membership]:
    return [
        Membership(
            seat=Seat(
                launcher="torchrun",
                rank=rank,
                world_size=num_ranks,
                local_rank=rank,
                local_world_size=num_ranks,
            ),
            store=store,
            processes=(),
            timeout_s=0.3,
        )
        for rank in range(num_ranks)
    ]


def test_gather_brings_all_values_to_rank_0_and_share_brings_them_back():
    ranks = memberships(dist.HashStore(), 3)
    got: list[object] = [None] * 3

    def live(member: Membership) -> None:
        gathered = member.gather("x", member.seat.rank * 10)
        got[member.seat.rank] = (gathered, member.share("y", gathered))

    threads = [threading.Thread(target=live, args=(member,)) for member in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [([0, 10, 20], [0, 10, 20]), (None, [0, 10, 20]), (None, [0, 10, 20])]


def test_ranks_that_give_nothing_are_named():
    first, second, _, _ = memberships(dist.HashStore(), 4)
    second.gather("x", 1)
    with pytest.raises(RankTimeout, match=r"rank 2, 3 within 0.3 s") as caught:
        first.gather("x", 0)
    assert caught.value.ranks == (2, 3)
