"""Shared memory: what is its own, from the first page to the last process."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import tests.dispatch.test_lost_ranks as lost
from crossdock.dispatch import connect, errors
from crossdock.dispatch.onesided.signals import Counter
from crossdock.dispatch.transports import shm, shm_memory
from crossdock.dispatch.transports.base import Transport
from tests.dispatch.cases import Attempt, Case, all_steps, attempt, one_step, send, simple_case
from tests.dispatch.oracle import check_step, check_steps
from tests.harness.child import Seat
from tests.harness.lost import lone_ranks
from tests.transports.over import Over, live_over

MB = 1 << 20


@pytest.fixture(scope="session")
def ranks(pools):
    return Over("shm", pools)


# ---- blocks of rows -----------------------------------------------------------------------------


def swap_blocks(transport: Transport, seed: int, rounds: int) -> None:
    """all_to_all and all_gather of sizes that grow and shrink, every byte compared."""
    rng = random.Random(seed)
    size, me = transport.world_size, transport.rank
    for turn in range(rounds):
        counts = [[rng.choice([0, 1, 5, 400]) for _ in range(size)] for _ in range(size)]
        width = rng.choice([1, 3, 4176])

        def block(source: int, target: int, count: int, turn=turn, width=width) -> torch.Tensor:
            generator = torch.Generator().manual_seed(turn * 100 + source * 10 + target)
            return torch.randint(0, 256, (count, width), generator=generator, dtype=torch.uint8)

        if turn % 3:
            sent = torch.cat([block(me, to, counts[me][to]) for to in range(size)])
            wanted = torch.cat([block(of, me, counts[of][me]) for of in range(size)])
            got = torch.full_like(wanted, 7)
            incoming = [counts[of][me] for of in range(size)]
            transport.all_to_all(sent, counts[me], got, incoming).wait()
        else:
            rows = counts[0]
            wanted = torch.cat([block(of, 0, rows[of]) for of in range(size)])
            got = torch.full_like(wanted, 7)
            transport.all_gather(block(me, 0, rows[me]), got, rows).wait()
        assert torch.equal(got, wanted), (seed, turn)


@pytest.mark.parametrize("seed", range(3))
def test_blocks_arrive_whole_whatever_their_sizes(ranks, seed):
    ranks(3, swap_blocks, seed, 30)


def swap_without_memory(transport: Transport) -> Attempt:
    rows = torch.zeros(3, 16, dtype=torch.uint8)
    available = 0 if transport.rank == 1 else MB
    with patch.object(shm_memory, "available_bytes", return_value=available):
        return attempt(
            lambda: transport.all_to_all(rows, [1, 1, 1], torch.empty_like(rows), [1, 1, 1])
        )


def test_a_rank_without_memory_for_its_blocks_fails_all(ranks):
    for seen in ranks(3, swap_without_memory):
        assert type(seen.error) is errors.CapacityError
        assert seen.error.ranks == (1,)
        assert seen.seconds < 1


# ---- the protocol under bad timing --------------------------------------------------------------


def steps_with_delays(transport: Transport, case: Case, seed: int) -> list:
    """Sleep at random points: before a counter is set, and before records are read."""
    rng = random.Random(seed * 100 + transport.rank)
    post, wait = shm.FutexSignals.post, shm.FutexSignals.wait

    def nap() -> None:
        if rng.random() < 0.3:
            time.sleep(rng.choice([0.0, 0.001, 0.02]))

    def late_post(self: Any, counter: Counter, value: int) -> None:
        nap()
        post(self, counter, value)

    def late_wait(self: Any, *args: Any) -> None:
        wait(self, *args)
        nap()

    with (
        patch.object(shm.FutexSignals, "post", late_post),
        patch.object(shm.FutexSignals, "wait", late_wait),
    ):
        return all_steps(transport, case)


@pytest.mark.parametrize("algorithm", ["alltoall", "allgather"])
def test_ranks_that_are_late_at_random_points_change_nothing(ranks, algorithm):
    rng = random.Random(5)
    tokens = [tuple(rng.choice([0, 1, 30, 70]) for _ in range(3)) for _ in range(12)]
    case = simple_case(tokens, algorithm=algorithm)
    check_steps(case, ranks(3, steps_with_delays, case, 1))


def results_of_another_dtype(transport: Transport, case: Case) -> tuple:
    """fp32 results of a bf16 model, and bf16 results that are not rows.y."""
    with case.dispatcher(transport) as dispatcher:
        outs = []
        for dtype in (torch.float32, torch.bfloat16):
            rows, handle = send(dispatcher, case.batch(0, transport.rank), transport.device)
            y = torch.full((rows.capacity, rows.hidden), float("nan"), dtype=dtype)
            y[: rows.num_rows] = case.results(0, transport.rank, rows.num_rows).to(dtype)
            y[: rows.num_rows][(rows.topk_idx[: rows.num_rows] < 0).all(1)] = 0
            outs.append(dispatcher.combine(y, handle).clone())
        return tuple(outs)


@pytest.mark.parametrize("algorithm", ["alltoall", "allgather"])
def test_results_from_elsewhere_are_worth_as_much(ranks, algorithm):
    case = simple_case([(9, 0, 14)], algorithm=algorithm)
    expected = [steps[0].out for steps in ranks(3, all_steps, case)]
    for outs, out in zip(ranks(3, results_of_another_dtype, case), expected, strict=True):
        for seen in outs:
            assert torch.equal(seen, out)


# ---- growth -------------------------------------------------------------------------------------


def grow_in_want(transport: Transport, case: Case, poor_rank: int, lack: str) -> list[Attempt]:
    """Step 1 needs more memory, and ``poor_rank`` cannot have or cannot reach it."""
    with case.dispatcher(transport) as dispatcher:
        tries = [attempt(lambda: one_step(dispatcher, transport, case, 0))]
        poor = transport.rank == poor_rank
        what, how = {
            "memory": ("crossdock.dispatch.transports.shm_memory.available_bytes", lambda: 1024),
            "descriptors": ("os.memfd_create", too_many_files),
            "way": ("crossdock.dispatch.transports.shm.map_memory_of", too_many_files),
        }[lack]
        if poor:
            with patch(what, how):
                tries.append(attempt(lambda: one_step(dispatcher, transport, case, 1)))
        else:
            tries.append(attempt(lambda: one_step(dispatcher, transport, case, 1)))
        tries += [
            attempt(lambda step=step: one_step(dispatcher, transport, case, step))
            for step in (2, 3)
        ]
        return tries


def too_many_files(*_: Any) -> Any:
    raise OSError(24, "Too many open files")


@pytest.mark.parametrize(
    ("poor_rank", "lack"), [(0, "memory"), (1, "memory"), (1, "descriptors"), (2, "way")]
)
def test_growth_that_fails_on_one_rank_leaves_all_as_they_were(ranks, poor_rank, lack):
    case = simple_case(
        [(1, 1, 1), (0, 30, 30), (1, 1, 0), (0, 30, 30)], num_experts=2, top_k=2, owner=[0, 1]
    )
    results = ranks(3, grow_in_want, case, poor_rank, lack)
    failed = [tries[1] for tries in results]
    assert len({str(seen.error) for seen in failed}) == 1, failed
    for seen in failed:
        assert type(seen.error) is errors.CapacityError, repr(seen.error)
        assert seen.error.ranks == (poor_rank,)
        assert seen.seconds < 1
    for rank, tries in enumerate(results):
        for step in (0, 2, 3):
            assert tries[step].error is None, repr(tries[step].error)
            check_step(case, step, rank, tries[step].value)


def allocation(num_bytes: int) -> int:
    return shm_memory.Memory(num_bytes).buffer.numel()


def test_memory_that_no_machine_has_is_refused_and_leaves_no_descriptor():
    before = os.listdir("/proc/self/fd")
    with pytest.raises(MemoryError, match="available"):
        allocation(1 << 50)
    assert allocation(4096) == 4096
    assert len(os.listdir("/proc/self/fd")) == len(before)


# ---- meeting ------------------------------------------------------------------------------------


def meet_elsewhere(pooled: Transport, where: str) -> Attempt:
    """Rank 1 says that it lives on another host, or on another kind of processor."""
    if pooled.rank != 1:
        return attempt(lambda: connect("shm").close())
    if where == "host":
        with patch("socket.gethostname", return_value="far-away"):
            return attempt(lambda: connect("shm").close())
    with patch("platform.machine", return_value="aarch64"):
        return attempt(lambda: connect("shm").close())


@pytest.mark.parametrize(("where", "word"), [("host", "another host"), ("arch", "aarch64")])
def test_ranks_that_cannot_share_memory_are_told_on_every_rank(pools, where, word):
    tries = pools.get(3).run(meet_elsewhere, where)
    for seen in tries:
        assert type(seen.error) is errors.TransportUnavailable, repr(seen.error)
        assert "rank 1" in str(seen.error)
        assert word in str(seen.error)
        assert "gloo" in str(seen.error)
    assert len({str(seen.error) for seen in tries}) == 1


def test_no_gpu_rows():
    with pytest.raises(errors.ConfigError, match="cuda"):
        connect("shm", device="cuda:0")


# ---- lost ranks ---------------------------------------------------------------------------------

KILLED, STOPPED = signal.SIGKILL, signal.SIGSTOP


@pytest.mark.parametrize(
    ("victims", "number", "when"),
    [
        ((1,), KILLED, "construction"),
        ((1,), KILLED, "dispatch"),
        ((0,), KILLED, "combine"),
        ((1,), STOPPED, "construction"),
        ((0,), STOPPED, "dispatch"),
        ((1,), STOPPED, "combine"),
        ((0, 2), STOPPED, "dispatch"),
        ((2,), KILLED, "any time"),
        ((2,), STOPPED, "any time"),
    ],
)
def test_a_lost_rank_is_named_and_the_rest_can_leave(monkeypatch, victims, number, when):
    def over(world_size, fn, *args, **options):
        return lone_ranks(world_size, live_over, "shm", *args, **options)

    monkeypatch.setattr(lost, "lone_ranks", over)
    lost.watch(victims, number, when)


def sleep_over(seat: Seat, link: Connection) -> None:
    lost.open_transport = lambda _: connect("shm")
    lost.sleep_in_experts(seat, link)


def test_a_rank_that_comes_back_too_late_is_named_and_raises_too():
    with lone_ranks(3, sleep_over) as alone:
        gone_at = alone[1].receive()[1]
        for rank in (alone[0], alone[2]):
            lost.check_loss(rank.receive(lost.TIMEOUT_S + 10), (1,), gone_at)
        late = alone[1].receive(2 * lost.TIMEOUT_S + 10)
        assert isinstance(late.error, errors.RankTimeout)
        lost.check_exit(alone)


def close_early(transport: Transport, case: Case) -> Attempt:
    with case.dispatcher(transport) as dispatcher:
        one_step(dispatcher, transport, case, 0)
    if transport.rank == 1:
        transport.close()
        return Attempt()
    return attempt(lambda: case.dispatcher(transport))


def test_a_transport_that_was_closed_is_missed_at_once(ranks):
    results = ranks(3, close_early, simple_case([(3, 4, 5)]))
    for seen in (results[0], results[2]):
        assert isinstance(seen.error, errors.RankTimeout)
        assert seen.error.ranks == (1,)
        assert "closed" in str(seen.error)
        assert seen.seconds < 1


# ---- nothing stays ------------------------------------------------------------------------------


def hold_memory(seat: Seat, link: Connection) -> None:
    """Fill a bucket of 64 MB on every rank, and wait to be killed."""
    case = simple_case([(16384,) * seat.world_size], hidden=1024, top_k=1, debug=False)
    dispatcher = case.dispatcher(connect("shm"))
    rows, _ = send(dispatcher, case.batch(0, seat.rank), torch.device("cpu"))
    rows.y.fill_(1.0)
    link.send("holding")
    time.sleep(100)


def shared_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Shmem")


def test_killing_all_ranks_at_once_gives_all_memory_back():
    files = set(os.listdir("/dev/shm"))
    before = shared_bytes()
    with lone_ranks(2, hold_memory) as alone:
        for rank in alone:
            assert rank.receive() == "holding"
        held = shared_bytes() - before
        assert held > 100 * MB
        assert not {name for name in set(os.listdir("/dev/shm")) - files if "crossdock" in name}
        for rank in alone:
            os.kill(rank.process.pid, signal.SIGKILL)
        for rank in alone:
            rank.process.join()
    deadline = time.monotonic() + 5
    while shared_bytes() > before + held / 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert shared_bytes() <= before + held / 4
    assert not {name for name in set(os.listdir("/dev/shm")) - files if "crossdock" in name}


def wander(transport: Transport, steps: int) -> list[tuple[int, int, int]]:
    """Steps of random sizes; now and then (descriptors, mappings, resident bytes)."""
    rng = random.Random(3)
    sizes = [0, 1, 7, 40, 150]
    seen = []
    # A case of steps that all ranks can make again from their number.
    tokens = tuple(tuple(rng.choice(sizes) for _ in range(transport.world_size)) for _ in range(64))
    case = simple_case(tokens, hidden=64, debug=False)
    batches = [case.batch(step, transport.rank) for step in range(64)]
    with case.dispatcher(transport) as dispatcher:
        for step in range(steps):
            rows, handle = send(dispatcher, batches[step % 64], transport.device)
            rows.y.fill_(1.0)
            dispatcher.combine(rows.y, handle)
            if step % (steps // 10) == 0:
                maps = Path("/proc/self/maps").read_text().count("memfd:crossdock")
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                seen.append((len(os.listdir("/proc/self/fd")), maps, pages * 4096))
    return seen


def check_flat(seen: list[tuple[int, int, int]]) -> None:
    settled = seen[len(seen) // 3 :]
    assert len({fds for fds, _, _ in settled}) == 1, seen
    assert len({maps for _, maps, _ in settled}) == 1, seen
    assert settled[-1][2] - settled[0][2] < 4 * MB, seen


def test_many_steps_leave_nothing_behind(ranks):
    for seen in ranks(3, wander, 300, hang_s=60.0):
        check_flat(seen)


@pytest.mark.slow
def test_ten_thousand_steps_leave_nothing_behind(ranks):
    for seen in ranks(4, wander, 10_000, hang_s=600.0):
        check_flat(seen)


def open_and_close(pooled: Transport) -> list[tuple[int, int]]:
    seen = []
    case = simple_case([(5, 9)])
    for _ in range(6):
        transport = connect("shm")
        all_steps(transport, case)
        transport.close()
        del transport
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("memfd:crossdock")
        seen.append((len(os.listdir("/proc/self/fd")), maps))
    return seen


def test_a_closed_transport_lets_go_of_memory_and_descriptors(pools):
    for seen in pools.get(2).run(open_and_close):
        assert len(set(seen[2:])) == 1, seen


# ---- bytes --------------------------------------------------------------------------------------


def bytes_of_a_step(transport: Transport, case: Case) -> tuple[list[int], list[int]]:
    with case.dispatcher(transport) as dispatcher:
        rows, handle = send(dispatcher, case.batch(0, transport.rank), transport.device)
        after_dispatch = list(transport.bytes_to)
        dispatcher.combine(rows.y.fill_(1.0), handle)
        return after_dispatch, list(transport.bytes_to)


@pytest.mark.parametrize("algorithm", ["alltoall", "allgather"])
def test_bytes_are_counted_as_where_blocks_are_sent(ranks, pools, algorithm):
    case = simple_case([(9, 0, 14)], algorithm=algorithm)
    assert ranks(3, bytes_of_a_step, case) == pools.get(3).run(bytes_of_a_step, case)
