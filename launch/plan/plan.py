"""The whole plan of a job: loads, traffic and memory of every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from crossdock.dispatch import Topology
from crossdock.dispatch.buckets import next_power_of_two
from crossdock.launch.config import Job
from crossdock.launch.plan.loads import Loads, count_loads, relayed
from crossdock.launch.plan.memory import Memory, MemoryModel
from crossdock.launch.plan.traffic import ALGORITHMS, Traffic, find_traffic

__all__ = ["Plan", "Refusal", "make_plan"]

MAX_MATRIX = 64
"""Ranks or nodes up to which the JSON says who sends how much to whom."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """The first step that a run would refuse, because something no longer grows.

    Attributes:
        step: From 1.
        rank: The first rank that it does not fit.
        what: ``rows`` or ``pairs``.
        need: How many it would receive.
        capacity: How many it holds.
    """

    step: int
    rank: int
    what: str
    need: int
    capacity: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What a job will move and hold. R ranks, S steps.

    Attributes:
        job: What was planned.
        algorithm: How its rows move, one of the keys of ``traffic``.
        loads: Tokens and ``alltoall`` rows of all ranks.
        rows_received: int64 [S, R], rows that each rank receives with the job's own algorithm.
        bucket_capacity: int64 [S, R], rows of the receive bucket after each step.
        scratch_capacity: int64 [S, R], pairs that the permute scratch holds after each step.
        traffic: By algorithm.
        memory: Of each rank.
        row_bytes: Bytes of a row on the wire.
        result_bytes: Bytes of a row's result.
        refusal: What would not fit, if something would not.
    """

    job: Job
    algorithm: str
    loads: Loads
    rows_received: Tensor
    bucket_capacity: Tensor
    scratch_capacity: Tensor
    traffic: Mapping[str, Traffic]
    memory: list[Memory]
    row_bytes: int
    result_bytes: int
    refusal: Refusal | None

    def as_json(self) -> dict[str, Any]:
        """The plan; lists of a rank have one entry a step, as in the JSON of ``run``."""
        config = self.job.config
        return {
            "config": config.model_dump(),
            "world_size": config.cluster.num_ranks,
            "algorithm": self.algorithm,
            "steps": config.run.steps,
            "exact": self.loads.exact,
            "row_bytes": self.row_bytes,
            "result_bytes": self.result_bytes,
            "refusal": None if self.refusal is None else asdict(self.refusal),
            "traffic": {name: _traffic_json(found) for name, found in self.traffic.items()},
            "ranks": self._ranks_json(),
        }

    def _ranks_json(self) -> list[dict[str, Any]]:
        topology, traffic = self.job.topology, self.traffic[self.algorithm]
        rows, buckets = self.rows_received.t().tolist(), self.bucket_capacity.t().tolist()
        pairs, scratch = self.loads.pairs.t().tolist(), self.scratch_capacity.t().tolist()
        sent, across = traffic.sent.tolist(), traffic.sent_across.tolist()
        return [
            {
                "rank": rank,
                "node": topology.node_of(rank),
                "tokens_owned": tokens,
                "rows_received": rows[rank],
                "bucket_capacity": buckets[rank],
                "pairs": pairs[rank],
                "scratch_capacity": scratch[rank],
                "bytes_sent": sent[rank],
                "bytes_sent_across_nodes": across[rank],
                "memory": {**asdict(self.memory[rank]), "total": self.memory[rank].total},
            }
            for rank, tokens in enumerate(self.loads.tokens.tolist())
        ]


def make_plan(job: Job) -> Plan:
    """Plan a job: nothing is started and nothing of its size is allocated."""
    config, topology = job.config, job.topology
    loads, model = count_loads(job), MemoryModel(job)
    algorithm = _algorithm(job)
    received, packed, home, relay = _moved(loads, algorithm, topology)
    row_limit, pair_limit = _limits(job, received, loads.pairs)
    bucket = _next_powers_of_two(received.cummax(0).values)
    if config.dispatch.bucket != "grow":
        bucket = row_limit
    scratch = torch.maximum(loads.pairs.cummax(0).values, pair_limit)
    traffic = {
        name: find_traffic(
            name,
            loads,
            topology,
            row_bytes=model.wire.row_bytes,
            result_bytes=model.result_bytes,
            links=config.links,
        )
        for name in ALGORITHMS
    }
    largest = [bucket[-1], packed.amax(0), home.amax(0), relay.amax(0), scratch[-1]]
    num_experts = torch.bincount(job.placement.owner, minlength=topology.world_size)
    memory = [
        model.of(
            bucket_rows=bucket_rows,
            packed_rows=packed_rows,
            home_rows=home_rows,
            relayed_rows=relayed_rows,
            pairs=pairs,
            num_local_experts=experts,
        )
        for bucket_rows, packed_rows, home_rows, relayed_rows, pairs, experts in torch.stack(
            [*largest, num_experts], dim=1
        ).tolist()
    ]
    return Plan(
        job=job,
        algorithm=algorithm,
        loads=loads,
        rows_received=received,
        bucket_capacity=bucket,
        scratch_capacity=scratch,
        traffic=traffic,
        memory=memory,
        row_bytes=model.wire.row_bytes,
        result_bytes=model.result_bytes,
        refusal=_find_refusal({"rows": (received, row_limit), "pairs": (loads.pairs, pair_limit)}),
    )


def _algorithm(job: Job) -> str:
    """Which of ``ALGORITHMS`` the job's transport and algorithm come to."""
    cluster, dispatch = job.config.cluster, job.config.dispatch
    two_levels = dispatch.transport == "hierarchical" or (
        dispatch.transport == "auto"
        and cluster.device == "cpu"
        and cluster.nodes > 1
        and cluster.ranks_per_node > 1
    )
    if not two_levels:
        return dispatch.algorithm
    return "two-level" if dispatch.algorithm == "alltoall" else "two-level allgather"


def _moved(
    loads: Loads, algorithm: str, topology: Topology
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[S, R] rows that each rank receives, packs, gets home as results, and passes on."""
    nowhere = torch.zeros_like(loads.rows_sent)
    if algorithm == "alltoall":
        return loads.rows_received, loads.rows_sent, loads.rows_sent, nowhere
    if algorithm == "two-level":
        sent = loads.node_rows_sent
        return loads.rows_received, sent, sent, loads.rows_relayed
    tokens = loads.tokens.expand_as(nowhere)
    received = tokens.sum(1, keepdim=True).expand_as(tokens)
    if algorithm == "allgather":
        return received, tokens, tokens * topology.world_size, nowhere
    sent = tokens * topology.nodes
    rows = loads.tokens.unsqueeze(1).expand_as(loads.rows)
    return received, sent, sent, relayed(rows, loads.tokens, topology).expand_as(nowhere)


def _limits(job: Job, rows: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """[S, R] rows and pairs that each step must fit into; -1 while they may grow.

    Locking leaves the bucket as it is, and rounds what experts hold up to a power of two.
    """
    steps, lock_after = len(rows), job.config.run.lock_after
    row_limit, pair_limit = torch.full_like(rows, -1), torch.full_like(pairs, -1)
    if lock_after is not None:
        for needs, limit in ((rows, row_limit), (pairs, pair_limit)):
            seen = needs[:lock_after].amax(0) if lock_after else torch.zeros_like(needs[0])
            limit[lock_after:] = _next_powers_of_two(seen).expand(steps - lock_after, -1)
    if job.config.dispatch.bucket != "grow":
        row_limit.fill_(next_power_of_two(job.config.dispatch.bucket))
    return row_limit, pair_limit


def _find_refusal(needs_and_limits: Mapping[str, tuple[Tensor, Tensor]]) -> Refusal | None:
    found = []
    for what, (needs, limits) in needs_and_limits.items():
        for step, rank in ((limits >= 0) & (needs > limits)).nonzero()[:1].tolist():
            need, capacity = int(needs[step, rank]), int(limits[step, rank])
            found.append(Refusal(step=step + 1, rank=rank, what=what, need=need, capacity=capacity))
    return min(found, key=lambda refusal: refusal.step, default=None)


def _next_powers_of_two(values: Tensor) -> Tensor:
    """The smallest power of two at or above each value; 0 for 0."""
    return (values.double().log2().ceil().exp2() * (values > 0)).nan_to_num(0.0).long()


def _traffic_json(traffic: Traffic) -> dict[str, Any]:
    ranks, nodes = len(traffic.sent), len(traffic.between_nodes)
    return {
        "bytes_sent": int(traffic.sent.sum()),
        "bytes_sent_across_nodes": int(traffic.sent_across.sum()),
        "bytes_sent_by_busiest_rank": int(traffic.sent.max()),
        "bytes_sent_across_nodes_by_busiest_rank": int(traffic.sent_across.max()),
        "bytes_received_across_nodes_by_busiest_rank": int(traffic.received_across.max()),
        "between_nodes": traffic.between_nodes.tolist() if nodes <= MAX_MATRIX else None,
        "between_ranks": traffic.between_ranks.tolist() if ranks <= MAX_MATRIX else None,
        "dispatch_s": traffic.dispatch_s,
        "combine_s": traffic.combine_s,
    }
