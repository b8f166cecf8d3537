"""What every rank of a fleet does in a test; each rank compares what it saw with the oracle."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from crossdock.dispatch import Dispatcher, ReceivedRows
from crossdock.dispatch.transports.base import Transport
from crossdock.scratch.errors import LockedError
from tests.dispatch.cases import Case, Step, copy_rows, fill_results, one_step, send
from tests.gpus.reference import check_step
from tests.nvshmem import graphs

BURST = 8  # now and then a step is as many times larger


def levels_of(transport: Transport) -> int | None:
    return getattr(transport, "ranks_per_node", None)


def step_is_right(dispatcher: Dispatcher, case: Case, step: int) -> None:
    transport = dispatcher.transport
    seen = one_step(dispatcher, transport, case, step)
    check_step(case, step, transport.rank, seen, levels_of(transport))


def steps_are_right(transport: Transport, case: Case) -> list[int]:
    """Every step, and the rows that this rank received in each."""
    received = []
    with case.dispatcher(transport) as dispatcher:
        for step in range(case.num_steps):
            seen = one_step(dispatcher, transport, case, step)
            check_step(case, step, transport.rank, seen, levels_of(transport))
            received.append(seen.num_rows)
    return received


def a_handle_s_way_is_taken_again(transport: Transport, case: Case) -> None:
    """Another x along the same routing, while the first step is still in flight."""
    with case.dispatcher(transport, num_slots=2) as dispatcher:
        batch = case.batch(0, transport.rank)
        first, handle = send(dispatcher, batch, transport.device)
        again, way = dispatcher.dispatch((batch.x * 2).to(transport.device), handle=handle)
        seen = copy_rows(first)
        assert torch.equal(again.x[: again.num_rows].cpu(), seen.x * 2)
        assert torch.equal(again.source[: again.num_rows].cpu(), seen.source)
        again.y.fill_(1.0)
        dispatcher.combine(again.y, way)
        fill_results(case, 0, transport.rank, first)
        seen.out = dispatcher.combine(first.y, handle).cpu()
        check_step(case, 0, transport.rank, seen, levels_of(transport))


def a_step_too_large_for_a_lock_is_refused(transport: Transport, case: Case) -> str:
    """Step 1 after a lock that step 0 fits in; what all ranks are told."""
    with case.dispatcher(transport) as dispatcher:
        step_is_right(dispatcher, case, 0)
        dispatcher.lock()
        with pytest.raises(LockedError) as refusal:
            send(dispatcher, case.batch(1, transport.rank), transport.device)
        step_is_right(dispatcher, case, 0)
        dispatcher.unlock()
        step_is_right(dispatcher, case, 1)
    return str(refusal.value)


def steps_of_random_sizes(transport: Transport, case: Case, num_steps: int) -> int:
    """Many steps of few to many tokens, compared on the device; the largest bucket.

    Every element of every row is a small whole number that says where it comes from, so sums are
    exact in any order.
    """
    device, hidden = transport.device, case.config.hidden
    most = case.tokens[0][0]
    together, mine = random.Random(case.seed), random.Random(case.seed + transport.rank)
    generator = torch.Generator(device).manual_seed(case.seed + transport.rank)
    owner = torch.tensor([*case.owner, -1], device=device)
    column = torch.arange(hidden, device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    largest = 0

    def elements(rank: Tensor | int, token: Tensor) -> Tensor:
        number = (token * 31 + rank * 7)[:, None] + column
        return (number % 17 - 8).to(case.config.dtype)

    with case.dispatcher(transport) as dispatcher:
        for step in range(num_steps):
            limit = most * (BURST if together.random() < 0.02 else 1)
            tokens = torch.arange(mine.choice([0, 1, mine.randint(0, limit), limit]), device=device)
            scores = torch.rand(
                len(tokens), case.config.num_experts, generator=generator, device=device
            )
            topk_idx = scores.topk(case.config.top_k).indices
            topk_idx[torch.rand(topk_idx.shape, generator=generator, device=device) < 0.1] = -1
            x = elements(transport.rank, tokens)
            rows, handle = dispatcher.dispatch(x, topk_idx, scores[:, : case.config.top_k])
            n = rows.num_rows
            arrived = elements(rows.source[:n, 0], rows.source[:n, 1])
            wrong += (rows.x[:n] != arrived).sum()
            rows.y[:n] = arrived
            out = dispatcher.combine(rows.y, handle)
            where = owner[topk_idx]
            times = sum((where == rank).any(1).int() for rank in range(transport.world_size))
            wrong += (out != x * times[:, None]).sum()
            largest = max(largest, rows.capacity)
            if step % 100 == 99:
                assert int(wrong) == 0, f"before step {step} of {case}"
    assert int(wrong) == 0, case
    return largest


class Halves(graphs.Graph):
    """A captured dispatch and a captured combine; the host is between them, and looks."""

    def __init__(self, dispatcher: Dispatcher, case: Case, num_tokens: int) -> None:
        super().__init__(dispatcher, case, num_tokens)
        self.replay_combine = graphs.record(self.bring_home)

    def step(self) -> None:
        self.rows, self.handle = self.dispatcher.dispatch(self.x, self.ids, self.weights)

    def bring_home(self) -> None:
        self.out = self.dispatcher.combine(self.rows.y, self.handle)

    def see(self, case: Case, step: int) -> Step:
        """Replay a step of the case, which must fit."""
        rank = self.dispatcher.transport.rank
        self.fill(case.batch(step, rank))
        self.replay_graph()
        rows: ReceivedRows = replace(
            self.rows, num_rows=int(self.rows.num_rows), num_pairs=int(self.rows.num_pairs)
        )
        seen = copy_rows(rows)
        fill_results(case, step, rank, rows)
        self.out.fill_(7)
        self.replay_combine()
        num_tokens = case.tokens[step][rank]
        assert not self.out[num_tokens:].any(), "results of tokens without experts"
        seen.out = self.out[:num_tokens].cpu().clone()
        return seen


def captured_steps_are_right(transport: Transport, case: Case) -> None:
    """The first step is the largest: it says what is locked, and how large the graph is."""
    rank = transport.rank
    with case.dispatcher(transport) as dispatcher:
        step_is_right(dispatcher, case, 0)
        dispatcher.lock()
        halves = Halves(dispatcher, case, max(case.tokens[0]))
        for step in (*range(case.num_steps), 0):
            check_step(case, step, rank, halves.see(case, step), None)
        dispatcher.check()
        step_is_right(dispatcher, case, case.num_steps - 1)
