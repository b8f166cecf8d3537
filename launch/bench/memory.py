"""What counting first saves: memory that ranks hold on a job's routing, and by formula.

All ranks of the job are threads of this process and really run the layer, one step, on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console

from crossdock.dispatch import Dispatcher, run_local
from crossdock.dispatch.transports.base import Transport
from crossdock.experts import ExpertWeights, MoELayer, make_experts
from crossdock.launch.bench.tokens import tokens_of
from crossdock.launch.config import Job
from crossdock.launch.report import versions
from crossdock.launch.run import ObservedExperts
from crossdock.launch.screen import make_table
from crossdock.scratch import WorkspaceManager

__all__ = ["bench_memory", "show_memory"]

_COMPARED = {
    "workspace and scratch: pairs, against rows x top_k": (
        "workspace_and_scratch",
        "by_rows_x_top_k",
    ),
    "receive bucket: rows, against ranks x max tokens": ("receive", "by_ranks_x_max_tokens"),
}


def bench_memory(job: Job) -> dict[str, Any]:
    """Run one step on threads of this process and count what each rank holds.

    Returns:
        JSON-able: for each rank, bytes that it holds and bytes that the usual formulas reserve (any
        rank may receive the tokens of all; every row has top_k pairs). The ratios of the busiest
        rank compare the largest of each.
    """
    num_ranks = job.config.cluster.num_ranks
    tokens = [tokens_of(job, rank) for rank in range(num_ranks)]
    max_tokens = max(len(own.x) for own in tokens)

    def one_rank(transport: Transport) -> dict[str, int]:
        experts = _experts(job, transport)
        mine = tokens[transport.rank]
        with Dispatcher(
            job.dispatch_config, transport, topology=job.topology, placement=job.placement
        ) as dispatcher:
            MoELayer(dispatcher, experts)(mine.x, mine.topk_idx, mine.topk_weights)
            row_bytes = dispatcher.wire.row_bytes
        by_pairs = experts.workspace.capacity_bytes() + experts.scratch().num_bytes
        # The same worker, sized as if every row had top_k local experts.
        experts.reserve(experts.num_rows * job.config.moe.top_k)
        return {
            "rows": experts.num_rows,
            "pairs": experts.num_pairs,
            "workspace_and_scratch": by_pairs,
            "by_rows_x_top_k": experts.workspace.capacity_bytes() + experts.scratch().num_bytes,
            "receive": experts.bucket_capacity * row_bytes,
            "by_ranks_x_max_tokens": num_ranks * max_tokens * row_bytes,
        }

    ranks = run_local(num_ranks, one_rank)
    busiest = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    together = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
    return {
        "subject": "memory",
        "name": job.config.name,
        "config": job.config.model_dump(),
        "max_tokens": max_tokens,
        "busiest": busiest,
        "together": together,
        "ratios": {"busiest": _ratios(busiest), "together": _ratios(together)},
        "ranks": ranks,
        "versions": versions(),
    }


def show_memory(result: dict[str, Any], console: Console) -> None:
    """A table of the busiest rank and of all ranks together."""
    table = make_table(
        f"{result['name']}: {len(result['ranks'])} ranks, at most {result['max_tokens']} tokens "
        "each, MB",
        ["", "held", "by formula", "formula / held"],
    )
    for whose, title in (("busiest", "the busiest rank"), ("together", "all ranks")):
        for what, (held, formula) in _COMPARED.items():
            sizes = result[whose]
            table.add_row(
                f"{what}; {title}",
                f"{sizes[held] / 1e6:.2f}",
                f"{sizes[formula] / 1e6:.2f}",
                f"{result['ratios'][whose][what]:.1f}",
            )
    console.print(table)


def _ratios(sizes: dict[str, int]) -> dict[str, float]:
    return {what: sizes[formula] / sizes[held] for what, (held, formula) in _COMPARED.items()}


def _experts(job: Job, transport: Transport) -> ObservedExperts:
    moe = job.config.moe
    weights = ExpertWeights.random(
        job.placement.local_experts(transport.rank).tolist(),
        hidden=moe.hidden,
        intermediate=moe.intermediate,
        dtype=job.dtype,
    )
    workspace = WorkspaceManager(torch.device("cpu"))
    return ObservedExperts(
        make_experts("torch", weights, workspace=workspace, num_experts=moe.num_experts)
    )
