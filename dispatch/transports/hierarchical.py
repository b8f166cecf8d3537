"""Two transports as one: across nodes between ranks of equal local index, and within each node.

Rank n * L + l is local rank l of node n. ``outer`` joins the ranks of equal l, ``inner`` those of
equal n. A third one, ``flat``, joins all: records travel over it, and it is what finds out who is
missing when a wait on either level was in vain. What crosses when is the two-level mover's
business (``crossdock.dispatch.two_level``).
"""

from __future__ import annotations

import socket

import torch
from torch import Tensor

from crossdock.dispatch.digest import digest_of
from crossdock.dispatch.transports.base import FAILED, Transport, Work
from crossdock.dispatch.transports.mpi import MpiTransport
from crossdock.dispatch.transports.process_group import ProcessGroupTransport
from crossdock.dispatch.transports.watch import grace_of
from crossdock.scratch.errors import (
    CapacityError,
    ConfigError,
    CrossdockError,
    PeerFailed,
    RankTimeout,
)

__all__ = ["HierarchicalTransport", "find_nodes", "node_blocks"]


class HierarchicalTransport(Transport):
    """N nodes of L ranks each.

    Args:
        flat: Over all ranks.
        inner: Over the ranks of this node.
        outer: Over the ranks of this local index.

    Attributes:
        num_nodes: N.
        ranks_per_node: L.
        node: n of this rank.
        local_rank: l of this rank.
    """

    name = "hierarchical"

    def __init__(
        self,
        flat: ProcessGroupTransport | MpiTransport,
        inner: Transport,
        outer: Transport,
        *,
        timeout_s: float,
    ) -> None:
        super().__init__(flat.rank, flat.world_size, inner.device, timeout_s)
        assert inner.world_size * outer.world_size == flat.world_size
        self.flat, self.inner, self.outer = flat, inner, outer
        self.num_nodes, self.ranks_per_node = outer.world_size, inner.world_size
        self.node, self.local_rank = outer.rank, inner.rank
        self.hidden_multiple = inner.hidden_multiple
        # What breaks one level breaks all.
        self.ledger = inner.ledger = outer.ledger = flat.ledger
        self.set_timeout(timeout_s)

    def across(
        self, send: Tensor, send_rows: list[int], recv: Tensor, recv_rows: list[int]
    ) -> None:
        """Rows to and from the ranks of this local index, [N] rows each; complete on return."""
        first = self.local_rank
        peers = range(first, self.world_size, self.ranks_per_node)
        self._move(self.outer, peers, send, send_rows, recv, recv_rows)

    def within(
        self, send: Tensor, send_rows: list[int], recv: Tensor, recv_rows: list[int]
    ) -> None:
        """Rows to and from the ranks of this node, [L] rows each; complete on return."""
        first = self.node * self.ranks_per_node
        peers = range(first, first + self.ranks_per_node)
        self._move(self.inner, peers, send, send_rows, recv, recv_rows)

    def count_across(self, rows: Tensor) -> Tensor:
        """What each node's rank of this local index says: int64 [N] from each, [N, N] in all."""
        try:
            return self.outer.exchange(rows)
        except (RankTimeout, PeerFailed) as error:
            raise self._lost("the exchange of counts across nodes") from error

    def _exchange(self, record: Tensor) -> Tensor:
        return self.flat.exchange(record)

    def _all_to_all(
        self, send: Tensor, send_rows: list[int], recv: Tensor, recv_rows: list[int]
    ) -> Work:
        return self.flat.all_to_all(send, send_rows, recv, recv_rows)

    def _all_gather(self, send: Tensor, recv: Tensor, rows: list[int]) -> Work:
        return self.flat.all_gather(send, recv, rows)

    def set_timeout(self, timeout_s: float) -> None:
        """Keep some of it for finding out who is missing, where a level does not see all ranks."""
        super().set_timeout(timeout_s)
        self.flat.set_timeout(timeout_s)
        for level in (self.inner, self.outer):
            level.set_timeout(timeout_s - grace_of(timeout_s))

    def close(self) -> None:
        """Close all three."""
        for part in (self.inner, self.outer, self.flat):
            part.close()

    def _move(
        self,
        level: Transport,
        peers: range,
        send: Tensor,
        send_rows: list[int],
        recv: Tensor,
        recv_rows: list[int],
    ) -> None:
        for peer, rows in zip(peers, send_rows, strict=True):
            self.bytes_to[peer] += rows * send.shape[1]
        try:
            level.all_to_all(send, send_rows, recv, recv_rows).wait()
        except (RankTimeout, PeerFailed) as error:
            where = "within the node" if level is self.inner else "across nodes"
            raise self._lost(f"the exchange of rows {where}") from error
        except CapacityError as error:
            # Agreed among the ranks of a level alone, so the rest have to be told.
            raise CapacityError(
                f"node {self.node}, local {error}", ranks=tuple(peers[r] for r in error.ranks)
            ) from error

    def tell_failure(self, said: str) -> None:
        """On all three: a rank may wait on any."""
        self.flat.tell_failure(said)
        self._leave_levels(said)

    def heard(self) -> dict[int, str] | None:
        """Over all ranks."""
        return self.flat.heard()

    def _lost(self, during: str) -> CrossdockError:
        error = self.flat.declare_lost(during)
        if isinstance(error, PeerFailed):
            # Ranks that share no level with the one that failed wait for this one.
            self._leave_levels(f"{FAILED}: {error}")
        return error

    def _leave_levels(self, said: str) -> None:
        self.inner.tell_failure(said)
        self.outer.tell_failure(said)


def find_nodes(flat: Transport) -> list[list[int]]:
    """Ranks of each host, by host name, in the order of their first ranks. Collective."""
    mine = torch.tensor([digest_of(socket.gethostname().encode())])
    nodes: dict[int, list[int]] = {}
    for rank, host in enumerate(flat.exchange(mine)[:, 0].tolist()):
        nodes.setdefault(host, []).append(rank)
    return list(nodes.values())


def node_blocks(nodes: list[list[int]], ranks_per_node: int | None) -> list[list[int]]:
    """Ranks of each node.

    Args:
        nodes: Ranks of each host.
        ranks_per_node: Cut consecutive ranks into nodes of this size instead.

    Raises:
        ConfigError: Nodes differ in size, or do not hold consecutive ranks.
    """
    world_size = sum(map(len, nodes))
    if ranks_per_node is not None:
        if ranks_per_node < 1 or world_size % ranks_per_node:
            raise ConfigError(
                f"ranks_per_node = {ranks_per_node}: {world_size} ranks do not divide into nodes "
                "of that size"
            )
        return [
            list(range(first, first + ranks_per_node))
            for first in range(0, world_size, ranks_per_node)
        ]
    sizes = [len(ranks) for ranks in nodes]
    if len(set(sizes)) > 1:
        raise ConfigError(
            f"hierarchical needs as many ranks on every node; nodes have {sizes}: start as many "
            "on each, or use a flat transport (gloo, nccl, mpi)"
        )
    if any(ranks != list(range(ranks[0], ranks[0] + len(ranks))) for ranks in nodes):
        raise ConfigError(
            "hierarchical needs consecutive ranks on each node, and here they are dealt out in "
            "turn: mpirun --map-by slot, or srun --distribution=block"
        )
    return nodes
