"""What kernels make of the records of an eager step is what the host would make of them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

import pytest
import torch

from crossdock.dispatch.nvshmem import eager
from crossdock.dispatch.nvshmem.eager import Matrix, Ways
from crossdock.dispatch.nvshmem.launch import SOURCES
from crossdock.dispatch.nvshmem.layout import (
    CONTROL_AT,
    MAX_RANKS,
    Header,
    Kind,
    State,
    control_words,
    record_words,
    state_words,
)
from crossdock.dispatch.nvshmem.mover import NvshmemMover
from crossdock.dispatch.slots import SlotPlan
from crossdock.dispatch.transports.nvshmem import NvshmemTransport
from crossdock.launch.bench import onesided
from tests.dispatch.cases import send, simple_case
from tests.nvshmem.emulation import CPU, build

CALL, SLOT, PAGE, NUM_TOLD = 1001, 1, 3, 5


@dataclass
class Place:
    """Of a transport, what a matrix asks for."""

    rank: int
    world_size: int


def judged_by_kernel(
    folder, matrix: Matrix, records: torch.Tensor, rank: int, *, is_broken: bool = False
) -> None:
    """Let the kernels' own function fill a matrix from records [R, words] as they are posted."""
    ranks = len(records)
    source = folder / "give_host.cu"
    if not source.exists():
        shutil.copytree(SOURCES, folder, dirs_exist_ok=True)
        source.write_text(
            '#include "records.cuh"\n'
            'extern "C" __global__ void host(const Group* group, i64 page, i64 call) {\n'
            "  give_host(*group, page, call);\n}\n"
        )
    words = record_words(ranks, NUM_TOLD)
    control = torch.full((control_words(ranks, words, has_distant=False),), -7)
    pages = control[-4 * ranks * words :].view(4, ranks, words)
    pages[PAGE, :, : records.shape[1]] = records
    group = torch.zeros(CONTROL_AT + 2 * MAX_RANKS, dtype=torch.int64)
    group[0], group[1], group[7] = rank, ranks, NUM_TOLD
    state = torch.zeros(state_words(ranks, num_experts=1), dtype=torch.int64)
    state[State.BROKEN] = is_broken
    group[10] = state.data_ptr()
    group[14], group[CONTROL_AT + rank] = matrix.words.data_ptr(), control.data_ptr()
    kernel = build(folder, source, "host")
    kernel(1, 64, group.data_ptr(), PAGE, CALL)


def random_records(generator: torch.Generator, ranks: int) -> torch.Tensor:
    """Records of which about half of the sets have something wrong with them."""
    records = torch.randint(0, 90, (ranks, Header.HEADER + 2 * ranks), generator=generator)
    records[:, Header.KIND], records[:, Header.CALL] = Kind.FINE, CALL
    records[:, Header.SLOT], records[:, Header.PAIR_LIMIT] = SLOT, -1

    def chance(percent: int) -> bool:
        return int(torch.randint(100, (), generator=generator)) < percent

    def anyone() -> int:
        return int(torch.randint(ranks, (), generator=generator))

    if chance(15):
        records[anyone(), Header.KIND] = Kind.REPEATED
    if chance(15):
        records[anyone(), Header.CALL] = CALL - 2
    if chance(15):
        records[anyone(), Header.SLOT] = 0
    if chance(40):
        records[anyone(), Header.PAIR_LIMIT] = int(
            torch.randint(90 * ranks, (), generator=generator)
        )
    return records


def expected(records: torch.Tensor, capacity: int) -> tuple[list[int], list[int]] | None:
    """Rows and pairs that each rank receives, if ranks agree on them."""
    ranks = len(records)
    kinds, calls, slots, limits = records[:, : Header.TOKEN].t().tolist()
    rows = records[:, Header.HEADER : Header.HEADER + ranks].sum(0).tolist()
    pairs = records[:, Header.HEADER + ranks :].sum(0).tolist()
    if any(kinds) or set(calls) != {CALL} or len(set(slots)) > 1 or max(rows) > capacity:
        return None
    if any(0 <= limit < need for limit, need in zip(limits, pairs, strict=True)):
        return None
    return rows, pairs


@pytest.mark.parametrize("ranks", [1, 4, 64])
def test_the_kernels_verdict_is_that_of_the_records(monkeypatch, kernels, ranks):
    monkeypatch.setattr(eager, "pinned_words", lambda n: torch.zeros(n, dtype=torch.int64))
    generator = torch.Generator().manual_seed(ranks)
    rank = ranks // 2
    matrix = Matrix(Place(rank, ranks), SlotPlan)
    verdicts = set()
    for _ in range(60):
        records, capacity = random_records(generator, ranks), 50 * ranks
        judged_by_kernel(kernels / "eager", matrix, records, rank)
        agreed, want = matrix.judge(CALL, SLOT, capacity), expected(records, capacity)
        verdicts.add(agreed is None)
        counts = records[:, Header.HEADER : Header.HEADER + ranks]
        assert (agreed is None) == (want is None)
        if agreed is not None:
            assert (agreed.plan.received, agreed.pairs) == want
            assert (agreed.sequence, agreed.slots) == (CALL, [SLOT] * ranks)
            matrix.words.fill_(-1)  # the next step's records
            assert torch.equal(torch.tensor(agreed.plan.counts), counts)
        else:
            pairs = records[rank, Header.HEADER + ranks :].tolist()
            is_fine = records[rank, Header.KIND] == Kind.FINE
            assert matrix.mine() == (is_fine, counts[rank].tolist(), pairs)
    assert verdicts == {True, False}


def test_after_a_wait_in_vain_no_verdict_is_good(monkeypatch, kernels):
    monkeypatch.setattr(eager, "pinned_words", lambda n: torch.zeros(n, dtype=torch.int64))
    matrix = Matrix(Place(0, 2), SlotPlan)
    records = torch.zeros(2, Header.HEADER + 4, dtype=torch.int64)
    records[:, Header.CALL], records[:, Header.SLOT] = CALL, SLOT
    for is_broken in (False, True):
        judged_by_kernel(kernels / "eager", matrix, records, 0, is_broken=is_broken)
        assert (matrix.judge(CALL, SLOT, 0) is None) == is_broken


def test_a_way_is_used_again_when_it_was_given_back():
    ways = Ways(CPU, lambda tokens: 10 * tokens)
    first, second = ways.take(100), ways.take(100)
    assert len(first) == 1280
    assert first.data_ptr() != second.data_ptr()
    ways.give(first)
    assert ways.take(300) is not first
    assert ways.take(65) is first
    assert ways.take(65).data_ptr() not in (first.data_ptr(), second.data_ptr())


def steps_keep_their_ways_and_counts(transport: NvshmemTransport) -> None:
    ranks, rank = transport.world_size, transport.rank
    case = simple_case([(40,) * ranks, (33,) * ranks], hidden=64)
    with case.dispatcher(transport) as dispatcher:
        mover = dispatcher._mover
        assert isinstance(mover, NvshmemMover)
        handles, counts, ways = [], [], set()
        for step in (0, 1, 0):
            rows, handle = send(dispatcher, case.batch(step, rank), CPU)
            dispatcher.combine(rows.y.zero_(), handle)
            counts.append(transport.exchange(torch.tensor(handle.routing.rows)))
            handles.append(handle)
            ways.add(handle.routing.way.data_ptr())
        assert len(ways) == 3  # as long as somebody may take it again
        for handle, want in zip(handles, counts, strict=True):
            assert torch.equal(torch.tensor(handle.plan.counts), want)
        first = rows.source[: rows.num_rows].clone()
        x = case.batch(0, rank).x
        rows, again = dispatcher.dispatch(x, handle=handles[0])
        assert torch.equal(rows.source[: rows.num_rows], first)
        dispatcher.combine(rows.y.zero_(), again)
        del handle, handles, again
        rows, handle = send(dispatcher, case.batch(1, rank), CPU)
        assert handle.routing.way.data_ptr() in ways
        dispatcher.combine(rows.y.zero_(), handle)


def test_the_benchmark_of_eager_steps_runs(monkeypatch, emulated):
    monkeypatch.setattr(onesided, "HIDDEN", 64)
    monkeypatch.setattr("crossdock.launch.bench.inputs.HIDDEN", 64)
    monkeypatch.setattr(onesided, "EAGER_ROUNDS", 3)
    measured, _ = emulated(2, onesided._measure_eager)
    plain, idle, launches = measured.values()
    assert plain.keys() == idle.keys() == launches.keys()
    assert plain["us"]["call"] > plain["us"]["host"] > 0
    assert len(plain["us, each rank's median"]["host"]) == 2
    assert "launches" not in plain["us"]
    assert launches["us"]["launches"] > 0


def test_steps_keep_their_ways_and_counts(emulated):
    emulated(3, steps_keep_their_ways_and_counts)
