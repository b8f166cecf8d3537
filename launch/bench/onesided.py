"""Dispatch and combine over NVSHMEM, captured in graphs, beside kernels that only move the bytes.

``python -m crossdock.launch.bench.onesided [JSON]`` on every rank; on one GPU by
``crossdock.launch.rig``. Each time is the slowest rank's, median of the rounds; ranks start each
round together.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crossdock.dispatch import DispatchConfig, Dispatcher, Handle, ReceivedRows, connect
from crossdock.dispatch.nvshmem import launch
from crossdock.dispatch.nvshmem.launch import SOURCES, Shape
from crossdock.dispatch.nvshmem.layout import BY_ROUTE
from crossdock.dispatch.nvshmem.mover import NvshmemMover
from crossdock.dispatch.transports.base import Transport
from crossdock.launch.bench.graphs import WARM_UP, capture, make_event, measure_graphs, slowest_rank
from crossdock.launch.bench.inputs import (
    HIDDEN,
    NUM_EXPERTS,
    TOP_K,
    sums_of_unchanged_rows,
    traced_inputs,
    uniform_inputs,
)
from crossdock.launch.bench.tokens import Tokens
from crossdock.scratch.kernels import load_kernel

__all__ = ["bench_onesided"]

logger = logging.getLogger(__name__)

ROUNDS, DECODE_ROUNDS, EAGER_ROUNDS = 30, 120, 200
CEILING_SHAPES = tuple(
    Shape(units, threads, blocks, stages=2)  # they have no stages
    for units, threads, blocks in ((2, 256, 4), (4, 256, 4), (4, 512, 2), (7, 256, 2))
)

DEFINITIONS = {
    "dispatch": "graph: checks, routing, agreement, rows, metadata, arrival",
    "dispatch ceiling": "graph: a flag barrier, a kernel that reads each token once and writes as "
    "many rows with plain 16-byte accesses, a flag barrier; all ranks together; the fastest of "
    "several shapes (units of a lane, threads, blocks of an SM)",
    "combine": "graph: ready signals, sum of rows.y where it lies",
    "combine ceiling": "as above, reading the rows and writing one a token",
    "combine, foreign y": "the same with y in another tensor: one copy more",
    "dispatch and combine": "one graph of both, as a layer's step is captured; results as they lie",
    "two barriers": "graph: two bare flag barriers",
    "route, rows, arrive": "the dispatch's kernels, launched eagerly, between events: checks, "
    "routing and this rank's record; everybody's record and rows; arrival",
    "eager": "host time of a dispatch of 128 tokens: the call; of it the poll for the records that "
    "a kernel writes; the rest (host); in rounds of their own, launches of its two kernels. No "
    "records travel between hosts. Beside it a combine, and of it the exchange of records. Of the "
    "slowest rank of each round, as everywhere here; and each rank's own median, for the hosts' "
    "own time is no common one",
}


def bench_onesided(
    transport: Transport, *, rounds: int = ROUNDS, decode_rounds: int = DECODE_ROUNDS
) -> dict[str, Any]:
    """Measure everything. Collective.

    Args:
        transport: Of the name ``nvshmem``.
        rounds: Rounds that count.
        decode_rounds: The same of batches of 128 tokens, whose times vary more.

    Returns:
        JSON-able, times in us of the slowest rank.

    Raises:
        AssertionError: A step's results were wrong.
    """
    uniform = {
        f"{wire}, {tokens} tokens": _measure_case(
            transport, uniform_inputs(transport, tokens, NUM_EXPERTS), NUM_EXPERTS, wire, count
        )
        for tokens, count in ((4096, rounds), (128, decode_rounds))
        for wire in ("payload", "fp8")
    }
    curve = {
        str(tokens): _measure_case(
            transport,
            uniform_inputs(transport, tokens, NUM_EXPERTS),
            NUM_EXPERTS,
            "payload",
            rounds // 2,
        )
        for tokens in (32, 256, 512, 1024, 2048, 8192)
    }
    traces = {
        f"{name}, {wire}": _measure_case(
            transport, traced_inputs(transport, 4096, name), int(name[1:]), wire, rounds
        )
        for name in ("e64", "e256")
        for wire in ("payload", "fp8")
    }
    return {
        "subject": "onesided",
        "world_size": transport.world_size,
        "hidden": HIDDEN,
        "top_k": TOP_K,
        "shapes": {
            "rows": tuple(launch.ROWS),
            "rows, fp8": tuple(launch.ROWS_FP8),
            "combine": tuple(launch.COMBINE),
        },
        "device": torch.cuda.get_device_name(transport.device),
        "sms": torch.cuda.get_device_properties(transport.device).multi_processor_count,
        "uniform": uniform,
        "curve": curve,
        "traces": traces,
        "eager": _measure_eager(transport),
        "definitions": DEFINITIONS,
    }


def _measure_case(
    transport: Transport, inputs: Tokens, num_experts: int, wire: str, rounds: int
) -> dict[str, Any]:
    config = DispatchConfig(num_experts=num_experts, top_k=TOP_K, hidden=HIDDEN, wire=wire)  # type: ignore[arg-type]
    with Dispatcher(config, transport) as dispatcher:
        rows, handle = dispatcher.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights)
        received, capacity = handle.plan.received, rows.capacity
        copies = sum(handle.plan.send_rows(transport.rank))
        dispatcher.combine(rows.y, handle)
        dispatcher.lock()
        graphs = _Graphs(dispatcher, inputs)
        if wire == "payload":
            graphs.check()
        mover = dispatcher._mover
        assert isinstance(mover, NvshmemMover)
        ceilings = _Ceilings(mover, dispatcher, inputs, copies)
        candidates = {
            "dispatch": graphs.dispatch,
            "combine": graphs.combine,
            "dispatch again": graphs.foreign_dispatch,
            "combine, foreign y": graphs.foreign_combine,
            "dispatch and combine": graphs.both,
            "two barriers": ceilings.barriers,
            **ceilings.out,
            **ceilings.back,
        }
        times, tails = measure_graphs(transport, candidates, rounds)
        for call, graphs_of in (("dispatch", ceilings.out), ("combine", ceilings.back)):
            times[f"{call} ceiling"] = min(times[name] for name in graphs_of)
        times |= _measure_parts(transport, mover, inputs, rounds)
        dispatcher.check()
    row_bytes = HIDDEN * 2
    moved = transport.exchange(torch.tensor([len(inputs.x), copies])).sum(0).tolist()
    out_bytes = HIDDEN * (1 if wire == "fp8" else 2)
    gigabytes = (moved[0] * row_bytes + moved[1] * out_bytes) / 1e9
    return {
        "tokens": len(inputs.x),
        "wire": wire,
        "rounds": rounds,
        "us": times,
        "us, 95th percentile": tails,
        "of ceiling": {
            "dispatch": times["dispatch ceiling"] / times["dispatch"],
            "combine": times["combine ceiling"] / times["combine"],
        },
        "dispatch and combine / two barriers": times["dispatch and combine"]
        / times["two barriers"],
        "GB/s of all ranks, read and written": {
            "dispatch": gigabytes / times["dispatch"] * 1e6,
            "ceiling": gigabytes / times["dispatch ceiling"] * 1e6,
        },
        "rows received": received,
        "capacity": capacity,
        "ranks x max tokens": transport.world_size * len(inputs.x),
    }


class _Graphs:
    """What replays dispatch and combine, each on its own, also with results in another tensor."""

    def __init__(self, dispatcher: Dispatcher, inputs: Tokens) -> None:
        self._dispatcher, self._inputs = dispatcher, inputs
        self.dispatch, (self.rows, handle) = capture(self._dispatch)
        self.combine, self.out = capture(partial(dispatcher.combine, self.rows.y, handle))
        self.foreign_dispatch, (rows, handle) = capture(self._dispatch)
        self._foreign = torch.zeros_like(rows.y)  # kept: a graph has its address
        self.foreign_combine, _ = capture(partial(dispatcher.combine, self._foreign, handle))
        self.both, _ = capture(self._dispatch_and_combine)

    def check(self) -> None:
        """Experts that give rows back as they came: every token comes home once a rank."""
        self.dispatch()
        self.rows.y.copy_(self.rows.x)
        self.combine()
        expected = sums_of_unchanged_rows(self._inputs, self._dispatcher.placement)
        assert torch.equal(self.out, expected), "sums are wrong"

    def _dispatch(self) -> tuple[ReceivedRows, Handle]:
        inputs = self._inputs
        return self._dispatcher.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights)

    def _dispatch_and_combine(self) -> None:
        rows, handle = self._dispatch()
        self._dispatcher.combine(rows.y, handle)


class _Ceilings:
    """Graphs that move as many bytes and do nothing else, between flag barriers."""

    def __init__(
        self, mover: NvshmemMover, dispatcher: Dispatcher, inputs: Tokens, copies: int
    ) -> None:
        device, kernels = inputs.x.device, mover._kernels
        tokens, itemsize = len(inputs.x), 1 if dispatcher.wire.fp8 else 2
        owner = dispatcher.placement.owner.to(device)[inputs.topk_idx].sort(1).values
        distinct = 1 + (owner[:, 1:] != owner[:, :-1]).sum(1)
        first = torch.cat([distinct.new_zeros(1), distinct.cumsum(0)])
        packed = torch.zeros(copies, HIDDEN * 2, dtype=torch.uint8, device=device)
        out = torch.empty_like(inputs.x)
        words, written = HIDDEN * 2 // 16, HIDDEN * itemsize // 16
        present = torch.cuda.get_device_properties(device).multi_processor_count

        def barrier() -> None:
            kernels.ready()
            kernels.meet()

        def move(name: str, shape: Shape, *arguments: Tensor | int) -> Callable[[], None]:
            source = SOURCES / "ceiling.cu"
            kernel = load_kernel(source, name, device=device, defines=shape.macros())
            blocks = present * shape.blocks
            run = partial(kernel, blocks, shape.threads, *arguments, device=device)
            return _graph_of(barrier, run, barrier)

        self.out = {
            f"dispatch ceiling {tuple(shape)}": move(
                "fan_out", shape, inputs.x, packed, first, tokens, words, written
            )
            for shape in CEILING_SHAPES
        }
        self.back = {
            f"combine ceiling {tuple(shape)}": move(
                "fan_in", shape, packed, out, first, tokens, words
            )
            for shape in CEILING_SHAPES
        }
        self.barriers = _graph_of(barrier, barrier)
        self._kept = (packed, first, out)  # graphs have their addresses


def _graph_of(*calls: Callable[[], None]) -> Callable[[], None]:
    calls[0]()  # load before capture
    calls[1]()
    torch.cuda.synchronize()

    def run() -> None:
        for call in calls:
            call()

    replay, _ = capture(run)
    return replay


def _measure_parts(
    transport: Transport, mover: NvshmemMover, inputs: Tokens, rounds: int
) -> dict[str, float]:
    """The dispatch's kernels one by one."""
    names = ["route", "rows", "arrive"]
    samples = torch.zeros(3, rounds, dtype=torch.int64)
    events = [make_event() for _ in range(4)]
    slot = mover._memory.in_use[0].table
    for round_ in range(-WARM_UP, rounds):
        way = mover._new_way(inputs.topk_idx)
        transport.exchange(torch.zeros(1, dtype=torch.int64))
        events[0].record()
        mover._kernels.route(inputs.topk_idx, inputs.topk_weights, way, BY_ROUTE)
        events[1].record()
        mover._kernels.rows(slot, inputs.x, way, BY_ROUTE, -1, True)
        events[2].record()
        mover._kernels.arrive(slot)
        events[3].record()
        events[3].synchronize()
        if round_ >= 0:
            for part in range(3):
                elapsed = events[part].elapsed_time(events[part + 1])
                samples[part, round_] = round(elapsed * 1e6)
    return slowest_rank(transport, names, samples).medians


def _measure_eager(transport: Transport) -> dict[str, dict[str, dict[str, Any]]]:
    """Host time of eager calls, one after the other as a model makes them, and on an idle device.

    A dispatch waits for the device in one place, where it polls for the matrix of records that a
    kernel writes; the rest of the call is the host's own time (``host``). A combine waits for
    records of the other hosts, and not for the device.
    """
    inputs = uniform_inputs(transport, 128, NUM_EXPERTS)
    config = DispatchConfig(num_experts=NUM_EXPERTS, top_k=TOP_K, hidden=HIDDEN)
    result = {}
    with Dispatcher(config, transport) as dispatcher:
        mover = dispatcher._mover
        assert isinstance(mover, NvshmemMover)
        device, hosts = _Timed(mover._matrix.wait), _Timed(transport._exchange)
        route, rows = _Timed(mover._kernels.route), _Timed(mover._kernels.rows)
        mover._matrix.wait = device  # type: ignore[method-assign]
        transport._exchange = hosts  # type: ignore[method-assign]

        def step() -> dict[str, int]:
            device.spent = hosts.spent = route.spent = rows.spent = 0
            began = time.perf_counter_ns()
            received, handle = dispatcher.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights)
            call = time.perf_counter_ns() - began
            assert hosts.spent == 0, "hosts exchanged records"
            y = received.y
            began = time.perf_counter_ns()
            dispatcher.combine(y, handle)
            times = {
                "call": call,
                "of it waiting for the device": device.spent,
                "host": call - device.spent,
                "combine": time.perf_counter_ns() - began,
                "of it exchanging records": hosts.spent,
            }
            return times | {"launches": route.spent + rows.spent} if route.spent else times

        def pause() -> None:
            torch.cuda.synchronize()
            transport.exchange(torch.zeros(1, dtype=torch.int64))

        for _ in range(WARM_UP):
            received, handle = dispatcher.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights)
            dispatcher.combine(received.y, handle)
        result["one after the other"] = _time_steps(transport, step)
        result["on an idle device"] = _time_steps(transport, step, pause)
        mover._kernels.route = route  # type: ignore[method-assign]
        mover._kernels.rows = rows  # type: ignore[method-assign]
        result["one after the other, launches timed as well"] = _time_steps(transport, step)
        del transport._exchange
    return result


def _time_steps(
    transport: Transport,
    step: Callable[[], dict[str, int]],
    begin: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Nanoseconds of parts of many steps; in us, of all ranks."""
    steps = []
    for _ in range(EAGER_ROUNDS):
        begin()
        steps.append(step())
    names = list(steps[0])
    samples = torch.tensor([[times[name] for times in steps] for name in names])
    medians, tails = slowest_rank(transport, names, samples)
    own = transport.exchange(samples.median(1).values).double() / 1e3
    return {
        "us": medians,
        "us, 95th percentile": tails,
        "us, each rank's median": dict(zip(names, own.t().tolist(), strict=True)),
    }


class _Timed:
    """A function, and the nanoseconds spent in it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.spent = 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        began = time.perf_counter_ns()
        result = self._function(*arguments, **options)
        self.spent += time.perf_counter_ns() - began
        return result


def main() -> None:
    """Measure on this rank, and write or print what rank 0 found."""
    logging.basicConfig(level=logging.INFO)
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    transport = connect("nvshmem", device=f"cuda:{index}")
    result = bench_onesided(transport)
    if transport.rank == 0:
        text = json.dumps(result, indent=1)
        if len(sys.argv) > 1:
            Path(sys.argv[1]).write_text(text + "\n")
        for group in ("uniform", "curve", "traces"):
            for name, case in result[group].items():
                times = {part: round(us, 1) for part, us in case["us"].items()}
                print(name, times, case["of ceiling"], case["GB/s of all ranks, read and written"])
        print("eager", result["eager"], flush=True)
    transport.close()


if __name__ == "__main__":
    main()
