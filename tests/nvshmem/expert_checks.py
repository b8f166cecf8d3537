"""What every rank of a rig does with ``layout="expert"``; see ``tests.nvshmem.ranks``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from crossdock.dispatch import Dispatcher, ReceivedRows
from crossdock.dispatch.reference import (
    ReferencePairs,
    ReferenceRows,
    reference_by_expert,
    reference_combine,
    reference_dispatch,
    reference_weighted_sums,
)
from crossdock.dispatch.transports.base import Transport
from crossdock.dispatch.wire import quantize
from crossdock.experts import ExpertWeights, MoELayer, make_experts
from crossdock.scratch import WorkspaceManager
from crossdock.scratch.errors import CapacityError, HandleError, LockedError, RoutingError
from tests.dispatch import cases, oracle
from tests.dispatch.cases import Case, send
from tests.nvshmem import graphs
from tests.nvshmem.graphs import PairGraph

NAN = float("nan")


def ragged(ranks: int, *, steps: int = 2, most: int = 200, **settings: Any) -> Case:
    return cases.ragged(ranks, steps=steps, most=most, layout="expert", **settings)


@lru_cache(maxsize=16)
def expected_rows(case: Case, step: int) -> list[tuple[ReferenceRows, ReferencePairs]]:
    """Of every rank, in both layouts."""
    batches = [case.batch(step, rank) for rank in range(case.world_size)]
    received = reference_dispatch(
        [batch.x for batch in batches],
        [batch.topk_idx for batch in batches],
        [batch.topk_weights for batch in batches],
        case.placement(),
    )
    return [(rows, reference_by_expert(rows)) for rows in received]


@lru_cache(maxsize=16)
def expected_out(case: Case, step: int) -> list[Tensor]:
    """Of every rank, where each pair's result is its rank's noise."""
    received = expected_rows(case, step)
    sums = [
        reference_weighted_sums(case.results(step, rank, len(pairs.x)), pairs, rows)
        for rank, (rows, pairs) in enumerate(received)
    ]
    sources = [rows.source for rows, _ in received]
    return reference_combine(sums, sources, list(case.tokens[step]), case.config.dtype)


def places_of(rows: ReceivedRows, pairs: ReferencePairs, alignment: int) -> Tensor:
    """Row of each pair, by what the rows say of their groups; they must be as they should."""
    counts = rows.rows_per_expert.cpu()
    assert torch.equal(counts, torch.bincount(pairs.expert, minlength=len(counts)))
    sizes = [math.ceil(count / alignment) * alignment for count in counts.tolist()]
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    assert torch.equal(rows.offsets.cpu(), offsets)
    within = torch.arange(len(pairs.expert)) - (counts.cumsum(0) - counts)[pairs.expert]
    return offsets[pairs.expert] + within


def check_rows(case: Case, step: int, rank: int, rows: ReceivedRows) -> Tensor:
    """Rows against the oracle; where each pair lies."""
    pairs, alignment = expected_rows(case, step)[rank][1], case.config.expert_alignment
    at = places_of(rows, pairs, alignment)
    num_pairs, num_local = len(pairs.x), len(rows.rows_per_expert)
    assert int(rows.num_pairs) == num_pairs
    assert int(rows.num_rows) == num_pairs + min(num_pairs, num_local) * (alignment - 1)
    assert int(rows.offsets[-1]) <= int(rows.num_rows) <= rows.capacity
    assert rows.layout == "expert"
    assert torch.equal(rows.source.cpu()[at], pairs.source)
    ids = torch.full((rows.capacity, 1), -1)
    ids[at, 0] = pairs.expert
    assert torch.equal(rows.topk_idx.cpu(), ids)
    assert torch.equal(rows.topk_weights.cpu()[at, 0], pairs.weight)
    x = rows.x.cpu()
    if case.config.wire == "fp8":
        payload, scale = quantize(pairs.x)
        assert torch.equal(rows.scale.cpu()[at], scale)
        assert torch.equal(x.view(torch.uint8)[at], payload.view(torch.uint8))
    else:
        assert torch.equal(x[at], pairs.x)
    moved = any(len(pairs.x) for _, pairs in expected_rows(case, step))  # else no kernel ran
    if case.config.debug and moved:
        assert x[ids[:, 0] < 0].float().isnan().all()
    return at


def one_step(dispatcher: Dispatcher, transport: Transport, case: Case, step: int) -> None:
    """Dispatch, stand-in experts, combine; each compared with the oracle."""
    rank = transport.rank
    rows, handle = send(dispatcher, case.batch(step, rank), transport.device)
    at = check_rows(case, step, rank, rows)
    rows.y.fill_(NAN)
    rows.y[at.to(rows.y.device)] = case.results(step, rank, len(at)).to(rows.y.device)
    out = dispatcher.combine(rows.y, handle).cpu()
    assert torch.equal(out, expected_out(case, step)[rank])


def check_all(transport: Transport, case: Case) -> None:
    with case.dispatcher(transport) as dispatcher:
        for step in range(case.num_steps):
            one_step(dispatcher, transport, case, step)


def few_pairs_are_exact(transport: Transport) -> None:
    ranks = transport.world_size
    for settings in (
        {"most": 150},
        {"wire": "fp8", "expert_alignment": 8},
        {"most": 30, "top_k": 40, "num_experts": 1100, "expert_alignment": 3},
    ):
        check_all(transport, ragged(ranks, **settings))


def pairs_and_their_sums_are_exact(transport: Transport) -> None:
    ranks = transport.world_size
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for wire in ("payload", "fp8"):
            check_all(transport, ragged(ranks, dtype=dtype, wire=wire, idx_dtype=torch.int32))
    for top_k in (1, 32, 64):
        check_all(transport, ragged(ranks, top_k=top_k, num_experts=70, expert_alignment=16))
    for hidden in (8, 1032):
        check_all(transport, ragged(ranks, hidden=hidden))
    check_all(transport, ragged(ranks, num_experts=1, top_k=1))
    check_all(transport, ragged(ranks, num_experts=1500, top_k=8))
    check_all(transport, ragged(ranks, owner=[ranks - 1] * 10, expert_alignment=8))
    for routing in ("one expert", "none", "not rank 0"):
        check_all(transport, ragged(ranks, routing=routing, expert_alignment=4))


def the_way_of_pairs_is_taken_again(transport: Transport) -> None:
    ranks, rank, device = transport.world_size, transport.rank, transport.device
    case = ragged(ranks, seed=3, num_sms=1)
    with case.dispatcher(transport) as dispatcher:
        batch = case.batch(0, rank)
        rows, handle = send(dispatcher, batch, device)
        first = rows.x[: rows.num_rows].clone()
        rows.y.copy_(rows.x)
        out = dispatcher.combine(rows.y, handle)
        for staged in (False, True):
            x = (batch.x * 2).to(device)
            if staged:
                rows, handle = dispatcher.dispatch_send(x, handle=handle).wait()
            else:
                rows, handle = dispatcher.dispatch(x, handle=handle)
            assert torch.equal(rows.x[: rows.num_rows], first * 2)
            y = rows.x.float()  # wider than the bucket's results
            twice = dispatcher.combine_send(y, handle).wait()
            assert twice.shape == out.shape
            rows, handle = dispatcher.dispatch(x, handle=handle)
            rows.y.copy_(rows.x)
            assert torch.equal(dispatcher.combine(rows.y.clone(), handle), out * 2)
        with pytest.raises(HandleError):
            dispatcher.combine(rows.y, handle)


def pairs_of_bad_input_are_refused_everywhere(transport: Transport) -> None:
    ranks, last = transport.world_size, transport.world_size - 1
    case = ragged(ranks, seed=4)
    case = replace(case, tokens=((40,) * ranks,))
    with case.dispatcher(transport) as dispatcher:
        for spoil in ("id", "repeat", "weight"):
            x, ids, weights = case.batch(0, transport.rank).to(transport.device)
            if transport.rank == last:
                ids[3] = torch.tensor([1, 7, -1, 5])
                weights[3] = 1
                if spoil == "id":
                    ids[3, 1] = 999
                elif spoil == "repeat":
                    ids[3, 3] = 1
                else:
                    weights[3, 1] = float("inf")
            with pytest.raises(RoutingError, match=f"rank {last}"):
                dispatcher.dispatch(x, ids, weights)
        one_step(dispatcher, transport, case, 0)


def pairs_that_do_not_fit_a_lock_are_refused(transport: Transport) -> None:
    ranks = transport.world_size
    case = replace(ragged(ranks, expert_alignment=4), tokens=((10,) * ranks, (100,) * ranks))
    with case.dispatcher(transport) as dispatcher:
        one_step(dispatcher, transport, case, 0)
        dispatcher.lock(pair_capacity=10_000)
        with pytest.raises(LockedError, match="rows"):
            one_step(dispatcher, transport, case, 1)
        one_step(dispatcher, transport, case, 0)
        dispatcher.unlock()
        one_step(dispatcher, transport, case, 1)
        dispatcher.lock(pair_capacity=0)
        with pytest.raises(LockedError, match="pairs"):
            one_step(dispatcher, transport, case, 0)


def both_layouts_share_a_transport(transport: Transport) -> None:
    ranks, rank = transport.world_size, transport.rank
    pairs = ragged(ranks, seed=5, most=60, steps=3)
    rows = replace(pairs, config=replace(pairs.config, layout="row"))
    with pairs.dispatcher(transport, num_slots=2) as a, rows.dispatcher(transport) as b:
        for step in range(3):
            pending = a.dispatch_send(*pairs.batch(step, rank).to(transport.device))
            oracle.check_step(rows, step, rank, cases.one_step(b, transport, rows, step))
            received, handle = pending.wait()
            one_step(a, transport, pairs, (step + 1) % 3)
            check_rows(pairs, step, rank, received)
            received.y.zero_()
            home = a.combine_send(received.y, handle)
            oracle.check_step(rows, step, rank, cases.one_step(b, transport, rows, step))
            assert not home.wait().any()


def graphs_of_pairs_refuse_and_replay(transport: Transport) -> None:
    rank, ranks = transport.rank, transport.world_size
    last = ranks - 1
    case = ragged(ranks, hidden=64, num_experts=8, expert_alignment=2, debug=False)
    case = replace(case, tokens=((20,) * ranks, (200,) * ranks))
    with case.dispatcher(transport) as dispatcher:
        one_step(dispatcher, transport, case, 0)
        dispatcher.lock(pair_capacity=3000)
        graph = PairGraph(dispatcher, case, 200)
        for turn in range(3):
            graph.fill(replace(case, seed=turn).batch(0, rank))
            graph.replay()
            assert graph.is_right()
            one_step(dispatcher, transport, case, 0)
        graph.fill(case.batch(1, rank))
        graph.replay()
        assert graph.out.isnan().all()
        assert int(graph.rows.num_rows) == int(graph.rows.num_pairs) == 0
        assert (graph.rows.topk_idx == -1).all()
        assert not graph.rows.offsets.any()
        with pytest.raises(CapacityError, match="rows"):
            dispatcher.check()
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
        dispatcher.check()
        dispatcher.unlock()
        one_step(dispatcher, transport, case, 1)


def both_layouts_give_the_same_bits(transport: Transport) -> None:
    """Through dispatch, torch's experts and combine; eagerly, and captured."""
    ranks, rank, device = transport.world_size, transport.rank, transport.device
    case = ragged(ranks, hidden=64, num_experts=6, top_k=3)
    case = replace(case, tokens=((33,) * ranks, (0, 50, 1, 9, 2, 20, 33, 5)[:ranks]))
    placement = case.placement()
    num_local = placement.num_local_experts(rank)
    generator = torch.Generator().manual_seed(rank)
    w13 = torch.randn(num_local, 64, 64, generator=generator).bfloat16() / 8
    w2 = torch.randn(num_local, 64, 32, generator=generator).bfloat16() / 8
    weights = ExpertWeights(w13=w13.to(device), w2=w2.to(device))

    for wire in ("payload", "fp8"):
        outs = {}
        for layout, alignment in (("row", 1), ("expert", 1), ("expert", 8)):
            config = replace(case.config, layout=layout, wire=wire, expert_alignment=alignment)
            with replace(case, config=config).dispatcher(transport) as dispatcher:
                experts = make_experts(
                    "torch", weights, workspace=WorkspaceManager(device), num_experts=6
                )
                layer = MoELayer(dispatcher, experts)
                steps = [case.batch(step, rank).to(device) for step in range(2)]
                if device.type == "cpu":  # torch's unpermute there rounds product and sum apart
                    steps = [(x, ids, w.bfloat16().float()) for x, ids, w in steps]
                outs[layout, alignment] = [layer(*step) for step in steps]
                layer.lock()
                x, ids, w = (tensor.clone() for tensor in steps[0])

                def step(x=x, ids=ids, w=w, layer=layer, found=outs[layout, alignment]) -> None:
                    found[2:] = [layer(x, ids, w)]

                replay = graphs.record(step)
                replay()
                dispatcher.check()
        first = outs.pop(("row", 1))
        assert torch.equal(first[2], first[0])
        for seen in outs.values():
            assert all(map(torch.equal, first, seen))


CHECKS: list[Callable[[Transport], None]] = [
    pairs_and_their_sums_are_exact,
    the_way_of_pairs_is_taken_again,
    pairs_of_bad_input_are_refused_everywhere,
    pairs_that_do_not_fit_a_lock_are_refused,
    both_layouts_share_a_transport,
]
CAPTURED: list[Callable[[Transport], None]] = [
    graphs_of_pairs_refuse_and_replay,
    both_layouts_give_the_same_bits,
]
