"""Bytes between ranks and between nodes, for each way of moving rows, and their time.

Ways that are compared for the same tokens:

    alltoall    a row for each rank that owns an expert of the token; results come back the same way
    allgather   a row for every rank; results come back from every rank
    two-level   a row for each *node* that owns one, to the rank of equal local index there, which
                hands it to the owners; results are summed within the node and come back once
    two-level allgather     every token to every node, and there to every rank

Only bytes to other ranks count: rows with their metadata on the way out, results on the way home.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crossdock.dispatch import Topology
from crossdock.launch.models import LinksSection
from crossdock.launch.plan.loads import Loads

__all__ = ["ALGORITHMS", "Traffic", "find_traffic"]

ALGORITHMS = ("alltoall", "allgather", "two-level", "two-level allgather")


@dataclass(frozen=True, kw_only=True, eq=False)
class Traffic:
    """What one algorithm moves in all steps together. R ranks on N nodes.

    Attributes:
        sent: int64 [R], bytes that each rank sends to others.
        sent_across: int64 [R], those of them that go to other nodes.
        received_across: int64 [R], bytes that each rank receives from other nodes.
        between_nodes: int64 [N, N], bytes from each node to each; 0 on the diagonal.
        between_ranks: int64 [R, R], bytes from each rank to each; 0 on the diagonal.
        dispatch_s: Seconds of one step's dispatch, None where link speeds are not given.
        combine_s: Seconds of one step's combine.
    """

    sent: Tensor
    sent_across: Tensor
    received_across: Tensor
    between_nodes: Tensor
    between_ranks: Tensor
    dispatch_s: float | None
    combine_s: float | None


def find_traffic(
    algorithm: str,
    loads: Loads,
    topology: Topology,
    *,
    row_bytes: int,
    result_bytes: int,
    links: LinksSection,
) -> Traffic:
    """What ``algorithm`` (one of ``ALGORITHMS``) moves.

    Args:
        algorithm: See above.
        loads: What goes where.
        topology: Who shares a node.
        row_bytes: Bytes of a row on the wire.
        result_bytes: Bytes of a row's result.
        links: Speeds, for the time.
    """
    steps = len(loads.rows_received)
    hops = _hops(algorithm, loads, topology, steps)
    between_ranks = sum(
        (hop * row_bytes + hop.t() * result_bytes for hop in hops), torch.zeros_like(loads.rows)
    )
    across = between_ranks - _own_node(between_ranks, topology)
    shape = (topology.nodes, topology.ranks_per_node)
    return Traffic(
        sent=between_ranks.sum(1),
        sent_across=across.sum(1),
        received_across=across.sum(0),
        between_nodes=across.view(*shape, *shape).sum((1, 3)),
        between_ranks=between_ranks,
        dispatch_s=_seconds(hops, topology, row_bytes / steps, links),
        combine_s=_seconds(hops, topology, result_bytes / steps, links),
    )


def _hops(algorithm: str, loads: Loads, topology: Topology, steps: int) -> Sequence[Tensor]:
    """[R, R] rows to other ranks of each hop on the way out; combine takes them backwards."""
    rows, node_rows = loads.rows, loads.node_rows
    if algorithm.endswith("allgather"):
        everything = (loads.tokens * steps).unsqueeze(1)
        rows, node_rows = everything.expand_as(rows), everything.expand_as(node_rows)
    if not algorithm.startswith("two-level"):
        return [_to_others(rows)]
    nodes, size = topology.nodes, topology.ranks_per_node
    rank = torch.arange(topology.world_size)
    crossing = node_rows.clone()
    crossing[rank, rank // size] = 0
    cross = torch.zeros(nodes * size, nodes, size, dtype=torch.int64)
    cross[rank, :, rank % size] = crossing
    # What a rank hands on within its node: rows of all ranks of its local index.
    handed_on = rows.reshape(nodes, size, nodes, size).sum(0)
    fan_out = torch.zeros(nodes, size, nodes, size, dtype=torch.int64)
    node = torch.arange(nodes)
    fan_out[node, :, node] = handed_on.transpose(0, 1)
    return [cross.view_as(rows), _to_others(fan_out.view_as(rows))]


def _to_others(rows: Tensor) -> Tensor:
    rows = rows.clone()
    rows.fill_diagonal_(0)
    return rows


def _own_node(matrix: Tensor, topology: Topology) -> Tensor:
    """[R, R] without what goes to other nodes."""
    node = torch.arange(topology.world_size) // topology.ranks_per_node
    return matrix * (node.unsqueeze(1) == node)


def _seconds(
    hops: Sequence[Tensor], topology: Topology, bytes_a_row: float, links: LinksSection
) -> float | None:
    """One exchange of counts, then the hops one after another.

    A hop takes its latency and the time of the busiest direction of the busiest rank (Hockney's
    model, 1994); links within a node and across nodes work side by side.
    """
    speeds = (links.intra_node_gb_s, links.inter_node_gb_s)
    if speeds[0] is None or (speeds[1] is None and topology.nodes > 1):
        return None
    latency_s = links.latency_us * 1e-6
    seconds = latency_s
    for hop in hops:
        within = _own_node(hop, topology)
        rows = (within, hop - within)
        seconds += latency_s + max(
            max(int(part.sum(0).max()), int(part.sum(1).max())) * bytes_a_row / (speed * 1e9)
            for part, speed in zip(rows, speeds, strict=True)
            if speed is not None
        )
    return seconds
