"""Dispatch and combine on real ranks, beside a bare exchange of their bytes and the naive way."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from crossdock.dispatch import Dispatcher, Handle, ReceivedRows
from crossdock.dispatch.reference import reference_combine, reference_dispatch
from crossdock.dispatch.transports.base import Transport
from crossdock.launch.bench.naive import NaiveDispatch
from crossdock.launch.bench.timing import Times, measure
from crossdock.launch.bench.tokens import Tokens, tokens_of
from crossdock.launch.config import Job
from crossdock.launch.report import versions
from crossdock.launch.screen import make_table

__all__ = ["bench_dispatch", "check_against_oracle", "show_dispatch"]

_DEFINITIONS = {
    "dispatch": "Dispatcher.dispatch, call to return: checks, routing, agreement, rows, unpacking",
    "combine": "Dispatcher.combine with y in rows.y, call to return",
    "bare all-to-all": "one all_to_all of the bytes that dispatch sends, into memory taken before",
    "copy sent": "a plain copy of the bytes that this rank sends",
    "copy received": "a plain copy of the bytes that this rank receives",
    "naive dispatch": "a copy for each expert; counts, then hidden, ids and weights separately",
    "empty dispatch": "a dispatch of 0 tokens on all ranks",
    "small all-gather": "one all-gather of 8 bytes a rank",
}


def bench_dispatch(job: Job, transport: Transport, *, rounds: int = 20) -> dict[str, Any]:
    """Check one step against the oracle, then time it beside its ceilings. Collective.

    Args:
        job: Its batch and routing are what is timed.
        transport: Of the EP group.
        rounds: Rounds that count.

    Returns:
        JSON-able: times in ms of the slowest rank, ratios, bytes, and what each name means.

    Raises:
        AssertionError: A received row or a sum differs from the oracle's.
    """
    tokens = [tokens_of(job, rank) for rank in range(transport.world_size)]
    device = transport.device
    mine = tokens[transport.rank].to(device)
    none = mine.first(0)
    with Dispatcher(
        job.dispatch_config, transport, topology=job.topology, placement=job.placement
    ) as dispatcher:
        check_against_oracle(job, transport, dispatcher, tokens)
        rows, handle = dispatcher.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
        rows.y[: rows.num_rows] = 1
        dispatcher.combine(rows.y, handle)
        held: list[tuple[ReceivedRows, Handle]] = []
        sent = torch.ones(
            sum(handle.plan.send_rows(transport.rank)),
            dispatcher.wire.row_bytes,
            dtype=torch.uint8,
            device=device,
        )
        shape = (handle.plan.received[transport.rank], sent.shape[1])
        received = torch.empty(shape, dtype=torch.uint8, device=device)
        sent_copy, received_copy = torch.ones_like(sent), torch.ones_like(received)
        naive = NaiveDispatch(transport, job.placement)

        def dispatch() -> None:
            held.append(dispatcher.dispatch(mine.x, mine.topk_idx, mine.topk_weights))

        def combine() -> None:
            arrived, way = held.pop()
            dispatcher.combine(arrived.y, way)

        def empty_dispatch() -> None:
            held.append(dispatcher.dispatch(none.x, none.topk_idx, none.topk_weights))

        def bare() -> None:
            plan, rank = handle.plan, transport.rank
            transport.all_to_all(sent, plan.send_rows(rank), received, plan.recv_rows(rank)).wait()

        times = measure(
            transport,
            {
                "dispatch": dispatch,
                "combine": combine,
                "bare all-to-all": bare,
                "copy sent": lambda: sent_copy.copy_(sent),
                "copy received": lambda: received_copy.copy_(received),
                "naive dispatch": lambda: naive(mine.x, mine.topk_idx, mine.topk_weights),
                "empty dispatch": empty_dispatch,
                "(its combine)": combine,
                "small all-gather": lambda: transport.exchange(torch.zeros(1, dtype=torch.int64)),
            },
            rounds=rounds,
        )
        del times["(its combine)"]
    return _result(job, transport, times, handle.plan.received, sent, received)


def show_dispatch(result: dict[str, Any], console: Console) -> None:
    """The table of times, then the ratios."""
    table = make_table(
        f"{result['name']}: {result['transport']}, {result['world_size']} ranks, slowest rank, ms",
        ["", "median", "p50..p95", "p99"],
    )
    for name, time in result["milliseconds"].items():
        table.add_row(
            name,
            f"{time['median']:.2f}",
            f"{time['median']:.2f} .. {time['p95']:.2f}",
            f"{time['p99']:.2f}",
        )
    console.print(table)
    for name, ratio in result["ratios"].items():
        console.print(f"{name}: {ratio:.2f}")


def _result(
    job: Job,
    transport: Transport,
    times: dict[str, Times],
    rows: list[int],
    sent: Tensor,
    received: Tensor,
) -> dict[str, Any]:
    medians = {name: time.median for name, time in times.items()}
    ceiling = sum(medians[name] for name in ("bare all-to-all", "copy sent", "copy received"))
    sizes = transport.exchange(torch.tensor([sent.numel(), received.numel()])).tolist()
    return {
        "subject": "dispatch",
        "name": job.config.name,
        "config": job.config.model_dump(),
        "transport": transport.name,
        "world_size": transport.world_size,
        "checked": "rows and sums bit-equal to the oracle before timing",
        "milliseconds": {name: time.as_json() for name, time in times.items()},
        "ratios": {
            "dispatch / (bare all-to-all + two copies)": medians["dispatch"] / ceiling,
            "naive dispatch / dispatch": medians["naive dispatch"] / medians["dispatch"],
            "empty dispatch / small all-gather": (
                medians["empty dispatch"] / medians["small all-gather"]
            ),
            "combine / copy received": medians["combine"] / medians["copy received"],
        },
        "rows_received": rows,
        "bytes_sent": [size[0] for size in sizes],
        "bytes_received": [size[1] for size in sizes],
        "definitions": _DEFINITIONS,
        "versions": versions(),
    }


def check_against_oracle(
    job: Job, transport: Transport, dispatcher: Dispatcher, tokens: list[Tokens]
) -> None:
    """One step of at most 256 tokens a rank must be bit-equal to the oracle's."""
    few = [t.first(256) for t in tokens]
    mine = few[transport.rank].to(transport.device)
    rows, handle = dispatcher.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
    expected = reference_dispatch(
        [t.x for t in few],
        [t.topk_idx for t in few],
        [t.topk_weights for t in few],
        job.placement,
        algorithm=job.config.dispatch.algorithm,
        wire=job.config.dispatch.wire,
    )
    here, n = expected[transport.rank], rows.num_rows
    if rows.scale is None:
        assert torch.equal(rows.x[:n].cpu(), here.x), "received rows differ from the oracle's"
    assert torch.equal(rows.topk_idx[:n].cpu(), here.topk_idx), "ids differ from the oracle's"
    assert torch.equal(rows.topk_weights[:n].cpu(), here.topk_weights), "weights differ"
    rows.y[:n] = here.x.to(rows.y.device)
    out = dispatcher.combine(rows.y, handle)
    sums = reference_combine(
        [e.x for e in expected], [e.source for e in expected], [len(t.x) for t in few], job.dtype
    )
    assert torch.equal(out.cpu(), sums[transport.rank]), "sums differ from the oracle's"
