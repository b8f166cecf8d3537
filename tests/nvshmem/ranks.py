"""What every rank of a rig does: each check in turn, its name and seconds printed by rank 0.

``python -m tests.nvshmem.ranks [NAME...]`` in the environment of ``crossdock.launch.rig``.
"""

from __future__ import annotations

import faulthandler
import os
import random
import sys
import time
import traceback
from dataclasses import replace

import pytest
import torch

from crossdock.dispatch import connect
from crossdock.dispatch.buckets import next_power_of_two
from crossdock.dispatch.transports.base import Transport
from crossdock.dispatch.wire import quantize
from crossdock.scratch.errors import (
    CapacityError,
    DisagreementError,
    HandleError,
    LockedError,
    PeerClosed,
    PeerFailed,
    RankTimeout,
    RoutingError,
)
from tests.dispatch.cases import Case, all_steps, one_step, ragged, send, simple_case
from tests.dispatch.oracle import check_step, expected_rows
from tests.nvshmem import expert_checks
from tests.nvshmem.graphs import Graph

CUDA = torch.device("cuda", 0)


def check_all(transport: Transport, case: Case) -> None:
    for step, seen in enumerate(all_steps(transport, case)):
        check_step(case, step, transport.rank, seen)


def rows_and_sums_are_exact(transport: Transport) -> None:
    ranks = transport.world_size
    for algorithm in ("alltoall", "allgather"):
        for wire in ("payload", "fp8"):
            check_all(transport, ragged(ranks, algorithm=algorithm, wire=wire))
    for dtype in (torch.float16, torch.float32):
        for wire in ("payload", "fp8"):
            check_all(transport, ragged(ranks, dtype=dtype, wire=wire, idx_dtype=torch.int32))
    for top_k in (1, 32, 64):
        check_all(transport, ragged(ranks, top_k=top_k, num_experts=70))
    for hidden in (8, 128, 1032, 7168):
        check_all(transport, ragged(ranks, hidden=hidden, steps=2))
    check_all(transport, ragged(ranks, num_experts=1, top_k=1))
    check_all(transport, ragged(ranks, num_experts=1500, top_k=8))
    check_all(transport, ragged(ranks, owner=[ranks - 1] * 10))
    for routing in ("one expert", "none", "not rank 0"):
        check_all(transport, ragged(ranks, routing=routing))
    check_all(transport, ragged(ranks, most=5000, steps=2, top_k=8))


def few_shapes_are_exact(transport: Transport) -> None:
    """The widest variety that the pace of an emulation allows."""
    ranks = transport.world_size
    for algorithm in ("alltoall", "allgather"):
        for wire in ("payload", "fp8"):
            check_all(transport, ragged(ranks, most=150, steps=2, algorithm=algorithm, wire=wire))
    check_all(transport, ragged(ranks, most=30, top_k=40, num_experts=1100))
    check_all(transport, ragged(ranks, most=30, hidden=1040, steps=1))


def fp8_is_the_quantiser_s_bits(transport: Transport) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        case = ragged(transport.world_size, wire="fp8", hidden=1000, dtype=dtype)
        for step, seen in enumerate(all_steps(transport, case)):
            payload, scale = quantize(expected_rows(case, step, transport.rank).x)
            assert torch.equal(seen.x.view(torch.uint8), payload.view(torch.uint8))
            assert torch.equal(seen.scale, scale)


def fp8_of_extreme_numbers_is_the_quantiser_s_too(transport: Transport) -> None:
    """From the smallest fp32 numbers to the largest, zeros of both signs, and what is no number."""
    ranks = transport.world_size
    case = simple_case([(90,) * ranks], hidden=264, dtype=torch.float32, wire="fp8", top_k=2)
    batch = case.batch(0, transport.rank)
    sent = torch.randn(ranks, 90, 264, generator=torch.Generator().manual_seed(3))
    sent *= torch.logspace(-44, 38, 90)[:, None]
    sent[:, 7], sent[:, 8, 3:], sent[:, 50, ::3] = 0, 0, -0.0
    sent[:, 51, 5], sent[:, 52, 5] = float("-inf"), float("nan")
    with case.dispatcher(transport) as dispatcher:
        rows, handle = dispatcher.dispatch(
            sent[transport.rank].to(transport.device),
            batch.topk_idx.to(transport.device),
            batch.topk_weights.to(transport.device),
        )
        n = rows.num_rows
        source = rows.source[:n].cpu()
        payload, scale = quantize(sent[source[:, 0], source[:, 1]])
        assert torch.equal(rows.scale[:n].cpu().nan_to_num(-1), scale.nan_to_num(-1))
        seen, nan = rows.x[:n].cpu(), payload.float().isnan()
        assert torch.equal(seen.float().isnan(), nan)
        bits = (part.view(torch.uint8).masked_fill(nan, 0) for part in (seen, payload))
        assert torch.equal(*bits)
        dispatcher.combine(rows.y, handle)


def a_handle_s_way_is_taken_again(transport: Transport) -> None:
    case = simple_case([(40,) * transport.world_size] * 2, hidden=64)
    with case.dispatcher(transport) as dispatcher:
        batch = case.batch(0, transport.rank)
        rows, handle = send(dispatcher, batch, transport.device)
        first = rows.x[: rows.num_rows].clone()
        dispatcher.combine(rows.y, handle)
        rows, handle = dispatcher.dispatch((batch.x * 2).to(transport.device), handle=handle)
        assert torch.equal(rows.x[: rows.num_rows], first * 2)
        rows.y.copy_(rows.x)
        out = dispatcher.combine(rows.y, handle)
        times = out.float() / (batch.x * 2).to(transport.device).float()
        assert (times.nan_to_num(0).round() - times.nan_to_num(0)).abs().max() < 0.1
        with pytest.raises(HandleError):
            dispatcher.combine(rows.y, handle)


def any_y_and_out_will_do(transport: Transport) -> None:
    ranks = transport.world_size
    for model, results in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ):
        for hidden in (8, 136):
            case = simple_case([(30,) * ranks], hidden=hidden, dtype=model)
            with case.dispatcher(transport) as dispatcher:
                rows, handle = send(dispatcher, case.batch(0, transport.rank), transport.device)
                y = torch.full(rows.y.shape, float("nan"), dtype=results, device=transport.device)
                y[: rows.num_rows] = 0.25
                wide = torch.empty(30, hidden + 3, dtype=model, device=transport.device)
                out = wide[:, 1 : hidden + 1]
                assert dispatcher.combine(y, handle, out=out) is out
                ids = case.batch(0, transport.rank).topk_idx
                owners = torch.tensor([*case.owner, -1])[ids]
                want = [len(set(row) - {-1}) * 0.25 for row in owners.tolist()]
                assert torch.equal(out[:, 0].cpu(), torch.tensor(want, dtype=model))
                assert (out == out[:, :1]).all()


def bad_input_on_one_rank_is_everybody_s_error(transport: Transport) -> None:
    ranks, last = transport.world_size, transport.world_size - 1
    case = simple_case([(40,) * ranks])
    with case.dispatcher(transport) as dispatcher:
        for spoil in ("id", "repeat", "weight", "shape"):
            x, ids, weights = case.batch(0, transport.rank).to(transport.device)
            if transport.rank == last:
                if spoil == "id":
                    ids[3, 1] = 999
                elif spoil == "repeat":
                    ids[3, 1] = ids[3, 0] = 5
                elif spoil == "weight":
                    ids[3, 1] = 7
                    ids[3, 0] = ids[3, 2] = -1
                    weights[3, 1] = float("inf")
                else:
                    x = x[:, 1:]
            with pytest.raises(RoutingError, match=f"rank {last}"):
                dispatcher.dispatch(x, ids, weights)
        check_step(case, 0, transport.rank, one_step(dispatcher, transport, case, 0))


def eager_dispatches_need_no_exchange_between_hosts(transport: Transport) -> None:
    """Unless a bucket grows: then one to agree on that, and those that take memory."""
    ranks = transport.world_size
    case = simple_case([(40,) * ranks, (17,) * ranks, (300,) * ranks])
    exchange, exchanges = transport._exchange, []

    def counted(record):
        exchanges.append(len(record))
        return exchange(record)

    transport._exchange = counted
    try:
        with case.dispatcher(transport) as dispatcher:
            for step, are_wanted in ((0, True), (0, False), (1, False), (2, True), (1, False)):
                exchanges.clear()
                rows, handle = send(dispatcher, case.batch(step, transport.rank), transport.device)
                assert bool(exchanges) == are_wanted, (step, exchanges)
                assert rows.num_rows == len(expected_rows(case, step, transport.rank).x)
                dispatcher.combine(rows.y, handle)
    finally:
        del transport._exchange


def ranks_in_different_calls_all_hear_of_it_and_go_on(transport: Transport) -> None:
    """Eagerly, and whatever graphs have been replayed in between."""
    rank, ranks = transport.rank, transport.world_size
    if ranks == 1:
        return
    last = ranks - 1
    case = simple_case([(40,) * ranks, (40,) * ranks], hidden=64, debug=False)
    with case.dispatcher(transport, num_slots=3) as dispatcher, case.dispatcher(transport) as other:
        one_step(dispatcher, transport, case, 0)
        rows, handle = send(dispatcher, case.batch(0, rank), transport.device)
        dispatcher.combine(rows.y, handle)
        other_rows, other_handle = send(other, case.batch(0, rank), transport.device)
        dispatcher.lock()
        graph = Graph(dispatcher, case, 40)
        batch = case.batch(1, rank).to(transport.device)
        calls = {
            "combine": lambda: other.combine(other_rows.y, other_handle),
            "lock": dispatcher.lock,
            "check": dispatcher.check,
            "dispatch(handle=)": lambda: dispatcher.dispatch(batch[0], handle=handle),
            "dispatch": lambda: other.dispatch(*batch),  # of another dispatcher, without a slot
        }
        for turn, (name, call) in enumerate(calls.items()):
            began = time.monotonic()
            with pytest.raises(DisagreementError, match=f"rank {last}"):
                call() if rank == last else dispatcher.dispatch(*batch)
            assert time.monotonic() - began < 5, name
            for _ in range(turn % 3):
                graph.fill(case.batch(turn % 2, rank))
                graph.replay()
                assert graph.is_right(), name
            check_step(case, 1, rank, one_step(dispatcher, transport, case, 1))
        other.combine(other_rows.y, other_handle)
        with pytest.raises(DisagreementError, match="dispatcher"):
            (other if rank == last else dispatcher).dispatch(*batch)
        for dispatcher_ in (other, dispatcher, other):
            check_step(case, 1, rank, one_step(dispatcher_, transport, case, 1))
        dispatcher.check()


def a_rank_that_ends_is_named_by_those_that_dispatch(transport: Transport) -> None:
    rank, ranks = transport.rank, transport.world_size
    if ranks == 1:
        return
    last = ranks - 1
    case = simple_case([(9,) * ranks])
    for error in (PeerFailed, PeerClosed):
        dispatcher = case.dispatcher(transport)
        one_step(dispatcher, transport, case, 0)
        if rank == last:
            dispatcher.abort(ValueError("no more")) if error is PeerFailed else dispatcher.close()
        else:
            with pytest.raises(error, match=f"rank {last}"):
                send(dispatcher, case.batch(0, rank), transport.device)
        dispatcher.close()


def growth_that_fails_on_one_rank_leaves_all_as_they_were(transport: Transport) -> None:
    case = simple_case([(10,) * transport.world_size, (400,) * transport.world_size])
    with case.dispatcher(transport) as dispatcher:
        one_step(dispatcher, transport, case, 0)
        runtime = transport.runtime
        if transport.rank == 0:

            def no_room(num_bytes: int) -> None:
                raise MemoryError(f"no {num_bytes} bytes")

            runtime.require_room = no_room
        with pytest.raises(CapacityError, match="rank 0"):
            one_step(dispatcher, transport, case, 1)
        if transport.rank == 0:
            del runtime.require_room
        for step in (0, 1, 0):
            check_step(case, step, transport.rank, one_step(dispatcher, transport, case, step))


def a_step_too_large_for_a_lock_is_refused_everywhere(transport: Transport) -> None:
    ranks = transport.world_size
    case = simple_case([(10,) * ranks, (400,) * ranks])
    with case.dispatcher(transport) as dispatcher:
        one_step(dispatcher, transport, case, 0)
        dispatcher.lock(pair_capacity=10_000)
        with pytest.raises(LockedError):
            one_step(dispatcher, transport, case, 1)
        check_step(case, 0, transport.rank, one_step(dispatcher, transport, case, 0))
        dispatcher.unlock()
        for step in (1, 0):
            check_step(case, step, transport.rank, one_step(dispatcher, transport, case, step))


def an_outbox_too_small_is_refused_everywhere(transport: Transport) -> None:
    """A rank that receives little may still have more to put than a bucket holds."""
    ranks, rank = transport.world_size, transport.rank
    num_distant = int((~transport.runtime.reach[0]).sum())
    if num_distant < 2:
        return
    capacity = next_power_of_two(10 * ranks)
    many = capacity // num_distant + 1
    tokens = [(10,) * ranks, (many, *[0] * (ranks - 1))]
    case = simple_case(tokens, hidden=64, algorithm="allgather", debug=False)
    with case.dispatcher(transport) as dispatcher:
        one_step(dispatcher, transport, case, 0)
        dispatcher.lock()
        with pytest.raises(LockedError, match=rf"rank 0 would put {many * num_distant} rows"):
            one_step(dispatcher, transport, case, 1)
        graph = Graph(dispatcher, case, tokens[1][rank])
        graph.fill(case.batch(1, rank))
        graph.replay()
        assert graph.out.isnan().all()
        with pytest.raises(CapacityError, match=f"rank 0.*put {many * num_distant} rows"):
            dispatcher.check()
        dispatcher.unlock()
        for step in (1, 0):
            check_step(case, step, rank, one_step(dispatcher, transport, case, step))


def two_dispatchers_and_two_slots_interleave(transport: Transport) -> None:
    ranks = transport.world_size
    first, second = ragged(ranks, seed=1), ragged(ranks, seed=2, hidden=64, wire="fp8")
    with first.dispatcher(transport, num_slots=2) as a, second.dispatcher(transport) as b:
        for step in range(3):
            pending = a.dispatch_send(*first.batch(step, transport.rank).to(transport.device))
            check_step(second, step, transport.rank, one_step(b, transport, second, step))
            rows, handle = pending.wait()
            seen = one_step(a, transport, first, (step + 1) % 3)
            check_step(first, (step + 1) % 3, transport.rank, seen)
            expected = expected_rows(first, step, transport.rank)
            assert torch.equal(rows.x[: rows.num_rows].cpu(), expected.x)
            rows.y.zero_()
            home = a.combine_send(rows.y, handle)
            check_step(second, step, transport.rank, one_step(b, transport, second, step))
            assert not home.wait().any()


def ranks_with_different_slots_free_hear_of_it(transport: Transport) -> None:
    rank, ranks = transport.rank, transport.world_size
    if ranks == 1:
        return
    case = simple_case([(9,) * ranks])
    with case.dispatcher(transport, num_slots=2) as dispatcher:
        steps = [send(dispatcher, case.batch(0, rank), transport.device) for _ in range(2)]
        pending = [dispatcher.combine_send(rows.y.zero_(), handle) for rows, handle in steps]
        pending[rank % 2].wait()
        with pytest.raises(DisagreementError, match=r"slot 0 .* rank 0 and slot 1 .* rank 1"):
            send(dispatcher, case.batch(0, rank), transport.device)
        pending[1 - rank % 2].wait()
        check_step(case, 0, rank, one_step(dispatcher, transport, case, 0))


def few_sms_and_other_streams_will_do(transport: Transport) -> None:
    case = ragged(transport.world_size, num_sms=3)
    side = torch.cuda.Stream()
    with case.dispatcher(transport) as dispatcher:
        for step in range(3):
            seen = one_step(dispatcher, transport, case, step)
            check_step(case, step, transport.rank, seen)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                seen = one_step(dispatcher, transport, case, step)
            torch.cuda.current_stream().wait_stream(side)
            check_step(case, step, transport.rank, seen)


def blocks_of_rows_travel_too(transport: Transport) -> None:
    ranks, rank = transport.world_size, transport.rank
    for rows in (3, 1000):
        send_rows = [rows * (1 + rank + peer) for peer in range(ranks)]
        recv_rows = [rows * (1 + rank + peer) for peer in range(ranks)]
        parts = [
            torch.full((n, 48), 10 * rank + p, dtype=torch.uint8) for p, n in enumerate(send_rows)
        ]
        recv = torch.empty(sum(recv_rows), 48, dtype=torch.uint8, device=transport.device)
        transport.all_to_all(
            torch.cat(parts).to(transport.device), send_rows, recv, recv_rows
        ).wait()
        for source, part in enumerate(torch.split(recv, recv_rows)):
            assert (part == 10 * source + rank).all()


def graphs_and_eager_steps_interleave(transport: Transport) -> None:
    rank, ranks = transport.rank, transport.world_size
    case = simple_case([(128,) * ranks, (40,) * ranks, (7,) * ranks], hidden=64, debug=False)
    with case.dispatcher(transport) as dispatcher:
        with pytest.raises(LockedError, match="lock"):
            Graph(dispatcher, case, 128)
        torch.cuda.synchronize()
        dispatcher.close()
    with case.dispatcher(transport, num_slots=2) as dispatcher:
        for step in range(3):
            one_step(dispatcher, transport, case, step)
        dispatcher.lock()
        large, small = Graph(dispatcher, case, 128), Graph(dispatcher, case, 40)
        for turn in range(30):
            large.fill(replace(case, seed=turn).batch(0, rank))
            small.fill(replace(case, seed=turn).batch(1 + turn % 2, rank))
            large.replay()
            small.replay()
            assert small.is_right(), turn
            assert large.is_right(), turn
            small.replay()
            if turn % 5 == 0:
                check_step(case, 2, rank, one_step(dispatcher, transport, case, 2))
            n, rows = int(small.rows.num_rows), small.rows
            assert (rows.topk_idx[n:] == -1).all()
            assert (rows.topk_idx[:n] >= 0).any(1).all()
            assert int(rows.num_pairs) == int(rows.rows_per_expert.sum())
            assert int(rows.num_pairs) == int((rows.topk_idx >= 0).sum())
            assert small.is_right(), turn
        dispatcher.check()


def a_graph_refuses_what_does_not_fit(transport: Transport) -> None:
    rank, ranks = transport.rank, transport.world_size
    last = ranks - 1
    case = simple_case([(20,) * ranks, (400,) * ranks], hidden=64, num_experts=8, debug=False)
    with case.dispatcher(transport) as dispatcher:
        one_step(dispatcher, transport, case, 0)
        dispatcher.lock(pair_capacity=3000)
        graph = Graph(dispatcher, case, 400)
        graph.fill(case.batch(0, rank))
        graph.replay()
        assert graph.is_right()
        dispatcher.check()
        old = graph.rows.x.data_ptr()

        graph.fill(case.batch(1, rank))
        graph.replay()
        assert graph.out.isnan().all()
        assert int(graph.rows.num_rows) == 0
        assert (graph.rows.topk_idx == -1).all()
        with pytest.raises(CapacityError, match="rows"):
            dispatcher.check()
        dispatcher.check()  # said once

        for spoil, match in (("id", "999"), ("repeat", "second time"), ("weight", "finite")):
            graph.fill(case.batch(0, rank))
            if rank == last:
                graph.spoil(spoil)
            graph.replay()
            assert graph.out.isnan().all()
            with pytest.raises(RoutingError, match=f"rank {last}.*{match}"):
                dispatcher.check()
        graph.fill(case.batch(0, rank))
        graph.replay()
        assert graph.is_right()

        dispatcher.unlock()
        for step in (1, 0):
            check_step(case, step, rank, one_step(dispatcher, transport, case, step))
        dispatcher.lock(pair_capacity=1 + 20 * 3 * ranks)
        larger = Graph(dispatcher, case, 400)
        assert larger.rows.x.data_ptr() != old
        for _ in range(3):
            graph.fill(case.batch(0, rank))
            graph.replay()
            assert graph.is_right()
            larger.fill(case.batch(0, rank))
            larger.replay()
            assert larger.is_right()
        larger.fill(case.batch(1, rank))
        larger.replay()
        assert larger.out.isnan().all()
        with pytest.raises(CapacityError, match="pairs"):
            dispatcher.check()
        dispatcher.release_captured()


def a_late_rank_changes_nothing(transport: Transport) -> None:
    """200 ms at random points of the protocol, on one rank at a time."""
    draw = random.Random(5)
    case = ragged(transport.world_size, steps=4)
    with case.dispatcher(transport) as dispatcher:
        kernels = dispatcher._mover._kernels
        late = (0, "")
        names = ["route", "rows", "arrive", "ready", "combine"]

        def delay(name, launch):
            def delayed(*args, **options):
                if late == (transport.rank, name):
                    torch.cuda._sleep(int(0.2 * 1.7e9))
                return launch(*args, **options)

            setattr(kernels, name, delayed)

        for name in names:
            delay(name, getattr(kernels, name))
        for _ in range(8):
            late = (draw.randrange(transport.world_size), draw.choice(names))
            step = draw.randrange(4)
            check_step(case, step, transport.rank, one_step(dispatcher, transport, case, step))


def two_thousand_steps_are_right(transport: Transport) -> None:
    rank, ranks = transport.rank, transport.world_size
    case = simple_case([(64,) * ranks], hidden=64, debug=False)
    draw, mine = random.Random(9), random.Random(rank)
    with case.dispatcher(transport) as dispatcher:
        batch = case.batch(0, rank)
        one_step(dispatcher, transport, case, 0)
        dispatcher.lock()
        graphs = [Graph(dispatcher, case, size) for size in (64, 32)]
        for graph in graphs:
            graph.fill(replace(case, tokens=((32,) * ranks,)).batch(0, rank))
        x, ids, weights = batch.to(transport.device)
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved()
        wrong = torch.zeros((), dtype=torch.int64, device=transport.device)
        owners = graphs[0].owner
        for step in range(2000):
            if draw.random() < 0.6:
                graph = draw.choice(graphs)
                graph.x.mul_(-1)
                graph.replay()
                if step % 50 == 0:
                    assert graph.is_right(), step
                continue
            n = mine.randrange(65)
            rows, handle = dispatcher.dispatch(x[:n], ids[:n], weights[:n])
            rows.y.copy_(rows.x)
            out = dispatcher.combine(rows.y, handle)
            where = owners[ids[:n]]
            times = sum((where == r).any(1).float() for r in range(ranks))
            wrong += (out != (x[:n].float() * times[:, None]).to(x.dtype)).sum()
        assert int(wrong) == 0
        dispatcher.check()
        assert torch.cuda.memory_reserved() - before <= 4 << 20


def a_transport_closes_and_opens_again(transport: Transport) -> None:
    check_all(transport, ragged(transport.world_size, steps=2))


def a_rank_that_misses_an_eager_step_is_named(transport: Transport) -> None:
    """By its own, as the transport is broken afterwards."""
    rank, ranks = transport.rank, transport.world_size
    if ranks == 1:
        return
    case = simple_case([(16,) * ranks], hidden=64, debug=False, timeout_s=2.0)
    dispatcher = case.dispatcher(transport)
    one_step(dispatcher, transport, case, 0)
    if rank == ranks - 1:
        time.sleep(6)
        return
    began = time.monotonic()
    with pytest.raises(RankTimeout, match=f"rank {ranks - 1}") as caught:
        send(dispatcher, case.batch(0, rank), transport.device)
    assert caught.value.ranks == (ranks - 1,)
    assert time.monotonic() - began < 4
    with pytest.raises(RankTimeout):
        send(dispatcher, case.batch(0, rank), transport.device)
    dispatcher.close()


def a_rank_that_never_comes_is_named(transport: Transport) -> None:
    """The last check: the transport is broken afterwards."""
    ranks, rank = transport.world_size, transport.rank
    if ranks == 1:
        return
    case = simple_case([(16,) * ranks], hidden=64, debug=False, timeout_s=2.0)
    dispatcher = case.dispatcher(transport)
    one_step(dispatcher, transport, case, 0)
    dispatcher.lock()
    graph = Graph(dispatcher, case, 16)
    graph.fill(case.batch(0, rank))
    graph.replay()
    dispatcher.check()
    transport.exchange(torch.zeros(1, dtype=torch.int64))
    if rank == ranks - 1:
        time.sleep(8)
        return
    began = time.monotonic()
    graph.replay()
    with pytest.raises(RankTimeout, match=f"rank {ranks - 1}"):
        dispatcher.check()
    assert time.monotonic() - began < 6
    assert graph.out.isnan().all()
    with pytest.raises(RankTimeout):
        dispatcher.dispatch(*case.batch(0, rank).to(transport.device))
    dispatcher.close()


CHECKS = [
    rows_and_sums_are_exact,
    fp8_is_the_quantiser_s_bits,
    fp8_of_extreme_numbers_is_the_quantiser_s_too,
    a_handle_s_way_is_taken_again,
    any_y_and_out_will_do,
    bad_input_on_one_rank_is_everybody_s_error,
    eager_dispatches_need_no_exchange_between_hosts,
    ranks_in_different_calls_all_hear_of_it_and_go_on,
    a_rank_that_ends_is_named_by_those_that_dispatch,
    growth_that_fails_on_one_rank_leaves_all_as_they_were,
    a_step_too_large_for_a_lock_is_refused_everywhere,
    an_outbox_too_small_is_refused_everywhere,
    two_dispatchers_and_two_slots_interleave,
    ranks_with_different_slots_free_hear_of_it,
    few_sms_and_other_streams_will_do,
    blocks_of_rows_travel_too,
    graphs_and_eager_steps_interleave,
    a_graph_refuses_what_does_not_fit,
    a_late_rank_changes_nothing,
    two_thousand_steps_are_right,
]
PAIRS = [*expert_checks.CHECKS, *expert_checks.CAPTURED]  # not if distant
LAST = [a_transport_closes_and_opens_again, a_rank_that_never_comes_is_named]
ALONE = [a_rank_that_misses_an_eager_step_is_named]  # if asked for by name


def main() -> int:
    faulthandler.dump_traceback_later(float(os.environ.get("RIG_HANG_S", "48")), exit=True)
    torch.cuda.set_device(CUDA)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def say(text: str) -> None:
        if rank == 0:
            sys.stdout.write(f"[{ranks} ranks] {text}\n")
            sys.stdout.flush()

    wanted, failed = sys.argv[1:], []
    began = time.monotonic()
    transport = connect("nvshmem", device=CUDA, timeout_s=15.0)
    say(f"connected in {time.monotonic() - began:.1f} s")
    # A failure ends the checks of ranks that wait for each other, so two of them begin at the end.
    checks = CHECKS if transport.has_distant else CHECKS + PAIRS
    checks = (checks[::-1] if ranks == 2 else checks) + LAST
    if wanted:
        checks = [check for check in checks + ALONE if check.__name__ in wanted]
    for check in checks:
        began = time.monotonic()
        if check in LAST:
            transport.close()
            transport = connect("nvshmem", device=CUDA, timeout_s=15.0)
        try:
            check(transport)
        except BaseException:
            sys.stdout.write(f"[rank {rank} of {ranks}] {traceback.format_exc()}\n")
            failed.append(check.__name__)
            say(f"FAILED {check.__name__}")
            if ranks > 1:  # the others are elsewhere now
                break
            continue
        say(f"ok {check.__name__} {time.monotonic() - began:.2f} s")
        transport.set_timeout(15.0)
    if not failed:
        transport.close()
    sys.stdout.flush()
    os._exit(len(failed))  # a lost rank may be behind: no farewells


if __name__ == "__main__":
    main()
