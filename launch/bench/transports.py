"""Several transports in one run, beside a plain copy of their bytes into shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from crossdock.dispatch import Dispatcher, Handle, ReceivedRows
from crossdock.dispatch.transports.base import Transport
from crossdock.dispatch.transports.shm_memory import Memory
from crossdock.launch.bench.dispatch import check_against_oracle
from crossdock.launch.bench.timing import measure
from crossdock.launch.bench.tokens import Tokens, tokens_of
from crossdock.launch.config import Job
from crossdock.launch.report import versions

__all__ = ["bench_transports", "halves"]

_DEFINITIONS = {
    "NAME dispatch": "Dispatcher.dispatch over the transport, call to return",
    "NAME combine": "Dispatcher.combine with y in rows.y, call to return",
    "copy of rows": "a plain copy of the bytes that this rank sends, into shared memory",
    "copy of results": "a plain copy of the bytes of its results, into shared memory",
}


def bench_transports(
    job: Job, transports: Sequence[Transport], *, rounds: int = 20
) -> dict[str, Any]:
    """Check one step over each transport against the oracle, then time them in turns. Collective.

    Args:
        job: Its batch and routing are what is timed.
        transports: Of the same ranks on CPUs of one machine; the first is the baseline.
        rounds: Rounds that count.

    Returns:
        JSON-able: times in ms of the slowest rank, ratios, and what each name means.

    Raises:
        AssertionError: A received row or a sum differs from the oracle's.
    """
    first = transports[0]
    tokens = [tokens_of(job, rank) for rank in range(first.world_size)]
    with ExitStack() as stack:
        candidates: dict[str, Callable[[], object]] = {}
        for transport in transports:
            dispatcher = stack.enter_context(
                Dispatcher(
                    job.dispatch_config, transport, topology=job.topology, placement=job.placement
                )
            )
            check_against_oracle(job, transport, dispatcher, tokens)
            dispatch, combine = halves(dispatcher, tokens[transport.rank])
            candidates[f"{transport.name} dispatch"] = dispatch
            candidates[f"{transport.name} combine"] = combine
        mine = tokens[first.rank]
        _, handle = dispatcher.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
        num_sent = sum(handle.plan.send_rows(first.rank))
        dispatcher.unlock()  # frees the slot of that step
        candidates["copy of rows"] = _copy(num_sent * dispatcher.wire.row_bytes)
        candidates["copy of results"] = _copy(num_sent * mine.x.shape[1] * mine.x.element_size())
        times = measure(first, candidates, rounds=rounds)
    medians = {name: time.median for name, time in times.items()}
    copies = medians["copy of rows"] + medians["copy of results"]
    ratios = {}
    for transport in transports:
        there = medians[f"{transport.name} dispatch"]
        both = there + medians[f"{transport.name} combine"]
        if transport is not first:
            baseline = medians[f"{first.name} dispatch"]
            both_baseline = baseline + medians[f"{first.name} combine"]
            ratios[f"{first.name} / {transport.name}, dispatch"] = baseline / there
            ratios[f"{first.name} / {transport.name}, dispatch + combine"] = both_baseline / both
        ratios[f"copy / {transport.name}, dispatch"] = medians["copy of rows"] / there
        ratios[f"copy / {transport.name}, dispatch + combine"] = copies / both
    return {
        "subject": "transports",
        "name": job.config.name,
        "config": job.config.model_dump(),
        "transport": ", ".join(transport.name for transport in transports),
        "world_size": first.world_size,
        "checked": "rows and sums bit-equal to the oracle before timing, over each transport",
        "milliseconds": {name: time.as_json() for name, time in times.items()},
        "ratios": ratios,
        "definitions": _DEFINITIONS,
        "versions": versions(),
    }


def halves(dispatcher: Dispatcher, mine: Tokens) -> tuple[Callable[[], None], Callable[[], None]]:
    """A dispatch of these tokens, and the combine of the last one."""
    held: list[tuple[ReceivedRows, Handle]] = []

    def dispatch() -> None:
        held.append(dispatcher.dispatch(mine.x, mine.topk_idx, mine.topk_weights))

    def combine() -> None:
        rows, handle = held.pop()
        dispatcher.combine(rows.y, handle)

    return dispatch, combine


def _copy(num_bytes: int) -> Callable[[], object]:
    source = torch.ones(num_bytes, dtype=torch.uint8)
    memory = Memory(num_bytes)
    memory.buffer.copy_(source)
    return lambda: memory.buffer.copy_(source)
