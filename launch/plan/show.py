"""A plan on the screen."""

from __future__ import annotations

from dataclasses import fields

from rich.console import Console
from rich.table import Table

from crossdock.launch.plan.memory import Memory
from crossdock.launch.plan.plan import Plan
from crossdock.launch.screen import make_table

__all__ = ["show_plan"]

MAX_LISTED = 32
"""Ranks that are listed one by one; of a larger world only those that hold the most."""
NUM_LARGEST = 8


def show_plan(plan: Plan, console: Console) -> None:
    """Print what a job will move and hold."""
    job, steps = plan.job, len(plan.rows_received)
    console.print(_traffic_table(plan))
    links = "times from links" if plan.traffic["alltoall"].dispatch_s is not None else "no links"
    console.print(
        f"{steps} steps of {int(plan.loads.tokens.sum())} tokens; a row is {plan.row_bytes} bytes "
        f"on the wire, its result {plan.result_bytes}; {links} in {job.path.name}.",
        style="dim",
    )
    across = {name: int(found.sent_across.sum()) for name, found in plan.traffic.items()}
    if across["two-level"]:
        console.print(
            f"Across nodes, alltoall moves {across['alltoall'] / across['two-level']:.2f} times "
            "the bytes of two-level."
        )
    console.print(_ranks_table(plan))
    if not plan.loads.exact:
        console.print("Counted on a sample of the distribution's tokens, not on all of a run.")
    refused = plan.refusal
    if refused is not None:
        console.print(
            f"Step {refused.step} would be refused: rank {refused.rank} would receive "
            f"{refused.need} {refused.what} and holds {refused.capacity}. Lock later"
            + (", or give dispatch.bucket." if refused.what == "rows" else "."),
            style="bold red",
        )


def _traffic_table(plan: Plan) -> Table:
    names = ["", "MB sent", "across nodes", "busiest rank sends", "across nodes", "receives across"]
    names += ["dispatch ms", "combine ms"]
    cluster = plan.job.config.cluster
    place = f"{cluster.nodes} x {cluster.ranks_per_node} ranks"
    table = make_table(f"{plan.job.config.name}: MB between {place} in a step", names)
    steps = len(plan.rows_received)
    for name, found in plan.traffic.items():
        amounts = (
            found.sent.sum(),
            found.sent_across.sum(),
            found.sent.max(),
            found.sent_across.max(),
            found.received_across.max(),
        )
        times = (found.dispatch_s, found.combine_s)
        table.add_row(
            f"{name} *" if name == plan.algorithm else name,
            *(f"{int(amount) / steps / 1e6:.2f}" for amount in amounts),
            *("-" if seconds is None else f"{seconds * 1e3:.3f}" for seconds in times),
        )
    return table


def _ranks_table(plan: Plan) -> Table:
    parts = [field.name for field in fields(Memory)]
    totals = [memory.total for memory in plan.memory]
    ranks, title = list(range(len(totals))), "Each rank"
    if len(ranks) > MAX_LISTED:
        ranks = sorted(ranks, key=lambda rank: (-totals[rank], rank))[:NUM_LARGEST]
        title = f"The {NUM_LARGEST} ranks that hold the most"
    names = [part.replace("_", " ") for part in parts]
    names = ["rank", "tokens", "rows", "bucket", "pairs", *names, "total"]
    table = make_table(f"{title}, at most over the steps; memory in MB", names)
    rows, pairs = plan.rows_received.amax(0).tolist(), plan.loads.pairs.amax(0).tolist()
    for rank in ranks:
        memory = plan.memory[rank]
        table.add_row(
            *map(str, (rank, int(plan.loads.tokens[rank]), rows[rank])),
            *map(str, (int(plan.bucket_capacity[-1, rank]), pairs[rank])),
            *(f"{getattr(memory, part) / 1e6:.2f}" for part in parts),
            f"{memory.total / 1e6:.2f}",
        )
    return table
