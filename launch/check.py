"""``crossdock check``: the rank grid, who owns which experts, and what a run will need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from crossdock.dispatch.buckets import next_power_of_two
from crossdock.dispatch.wire import WireFormat
from crossdock.launch.batch import make_batches
from crossdock.launch.config import Job
from crossdock.launch.routing import RoutingSource, make_routing
from crossdock.launch.screen import make_table

__all__ = ["Needs", "find_needs", "show_check"]

# Index, weight and source columns of a received row, beside the row itself.
_ROW_METADATA_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What one rank needs for all steps of a run.

    Attributes:
        rows: Most rows received in a step.
        bucket: Rows of the receive bucket.
        pairs: Most (row, local expert) pairs in a step.
        receive_bytes: The receive bucket, ``rows.y`` included.
        workspace_bytes: Buffers of the torch worker.
        weight_bytes: The rank's experts.
    """

    rows: int
    bucket: int
    pairs: int
    receive_bytes: int
    workspace_bytes: int
    weight_bytes: int


def show_check(job: Job, console: Console) -> None:
    """Print what a valid configuration means."""
    config, batches = job.config, make_batches(job)
    console.print(f"{job.path}: valid", style="bold green")
    table = make_table(
        f"{config.name}: {_num_ranks(job)} ranks",
        ["rank", "node", "dp", "pcp", "tp", "tokens", "dispatches", "experts"],
    )
    for rank, batch in enumerate(batches):
        place = (rank, job.topology.node_of(rank), *job.topology.coordinates(rank))
        tokens = (batch.num_attention_tokens, batch.num_owned)
        experts = ranges(job.placement.local_experts(rank).tolist())
        table.add_row(*map(str, (*place, *tokens)), experts)
    console.print(table)
    routing = make_routing(job)
    console.print(_needs_table(find_needs(job, routing, batches[0].total)))
    wraps = routing.num_wraps(batches[0].total * config.run.steps)
    if wraps:
        console.print(f"The run uses the trace up {wraps} x, each time on to the next layer.")
    oracle = config.moe.num_experts * _expert_bytes(job)
    console.print(
        f"The oracle holds the weights of all experts on every rank: {oracle / 1e6:.1f} MB "
        "(run --no-check does without)."
    )


def find_needs(job: Job, routing: RoutingSource, total: int) -> list[Needs]:
    """What each rank needs, from the routing of all steps of ``total`` tokens each."""
    moe, num_ranks = job.config.moe, _num_ranks(job)
    rows = torch.zeros(num_ranks, dtype=torch.int64)
    pairs = torch.zeros(num_ranks, dtype=torch.int64)
    for step_rows, step_pairs in _loads(job, routing, total):
        rows, pairs = rows.maximum(step_rows), pairs.maximum(step_pairs)
    wire = WireFormat(
        hidden=moe.hidden,
        top_k=moe.top_k,
        dtype=job.dtype,
        fp8=job.config.dispatch.wire == "fp8",
    )
    y_bytes = moe.hidden * job.dtype.itemsize
    row_bytes = wire.row_bytes + 12 * moe.top_k + _ROW_METADATA_BYTES + y_bytes
    # The torch worker: input and activation in one region, both GEMMs' outputs in the other.
    elements = max(moe.hidden, moe.intermediate) + max(2 * moe.intermediate, moe.hidden)
    fixed = job.config.dispatch.bucket
    needs = []
    for rank in range(num_ranks):
        wanted = int(rows[rank]) if fixed == "grow" else fixed
        needs.append(
            Needs(
                rows=int(rows[rank]),
                bucket=next_power_of_two(wanted),
                pairs=int(pairs[rank]),
                receive_bytes=next_power_of_two(wanted) * row_bytes,
                workspace_bytes=int(pairs[rank]) * elements * job.dtype.itemsize,
                weight_bytes=job.placement.num_local_experts(rank) * _expert_bytes(job),
            )
        )
    return needs


def ranges(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 7]`` as ``0-2, 7``; a longer list is cut."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    words = ["-".join(map(str, part)) for part in parts]
    if not words:
        return "none"
    return ", ".join(words if len(words) <= 6 else [*words[:5], f"... ({len(numbers)})"])


def _loads(job: Job, routing: RoutingSource, total: int) -> Iterator[tuple[Tensor, Tensor]]:
    """[R] rows and [R] pairs of each step."""
    num_ranks, owner = _num_ranks(job), job.placement.owner
    for step in range(job.config.run.steps):
        topk_idx, _ = routing.at(torch.arange(step * total, (step + 1) * total))
        goes_to = torch.where(topk_idx >= 0, owner[topk_idx.clamp(min=0)], num_ranks)
        pairs = torch.bincount(goes_to.flatten(), minlength=num_ranks + 1)[:num_ranks]
        if job.config.dispatch.algorithm == "allgather":
            yield torch.full((num_ranks,), total), pairs
            continue
        there = torch.zeros(total, num_ranks + 1, dtype=torch.bool).scatter_(1, goes_to, True)
        yield there.sum(0)[:num_ranks], pairs


def _needs_table(needs: Sequence[Needs]) -> Table:
    table = make_table(
        "What each rank needs, at most over the steps",
        ["rank", "rows", "bucket", "pairs", "receive MB", "workspace MB", "weights MB"],
    )
    for rank, need in enumerate(needs):
        sizes = (need.receive_bytes, need.workspace_bytes, need.weight_bytes)
        table.add_row(
            *map(str, (rank, need.rows, need.bucket, need.pairs)),
            *(f"{size / 1e6:.1f}" for size in sizes),
        )
    return table


def _num_ranks(job: Job) -> int:
    return job.config.cluster.num_ranks


def _expert_bytes(job: Job) -> int:
    return 3 * job.config.moe.hidden * job.config.moe.intermediate * job.dtype.itemsize
