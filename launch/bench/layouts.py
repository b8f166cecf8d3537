"""A step's way to the experts and back in both layouts over NVSHMEM, captured, on the same tokens.

``python -m crossdock.launch.bench.layouts [JSON]`` on every rank; on one GPU by
``crossdock.launch.rig``. Each time is the slowest rank's, median of the rounds.

    row      dispatch, permute | unpermute, combine
    expert   dispatch          |            combine
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from crossdock.dispatch import DispatchConfig, Dispatcher, Handle, ReceivedRows, connect
from crossdock.dispatch.transports.base import Transport
from crossdock.launch.bench.graphs import capture, measure_graphs
from crossdock.launch.bench.inputs import HIDDEN, NUM_EXPERTS, TOP_K, uniform_inputs
from crossdock.launch.bench.tokens import Tokens
from crossdock.scratch import Permuted, WorkspaceManager, permute, permute_scratch, unpermute

__all__ = ["bench_layouts"]

logger = logging.getLogger(__name__)

ROUNDS = 30
TOKENS = (128, 1024, 4096)  # of a rank

DEFINITIONS = {
    "dispatch": "graph: checks, routing, agreement, rows or pairs, metadata, arrival",
    "permute": "graph, row layout: rows to pairs grouped by expert",
    "unpermute": "graph, row layout: weighted sums of pairs, into rows.y",
    "combine": "graph: ready signals, sums of rows.y where it lies",
    "step": "graph of all of these; experts write their results at once",
    "copy of y": "graph, expert layout: results of GEMMs that cannot write to rows.y (torch's)",
    "GB written to buckets": "of payload and scales, all ranks, their own rows included",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class _Graphs:
    """Of one layout.

    Attributes:
        replays: By the name of the part.
        out: What the graph of the step writes.
        sent: Rows that this rank sends.
        row_bytes: Payload and scales of a row.
        kept: What holds memory whose addresses the graphs have.
    """

    replays: dict[str, Callable[[], None]]
    out: Tensor
    sent: int
    row_bytes: int
    kept: tuple[object, ...]


def bench_layouts(transport: Transport, *, rounds: int = ROUNDS) -> dict[str, Any]:
    """Measure both layouts. Collective.

    Args:
        transport: Of the name ``nvshmem``.
        rounds: Rounds that count.

    Returns:
        JSON-able, times in us of the slowest rank.

    Raises:
        AssertionError: The layouts' results differ.
    """
    return {
        "subject": "layouts",
        "world_size": transport.world_size,
        "hidden": HIDDEN,
        "top_k": TOP_K,
        "num_experts": NUM_EXPERTS,
        "rounds": rounds,
        "device": torch.cuda.get_device_name(transport.device),
        "cases": dict(_cases(transport, rounds)),
        "definitions": DEFINITIONS,
    }


def _cases(transport: Transport, rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    for wire in ("payload", "fp8"):
        for tokens in TOKENS:
            inputs = uniform_inputs(transport, tokens, NUM_EXPERTS)
            yield f"{wire}, {tokens} tokens", _measure_case(transport, inputs, wire, rounds)


def _measure_case(
    transport: Transport, inputs: Tokens, wire: Literal["payload", "fp8"], rounds: int
) -> dict[str, Any]:
    with ExitStack() as stack:
        by_layout = {}
        for layout in ("row", "expert"):
            config = DispatchConfig(
                num_experts=NUM_EXPERTS, top_k=TOP_K, hidden=HIDDEN, wire=wire, layout=layout
            )
            dispatcher = stack.enter_context(Dispatcher(config, transport))
            by_layout[layout] = _capture_parts(dispatcher, inputs)
        candidates = {
            f"{layout}: {part}": replay
            for layout, graphs in by_layout.items()
            for part, replay in graphs.replays.items()
        }
        times, tails = measure_graphs(transport, candidates, rounds)
        if wire == "payload":
            first, second = (graphs.out for graphs in by_layout.values())
            assert torch.equal(first, second), "the layouts' results differ"
    sent = [[graphs.sent, graphs.sent * graphs.row_bytes] for graphs in by_layout.values()]
    said = transport.exchange(torch.tensor(sent).flatten()).sum(0).view(2, 2).tolist()
    return {
        "us": times,
        "us, 95th percentile": tails,
        "row / expert": times["row: step"] / times["expert: step"],
        "rows a token": {
            layout: rows / (len(inputs.x) * transport.world_size)
            for layout, (rows, _) in zip(by_layout, said, strict=True)
        },
        "GB written to buckets": {
            layout: num_bytes / 1e9 for layout, (_, num_bytes) in zip(by_layout, said, strict=True)
        },
    }


def _capture_parts(dispatcher: Dispatcher, inputs: Tokens) -> _Graphs:
    """The parts of a step; experts give every pair back as it came, where rows are not fp8."""
    rows, handle = _dispatch(dispatcher, inputs)
    sent = sum(handle.plan.send_rows(dispatcher.transport.rank))
    num_rows, num_pairs = rows.num_rows, rows.num_pairs
    assert isinstance(num_rows, int)
    assert isinstance(num_pairs, int)
    workspace = WorkspaceManager(rows.x.device)
    is_row = rows.layout == "row"
    permutation = _Permutation(dispatcher, workspace, num_pairs) if is_row else None
    if permutation is not None:
        permutation.there(rows)
    dispatcher.combine(rows.y, handle)
    workspace.lock()
    dispatcher.lock()

    replays: dict[str, Callable[[], None]] = {}
    replays["dispatch"], (rows, handle) = capture(lambda: _dispatch(dispatcher, inputs))
    replays["dispatch"]()
    if permutation is not None:
        replays["permute"], permuted = capture(lambda: permutation.there(rows))
        replays["permute"]()
        replays["unpermute"], _ = capture(lambda: permutation.back(rows, permuted))
        kept: tuple[object, ...] = (workspace, permutation)
    else:
        y = torch.empty_like(rows.y[:num_rows])
        kept = (y,)
        replays["copy of y"], _ = capture(lambda: rows.y[:num_rows].copy_(y))
    replays["combine"], _ = capture(lambda: dispatcher.combine(rows.y, handle))
    replays["combine"]()

    def step(*, echoes: bool) -> Tensor:
        rows, handle = _dispatch(dispatcher, inputs)
        if permutation is not None:
            permutation.back(rows, permutation.there(rows))
        elif echoes:
            rows.y.copy_(rows.x)
        return dispatcher.combine(rows.y, handle)

    replays["step"], _ = capture(partial(step, echoes=False))
    # What comes home is compared on a graph of its own, for there results have to be written.
    replay, out = capture(partial(step, echoes=True))
    replay()
    dispatcher.check()
    row_bytes = rows.x.shape[1] * rows.x.dtype.itemsize
    row_bytes += 0 if rows.scale is None else rows.scale.shape[1] * 4
    return _Graphs(replays=replays, out=out.clone(), sent=sent, row_bytes=row_bytes, kept=kept)


class _Permutation:
    """What experts do around their GEMMs in the row layout."""

    def __init__(self, dispatcher: Dispatcher, workspace: WorkspaceManager, num_pairs: int) -> None:
        device = dispatcher.transport.device
        self._scratch = permute_scratch(
            workspace,
            num_experts=NUM_EXPERTS,
            num_local_experts=dispatcher.num_local_experts,
            device=device,
        )
        wire = dispatcher.wire
        self._num_pairs = num_pairs
        self._hidden = torch.empty(num_pairs, wire.hidden, dtype=wire.payload_dtype, device=device)
        blocks = -(-wire.hidden // 128)
        self._scale = torch.empty(num_pairs, blocks, device=device) if wire.fp8 else None
        self._results = (
            torch.zeros(num_pairs, wire.hidden, dtype=wire.dtype, device=device)
            if wire.fp8
            else self._hidden
        )

    def there(self, rows: ReceivedRows) -> Permuted:
        return permute(
            rows.x,
            rows.scale,
            rows.topk_idx,
            self._scratch,
            num_pairs=self._num_pairs,
            num_rows=rows.num_rows,
            out=self._hidden,
            out_scale=self._scale,
        )

    def back(self, rows: ReceivedRows, permuted: Permuted) -> None:
        unpermute(rows.y, self._results, rows.topk_weights, permuted)


def _dispatch(dispatcher: Dispatcher, inputs: Tokens) -> tuple[ReceivedRows, Handle]:
    return dispatcher.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights)


def main() -> None:
    """Measure on this rank, and write or print what rank 0 found."""
    logging.basicConfig(level=logging.INFO)
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    transport = connect("nvshmem", device=f"cuda:{index}")
    result = bench_layouts(transport)
    if transport.rank == 0:
        if len(sys.argv) > 1:
            Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")
        for name, case in result["cases"].items():
            times = {part: round(us, 1) for part, us in case["us"].items()}
            print(name, times, round(case["row / expert"], 3), case["rows a token"], flush=True)
    transport.close()


if __name__ == "__main__":
    main()
