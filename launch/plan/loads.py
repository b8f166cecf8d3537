"""Rows and pairs of all ranks, counted from the routing that a run would have.

What decides where a token goes is looked up once for each distinct token: a trace has few, however
large the world. A rank's tokens are a range of token numbers, so its rows to everyone are the
difference of two running counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from crossdock.dispatch import Partition, Topology
from crossdock.launch.config import Job
from crossdock.launch.routing import RoutingSource, TraceRouting, make_routing

__all__ = ["MAX_DRAWN", "Loads", "count_loads", "relayed"]

MAX_DRAWN = 2**16
"""Distinct tokens drawn from a distribution; a run of more is planned as if they came again."""
_DRAWN_AT_ONCE = 2**12


@dataclass(frozen=True, kw_only=True, eq=False)
class Loads:
    """What all steps of a run send and receive. R ranks on N nodes, S steps.

    Attributes:
        tokens: int64 [R], tokens that each rank dispatches in a step.
        rows: int64 [R, R], rows from each rank to each, all steps together.
        node_rows: int64 [R, N], the same once per node instead of once per rank.
        rows_received: int64 [S, R], rows that each rank receives in each step.
        rows_sent: int64 [S, R], rows that each rank sends in each step, its own included.
        node_rows_sent: int64 [S, R], the same once per node.
        rows_relayed: int64 [S, R], rows for which each rank needs room with two levels, between
            other nodes and the ranks of its own.
        pairs: int64 [S, R], (row, local expert) pairs on each rank in each step.
        exact: The tokens are those of the run, not a sample.
    """

    tokens: Tensor
    rows: Tensor
    node_rows: Tensor
    rows_received: Tensor
    rows_sent: Tensor
    node_rows_sent: Tensor
    rows_relayed: Tensor
    pairs: Tensor
    exact: bool


@dataclass(frozen=True, eq=False)
class _Choices:
    """What the D distinct tokens name, over and over again.

    Attributes:
        values: int64 [D, K]: ranks or nodes; values of ``num_bins`` count for nothing.
        num_bins: Values that there are.
    """

    values: Tensor
    num_bins: int

    def between(self, bounds: Tensor) -> Tensor:
        """Count how often tokens of a range name each value.

        Args:
            bounds: int64 [B + 1], ascending token numbers; range b is ``bounds[b:b + 2]``.

        Returns:
            int64 [B, num_bins].
        """
        num_tokens = len(self.values)
        if num_tokens == 0:
            return torch.zeros(len(bounds) - 1, self.num_bins, dtype=torch.int64)
        whole = torch.tensor([num_tokens])
        cuts, place = torch.unique(torch.cat([bounds % num_tokens, whole]), return_inverse=True)
        # Each token counts for the first cut after it, and by the running sum for all later ones.
        cut = torch.searchsorted(cuts, torch.arange(num_tokens), right=True)
        bins = self.num_bins + 1
        keys = (cut.unsqueeze(1) * bins + self.values).flatten()
        counts = torch.bincount(keys, minlength=len(cuts) * bins).view(-1, bins)
        before = counts[:, : self.num_bins].cumsum(0)
        rounds = bounds.div(num_tokens, rounding_mode="floor")
        return (before[place[:-1]] + rounds.unsqueeze(1) * before[-1]).diff(dim=0)


def count_loads(job: Job) -> Loads:
    """Count what every step of a run sends and receives, for ``alltoall``."""
    topology, steps = job.topology, job.config.run.steps
    tokens = _tokens_owned(job, topology)
    total = int(tokens.sum())
    topk_idx, exact = _routing(job, total * steps)
    none = torch.tensor([topology.world_size])  # index -1 reads it
    owners = torch.cat([job.placement.owner, none])[topk_idx].sort(dim=1).values
    nodes = owners.div(topology.ranks_per_node, rounding_mode="floor")
    to_experts = _Choices(owners, topology.world_size)
    to_ranks = _Choices(_once(owners, topology.world_size), topology.world_size)
    to_nodes = _Choices(_once(nodes, topology.nodes), topology.nodes)
    bounds = torch.cat([torch.tensor([0]), tokens.cumsum(0)])
    rows = torch.zeros(topology.world_size, topology.world_size, dtype=torch.int64)
    node_rows = torch.zeros(topology.world_size, topology.nodes, dtype=torch.int64)
    received, sent, node_sent, relay, pairs = [], [], [], [], []
    for step in range(steps):
        step_bounds = bounds + step * total
        step_rows = to_ranks.between(step_bounds)
        rows += step_rows
        step_node_rows = to_nodes.between(step_bounds)
        node_rows += step_node_rows
        received.append(step_rows.sum(0))
        sent.append(step_rows.sum(1))
        node_sent.append(step_node_rows.sum(1))
        relay.append(relayed(step_rows, tokens, topology))
        pairs.append(to_experts.between(step_bounds[[0, -1]])[0])
    return Loads(
        tokens=tokens,
        rows=rows,
        node_rows=node_rows,
        rows_received=torch.stack(received),
        rows_sent=torch.stack(sent),
        node_rows_sent=torch.stack(node_sent),
        rows_relayed=torch.stack(relay),
        pairs=torch.stack(pairs),
        exact=exact,
    )


def relayed(rows: Tensor, tokens: Tensor, topology: Topology) -> Tensor:
    """Rows that each rank makes room for, when rows pass through it within its node.

    Args:
        rows: int64 [R, R], rows of one step from each rank to each.
        tokens: int64 [R], tokens of each rank.
        topology: Who shares a node.

    Returns:
        int64 [R]: rows that arrive from all nodes (a bound that all ranks know, as in
        ``TwoLevelMover.needs``), and the largest part that is handed on at once.
    """
    nodes, size = topology.nodes, topology.ranks_per_node
    handed_on = rows.reshape(nodes, size, nodes, size).sum(3)  # source node, local rank, node
    arriving = torch.minimum(handed_on, tokens.view(nodes, size, 1))
    return (arriving.sum(0) + handed_on.amax(0)).t().flatten()


def _tokens_owned(job: Job, topology: Topology) -> Tensor:
    batch = job.config.run.batch
    if batch.tokens_per_rank is not None:
        return torch.tensor(batch.tokens_per_rank)
    prefill = batch.prefill or [[]] * topology.dp
    decode = batch.decode or [0] * topology.dp
    places = [topology.coordinates(rank).dp for rank in range(topology.world_size)]
    partitions = (
        Partition(
            topology,
            rank,
            prefill_lengths=prefill[dp],
            num_decode=decode[dp],
            sequence_parallel=job.config.parallel.sequence_parallel,
        )
        for rank, dp in enumerate(places)
    )
    return torch.tensor([partition.num_owned for partition in partitions])


def _routing(job: Job, num_tokens: int) -> tuple[Tensor, bool]:
    """topk_idx [D, K] of the distinct tokens of a run, and whether those are all."""
    routing, exact = make_routing(job), True
    if isinstance(routing, TraceRouting):
        num_distinct = routing.trace.num_layers * routing.trace.num_tokens
    else:
        num_distinct, exact = MAX_DRAWN, num_tokens <= MAX_DRAWN
    return _draw(routing, min(num_tokens, num_distinct), job.config.moe.top_k), exact


def _draw(routing: RoutingSource, num_tokens: int, top_k: int) -> Tensor:
    parts = [torch.empty(0, top_k, dtype=torch.int64)]
    for numbers in torch.split(torch.arange(num_tokens), _DRAWN_AT_ONCE):
        parts.append(routing.at(numbers)[0])
    return torch.cat(parts)


def _once(ascending: Tensor, none: int) -> Tensor:
    """[D, K] with every value but the first of its kind in a row replaced by ``none``."""
    again = torch.zeros_like(ascending, dtype=torch.bool)
    again[:, 1:] = ascending[:, 1:] == ascending[:, :-1]
    return ascending.masked_fill(again, none)
