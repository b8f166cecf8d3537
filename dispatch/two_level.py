"""Each token once to every node that wants it, then on to that node's ranks; and home likewise.

    dispatch   pack by node -> across -> route within the node -> within, one exchange a source node
    combine    within, one exchange a source node -> sum of the node, rounded -> across -> sum

Across nodes rows travel between ranks of equal local index. Rank (n, l) passes on what the ranks
(0, l), (1, l), ... sent it. A bucket wants rows in ascending source rank (node, l): the exchange
within the node for source node 0 brings the rows of (0, 0), (0, 1), ... in that order, the one for
node 1 those of (1, 0), (1, 1), ...; so with one exchange a source node every row lands at its place
and no receiver sorts. Sums are fp32 in ascending rank order within a node, rounded to the dtype of
the results to cross, then fp32 in ascending node order (``reference_combine(order="two-level")``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from crossdock.dispatch.agreement import Problem
from crossdock.dispatch.algorithms.allgather import AllGather
from crossdock.dispatch.algorithms.base import Algorithm, ordered_sum
from crossdock.dispatch.buckets import BucketMemory
from crossdock.dispatch.handle import Handle
from crossdock.dispatch.mover import Load, Mover
from crossdock.dispatch.placement import ExpertPlacement
from crossdock.dispatch.routing import Counts, RouteTable, Routing, find_problem
from crossdock.dispatch.staging import Staging
from crossdock.dispatch.transports.base import Done, Work
from crossdock.dispatch.transports.hierarchical import HierarchicalTransport
from crossdock.dispatch.wire import WireFormat

__all__ = ["TwoLevelMover"]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Relay:
    """Rows that this rank passes on within its node.

    Attributes:
        sent: [N] rows that this rank sends to each node.
        arriving: [N] rows that come to this rank from each node.
        routes: [N] where those of each node go on to, by local rank.
    """

    sent: list[int]
    arriving: list[int]
    routes: list[Routing]

    @property
    def num_rows(self) -> int:
        """Rows that arrive, and the largest part that is passed on at once."""
        return sum(self.arriving) + max(len(route.packed) for route in self.routes)


@dataclass(frozen=True, kw_only=True, eq=False)
class _TwoLevelRouting(Counts):
    """One rank's tokens, by node.

    Attributes:
        nodes: Rows to each node; ids are what the level below understands.
        relay: What this rank passes on, once that is known; a list of one.
    """

    nodes: Routing
    relay: list[_Relay] = field(default_factory=list)


@dataclass
class _Buffers:
    """Memory of a slot: what leaves and comes home, and what is passed on, in both directions."""

    own: Staging
    relay: Staging


class TwoLevelMover(Mover):
    """Over two transports, of which the one across nodes is the slow one."""

    transport: HierarchicalTransport

    def __init__(
        self,
        algorithm: Algorithm,
        wire: WireFormat,
        num_slots: int,
        transport: HierarchicalTransport,
    ) -> None:
        super().__init__(algorithm, wire, num_slots)
        self.transport = transport
        device, size = transport.device, transport.ranks_per_node
        owner = algorithm.placement.owner
        self._ranks = RouteTable(algorithm.placement, device)
        self._nodes = RouteTable(ExpertPlacement(owner // size, transport.num_nodes), device)
        # Experts of this node by node-local id, which follows the global order; so do ids on ranks.
        here = owner[owner // size == transport.node] % size
        self._node = RouteTable(ExpertPlacement(here, size), device)
        self._buffers = [_Buffers(Staging(device), Staging(device)) for _ in range(num_slots)]
        self._reserved = 0  # rows that the level below has room for

    def allocate(self, capacity: int) -> BucketMemory:
        """Memory of this rank's own."""
        return BucketMemory(capacity, self.wire, self.transport.device)

    def route(self, topk_idx: Tensor, topk_weights: Tensor) -> tuple[Problem | None, Counts | None]:
        """Rows to nodes, and counts of the rows that will come of them on each rank."""
        problem = find_problem(topk_idx, topk_weights, self._ranks.num_experts)
        if problem is not None:
            return problem, None
        topk_idx = topk_idx.long()
        if isinstance(self.algorithm, AllGather):
            rows = [len(topk_idx)] * self.transport.world_size
            nodes = _to_everyone(topk_idx, topk_weights, self.transport.num_nodes)
        else:
            rows = self._ranks.count_rows(topk_idx)
            nodes = self._nodes.route(topk_idx, topk_weights)
        return None, _TwoLevelRouting(
            rows=rows, pairs=self._ranks.count_pairs(topk_idx), nodes=nodes
        )

    def held(self, slot: int) -> int:
        """Rows that may pass through here."""
        return min(self._buffers[slot].relay.num_bytes // self.wire.row_bytes, self._reserved)

    def needs(self, handle: Handle, num_tokens: list[int]) -> list[int]:
        """Rows that arrive from other nodes, and the largest part that is fanned out at once.

        How many tokens cross is not known to all; but a rank sends a node at most its tokens, and
        at most one for each row that the node's ranks get.
        """
        nodes, size = self.transport.num_nodes, self.transport.ranks_per_node
        # By source node, local rank, destination node: the relay is that local rank there.
        fanned = torch.from_numpy(handle.plan.counts).view(nodes, size, nodes, size).sum(3)
        arriving = torch.minimum(fanned, torch.tensor(num_tokens).view(nodes, size, 1))
        by_relay: list[int] = (arriving.sum(0) + fanned.amax(0)).t().flatten().tolist()
        return by_relay

    def reserve(self, slot: int, rows: int) -> None:
        """Take the memory that rows pass through, here and on the level below."""
        self._take(self._buffers[slot].relay, rows)
        self.transport.inner.reserve(rows * self.wire.row_bytes)
        self._reserved = max(self._reserved, rows)

    def load(self, slot: int, x: Tensor, routing: Counts) -> Load:
        """Pack by node."""
        assert isinstance(routing, _TwoLevelRouting)
        nodes = routing.nodes
        rows = self._take(self._buffers[slot].own, len(nodes.packed))
        self.wire.pack(rows, x, nodes.ids, nodes.weights, nodes.packed)
        return Load(rows)

    def send(self, load: Load, handle: Handle, memory: BucketMemory, *, staged: bool) -> Work:
        """Across, then within."""
        assert handle.slot is not None
        routing, buffers = _routing(handle), self._buffers[handle.slot]
        counted = bool(routing.relay)
        if counted:
            sent, arriving = routing.relay[0].sent, routing.relay[0].arriving
        else:
            sent = routing.nodes.rows
            matrix = self.transport.count_across(torch.tensor(sent))
            arriving = matrix[:, self.transport.node].tolist()
        relay = self._take(buffers.relay, self.held(handle.slot))
        passing, room = relay[: sum(arriving)], relay[sum(arriving) :]
        self.transport.across(load.rows, sent, passing, arriving)
        by_node = torch.split(passing, arriving)
        if not counted:
            routes = [self._route_within(rows) for rows in by_node]
            routing.relay.append(_Relay(sent=sent, arriving=arriving, routes=routes))
        for node, places, arrive in self._sources(handle):
            route = routing.relay[0].routes[node]
            fanned = room[: len(route.packed)]
            torch.index_select(by_node[node], 0, route.packed, out=fanned)
            self.wire.ids(fanned).copy_(route.ids)
            self.wire.weights(fanned).copy_(route.weights)
            self.transport.within(fanned, route.rows, memory.raw[places], arrive)
        return Done()

    def load_back(self, slot: int, y: Tensor, handle: Handle, memory: BucketMemory) -> Load:
        """Make room on both levels."""
        routing, buffers = _routing(handle), self._buffers[slot]
        rows = y[: handle.plan.received[self.transport.rank]].contiguous()
        for relay in routing.relay:
            # Taken here, where it may fail, and used later.
            buffers.relay.take(relay.num_rows, y.shape[1], y.dtype)
        home = buffers.own.take(len(routing.nodes.packed), y.shape[1], y.dtype)
        sizes = [rows[places].nbytes for _, places, _ in self._sources(handle)]
        self.transport.inner.reserve(max(sizes, default=0))
        return Load(rows, home)

    def send_back(
        self, load: Load, handle: Handle, out: Tensor, *, staged: bool
    ) -> Callable[[], None]:
        """Within, then across; all at once, as both levels have to wait."""
        assert handle.slot is not None and load.extra is not None
        y, home = load.rows, load.extra
        routing, buffers = _routing(handle), self._buffers[handle.slot]
        (relay,) = routing.relay
        passing = buffers.relay.take(relay.num_rows, y.shape[1], y.dtype)
        partial, room = passing[: sum(relay.arriving)], passing[sum(relay.arriving) :]
        by_node = torch.split(partial, relay.arriving)
        for node, places, arrived in self._sources(handle):
            route = relay.routes[node]
            rows = route.rows
            fanned = room[: len(route.packed)]
            self.transport.within(_as_bytes(y[places]), arrived, _as_bytes(fanned), rows)
            ordered_sum(torch.split(fanned, rows), torch.split(route.tokens, rows), by_node[node])
        self.transport.across(_as_bytes(partial), relay.arriving, _as_bytes(home), relay.sent)
        tokens = torch.split(routing.nodes.tokens, relay.sent)
        ordered_sum(torch.split(home, relay.sent), tokens, out)
        return _nothing

    def release(self) -> None:
        """Give back the slots' buffers."""
        self._buffers.clear()

    def _route_within(self, rows: Tensor) -> Routing:
        """Where rows uint8 [n, row_bytes] from another node go on to."""
        ids, weights = self.wire.ids(rows).long(), self.wire.weights(rows)
        if isinstance(self.algorithm, AllGather):
            return _to_everyone(ids, weights, self.transport.ranks_per_node)
        return self._node.route(ids, weights)

    def _sources(self, handle: Handle) -> Iterator[tuple[int, slice, list[int]]]:
        """Source nodes with rows for this node.

        Yields:
            The node, places of its rows in this rank's bucket, and [L] rows from its local ranks.
        """
        size, rank = self.transport.ranks_per_node, self.transport.rank
        counts = handle.plan.counts.reshape(self.transport.num_nodes, size, -1)
        here = self.transport.node * size
        begin = 0
        for node, from_node in enumerate(counts):
            arriving = from_node[:, rank].tolist()
            end = begin + sum(arriving)
            # All ranks of this node know alike whether any of them gets rows.
            if int(from_node[:, here : here + size].sum()):
                yield node, slice(begin, end), arriving
            begin = end

    def _take(self, staging: Staging, rows: int) -> Tensor:
        return staging.take(rows, self.wire.row_bytes, torch.uint8)


def _to_everyone(ids: Tensor, weights: Tensor, size: int) -> Routing:
    """Every row to each of ``size`` destinations, with the ids [n, K] that it has."""
    tokens = torch.arange(len(ids), device=ids.device).repeat(size)
    return Routing(
        packed=tokens,
        ids=ids.to(torch.int32).repeat(size, 1),
        weights=weights.repeat(size, 1),
        tokens=tokens,
        rows=[len(ids)] * size,
        pairs=[0] * size,
    )


def _routing(handle: Handle) -> _TwoLevelRouting:
    assert isinstance(handle.routing, _TwoLevelRouting)
    return handle.routing


def _as_bytes(rows: Tensor) -> Tensor:
    return rows.view(torch.uint8)


def _nothing() -> None:
    """Results were summed at once."""
