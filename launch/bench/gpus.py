"""Dispatch and combine between the GPUs of one host, beside what their links carry.

``torchrun --standalone --nproc-per-node N -m crossdock.launch.bench.gpus --json PATH``, one rank a
GPU; ``--device cpu`` tries the program itself without one. A table is written beside the JSON.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from crossdock.dispatch import DispatchConfig, Dispatcher, connect
from crossdock.dispatch.nvshmem.mover import NvshmemMover
from crossdock.dispatch.transports.base import Transport
from crossdock.dispatch.transports.nvshmem import NvshmemTransport
from crossdock.dispatch.wire import dequantize
from crossdock.launch.bench.gpus_table import figures_of, table_of
from crossdock.launch.bench.graphs import capture, measure_graphs
from crossdock.launch.bench.inputs import (
    HIDDEN,
    NUM_EXPERTS,
    TOP_K,
    sums_of_unchanged_rows,
    traced_inputs,
    uniform_inputs,
)
from crossdock.launch.bench.naive import NaiveDispatch
from crossdock.launch.bench.peers import NVLINK_GB_S, NVLINK_SOURCE, PEER_SHAPES, PeerCopy
from crossdock.launch.bench.timing import measure
from crossdock.launch.bench.tokens import Tokens
from crossdock.launch.bench.transports import halves
from crossdock.launch.report import versions
from crossdock.launch.screen import write_json
from crossdock.scratch.errors import ConfigError, TransportUnavailable

__all__ = ["Case", "Fabric", "bench_gpus", "plan_cases"]

logger = logging.getLogger(__name__)

DECODE, PREFILL = 128, 4096
TOKENS = (DECODE, 256, 512, 1024, 2048, PREFILL, 8192)
NUM_SMS = (8, 16, 24, 32, 48, 64, 96)

_DEFINITIONS = {
    "captured": "graph replay between events; dispatch is checks, routing, agreement, rows, "
    "metadata, arrival; combine is ready signals and sums of rows.y; no experts in between",
    "eager": "host clock, call to device idle",
    "naive": "eager: a copy of a token for each expert; counts, then hidden states, ids and "
    "weights by three all-to-alls (NCCL's all_to_all_single where the transport is nccl)",
    "peer copy": "the payload bytes of this case that go to other ranks, copied by all ranks at "
    "once: the fastest of kernels of plain 16-byte accesses (units of a lane, threads, blocks of "
    "an SM) and the driver's copies on one stream a peer; graph replay, or between events",
    "bytes that cross": "payload of rows, without scales and metadata, that leaves a rank for "
    "another or enters it from another, whichever is more, of the busiest rank",
    "us": "slowest rank, median",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to measure.

    Attributes:
        routing: ``"uniform"``, or a trace: ``"e64"``, ``"e256"``.
        wire: Of dispatch.
        tokens: Of each rank.
        num_sms: Multiprocessors that dispatch and combine may occupy.
    """

    routing: Literal["uniform", "e64", "e256"] = "uniform"
    wire: Literal["payload", "fp8"] = "payload"
    tokens: int = PREFILL
    num_sms: int | None = None

    @property
    def num_experts(self) -> int:
        """E."""
        return NUM_EXPERTS if self.routing == "uniform" else int(self.routing[1:])

    @property
    def config(self) -> DispatchConfig:
        """Of its dispatchers."""
        return DispatchConfig(
            num_experts=self.num_experts,
            top_k=TOP_K,
            hidden=HIDDEN,
            wire=self.wire,
            num_sms=self.num_sms,
        )

    def inputs(self, transport: Transport) -> Tokens:
        """This rank's tokens."""
        if self.routing == "uniform":
            return uniform_inputs(transport, self.tokens, self.num_experts)
        return traced_inputs(transport, self.tokens, self.routing)


def plan_cases(tokens: tuple[int, ...], num_sms: tuple[int, ...]) -> list[Case]:
    """What is measured, what is most wanted first."""
    prefill, decode = max(t for t in tokens if t <= PREFILL), tokens[0]
    wanted = [Case(tokens=prefill), Case(tokens=decode)]
    wanted += [Case(tokens=prefill, num_sms=sms) for sms in num_sms]
    wanted += [Case(tokens=prefill, wire="fp8"), Case(tokens=decode, wire="fp8")]
    every = [
        Case(routing=routing, wire=wire, tokens=t)
        for t in sorted(tokens, key=lambda t: t not in (prefill, decode))
        for routing in ("uniform", "e256", "e64")
        for wire in ("payload", "fp8")
    ]
    return list(dict.fromkeys(wanted + every))


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """The transports between the same ranks.

    Attributes:
        transports: By name; those whose ranks write to each other's memory first.
        missing: Those that cannot be had, and why.
    """

    transports: dict[str, Transport]
    missing: dict[str, str] = field(default_factory=dict)

    @classmethod
    def join(cls, device: Literal["cuda", "cpu"]) -> Fabric:
        """All that can be had. Collective.

        Raises:
            ConfigError: None of them, or one rank alone.
        """
        found: dict[str, Transport] = {}
        missing: dict[str, str] = {}
        place, names = "cpu", ["shm", "gloo"]
        if device == "cuda":
            present, ranks = torch.cuda.device_count(), int(os.environ.get("WORLD_SIZE", "1"))
            if present == 0:
                raise ConfigError("torch sees no GPU here: --device cpu")
            place = f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % present}"
            names = ["nvshmem", "nccl"]
            if ranks > present:
                names.remove("nccl")
                missing["nccl"] = f"NCCL wants a GPU for each of {ranks} ranks; here: {present}"
        for name in names:
            try:
                found[name] = connect(name, device=place)
            except TransportUnavailable as error:
                missing[name] = str(error)
        if not found or next(iter(found.values())).world_size < 2:
            raise ConfigError(f"nothing to measure between fewer than two ranks ({missing})")
        return cls(transports=found, missing=missing)

    @property
    def first(self) -> Transport:
        """Over which ranks meet."""
        return next(iter(self.transports.values()))

    @property
    def last(self) -> Transport:
        """NCCL, where it can be had."""
        return list(self.transports.values())[-1]

    def close(self) -> None:
        """Close all."""
        for transport in reversed(self.transports.values()):
            transport.close()


def bench_gpus(
    fabric: Fabric, cases: list[Case], *, seconds: float, rounds: int = 20
) -> dict[str, Any]:
    """Measure the cases, as many as there is time for. Collective.

    Args:
        fabric: Of these ranks.
        cases: In this order. Bandwidth is judged by the first, latency by the second.
        seconds: After which no further case is begun.
        rounds: Of each measurement.

    Returns:
        JSON-able.

    Raises:
        AssertionError: A step's results were wrong.
    """
    ends = time.monotonic() + seconds
    results, left_out = [], []
    for case in cases:
        late = int(time.monotonic() > ends)
        if fabric.first.exchange(torch.tensor([late])).any():
            left_out.append(str(case))
            continue
        results.append(_measure_case(fabric, case, rounds))
        if fabric.first.rank == 0:
            logger.info("%s: %s", case, results[-1]["us"])
    device = fabric.first.device
    return {
        "subject": "gpus",
        "world_size": fabric.first.world_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "ranks share a GPU": "nccl" in fabric.missing and device.type == "cuda",
        "transports": list(fabric.transports),
        "missing": fabric.missing,
        "hidden": HIDDEN,
        "top_k": TOP_K,
        "rounds": rounds,
        "link": {"GB/s, one direction": NVLINK_GB_S, "source": NVLINK_SOURCE},
        "figures": figures_of(results, prefill=cases[0].tokens, decode=cases[1].tokens),
        "cases": results,
        "left out, no time": left_out,
        "definitions": _DEFINITIONS,
        "versions": versions(),
    }


def _measure_case(fabric: Fabric, case: Case, rounds: int) -> dict[str, Any]:
    mine = case.inputs(fabric.first)
    times: dict[str, float] = {}
    with ExitStack() as stack:
        dispatchers = {
            name: stack.enter_context(Dispatcher(case.config, transport))
            for name, transport in fabric.transports.items()
            if case.num_sms is None or isinstance(transport, NvshmemTransport)
        }
        for dispatcher in dispatchers.values():
            counts = _check_eager(dispatcher, mine)
        if case.num_sms is None:
            times |= _measure_eager(fabric, case, dispatchers, mine, rounds)
        for name, dispatcher in dispatchers.items():
            if isinstance(dispatcher._mover, NvshmemMover):
                times |= _measure_captured(name, dispatcher, mine, counts, rounds)
    copies = [us for name, us in times.items() if name.startswith("peer copy")]
    if copies:
        times["peer copy"] = min(copies)
    across = counts - counts.diag().diag()
    rows = int(max(across.sum(0).max(), across.sum(1).max()))
    return {
        "routing": case.routing,
        "wire": case.wire,
        "tokens": case.tokens,
        "num_sms": case.num_sms,
        "rows received": counts.sum(0).tolist(),
        "bytes that cross": {
            "dispatch": rows * HIDDEN * (1 if case.wire == "fp8" else 2),
            "combine": rows * HIDDEN * 2,
        },
        "us": times,
    }


def _check_eager(dispatcher: Dispatcher, mine: Tokens) -> Tensor:
    """A step whose experts give rows back as they came; rows [R, R] from each rank to each."""
    rows, handle = dispatcher.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
    rows.y.copy_(rows.x if rows.scale is None else dequantize(rows.x, rows.scale, rows.dtype))
    out = dispatcher.combine(rows.y, handle)
    _check_sums(dispatcher, mine, out)
    ranks = range(dispatcher.transport.world_size)
    return torch.tensor([handle.plan.send_rows(rank) for rank in ranks])


def _check_sums(dispatcher: Dispatcher, mine: Tokens, out: Tensor) -> None:
    expected = sums_of_unchanged_rows(mine, dispatcher.placement, fp8=dispatcher.wire.fp8)
    assert torch.equal(out, expected), f"wrong sums over {dispatcher.transport.name}"


def _measure_eager(
    fabric: Fabric, case: Case, dispatchers: dict[str, Dispatcher], mine: Tokens, rounds: int
) -> dict[str, float]:
    candidates: dict[str, Callable[[], object]] = {}
    for name, dispatcher in dispatchers.items():
        dispatch, combine = halves(dispatcher, mine)
        candidates |= {f"eager {name} dispatch": dispatch, f"eager {name} combine": combine}
    if case.wire == "payload":
        last = fabric.last
        naive = NaiveDispatch(last, next(iter(dispatchers.values())).placement)
        candidates[f"naive over {last.name}"] = lambda: naive(
            mine.x, mine.topk_idx, mine.topk_weights
        )
    times = measure(fabric.first, candidates, rounds=rounds // 2, warm_up=2)
    return {name: time.median * 1e3 for name, time in times.items()}


def _measure_captured(
    name: str, dispatcher: Dispatcher, mine: Tokens, counts: Tensor, rounds: int
) -> dict[str, float]:
    dispatcher.lock()
    graphs = _Graphs(dispatcher, mine)
    graphs.check()
    mover = dispatcher._mover
    assert isinstance(mover, NvshmemMover)
    memory = mover._memory.in_use[0].memory
    assert memory is not None
    row_bytes = HIDDEN * dispatcher.wire.payload_dtype.itemsize
    copy = PeerCopy(dispatcher.transport, memory, counts, row_bytes)
    copies: dict[str, Callable[[], None]] = {"peer copy, engines": copy.by_engines}
    for index, shape in enumerate(PEER_SHAPES):
        copy.by_kernel(index)  # a graph may not load it
        name_of_copy = f"peer copy, {' x '.join(map(str, shape.values()))}"
        copies[name_of_copy], _ = capture(partial(copy.by_kernel, index))
    for run in copies.values():
        copy.forget()
        run()
        copy.verify()
    times, _ = measure_graphs(
        dispatcher.transport,
        {
            f"captured {name} dispatch": graphs.dispatch,
            f"captured {name} combine": graphs.combine,
            f"captured {name} dispatch + combine": graphs.both,
            **copies,
        },
        rounds,
    )
    dispatcher.check()
    return times


class _Graphs:
    """A dispatch, its combine, and both in one: what replays them."""

    def __init__(self, dispatcher: Dispatcher, mine: Tokens) -> None:
        self._dispatcher, self._mine = dispatcher, mine
        self.dispatch, _ = capture(self._dispatch)
        self.combine, _ = capture(self._combine)
        self.both, _ = capture(self._dispatch_and_combine)

    def check(self) -> None:
        """As the eager step was checked."""
        rows = self._rows
        self.dispatch()
        rows.y.copy_(rows.x if rows.scale is None else dequantize(rows.x, rows.scale, rows.dtype))
        self.combine()
        _check_sums(self._dispatcher, self._mine, self._out)

    def _dispatch(self) -> None:
        mine = self._mine
        self._rows, self._handle = self._dispatcher.dispatch(
            mine.x, mine.topk_idx, mine.topk_weights
        )

    def _combine(self) -> None:
        self._out = self._dispatcher.combine(self._rows.y, self._handle)

    def _dispatch_and_combine(self) -> None:
        mine = self._mine
        rows, handle = self._dispatcher.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
        self._dispatcher.combine(rows.y, handle)


def main() -> None:
    """Measure on this rank; rank 0 writes what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="a .md is written beside it")
    parser.add_argument("--seconds", type=float, default=150.0, help="begin no case after them")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    fabric = Fabric.join(options.device)
    tokens = TOKENS if options.device == "cuda" else (8, 32)
    cases = plan_cases(tokens, NUM_SMS if "nvshmem" in fabric.transports else ())
    result = bench_gpus(fabric, cases, seconds=options.seconds, rounds=options.rounds)
    if fabric.first.rank == 0:
        write_json(result, options.json)
        table = table_of(result)
        options.json.with_suffix(".md").write_text(table)
        print(table, flush=True)
    fabric.close()


if __name__ == "__main__":
    main()
