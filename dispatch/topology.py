"""Where each rank sits: nodes, and the data, context and tensor parallel grid over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from crossdock.scratch.errors import ConfigError

__all__ = ["Coordinates", "Topology"]


class Coordinates(NamedTuple):
    """A rank's place in the parallel grid."""

    dp: int
    pcp: int
    tp: int


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The ranks of one EP group (one pipeline stage): world = dp x pcp x tp.

    dp is slowest and tp fastest: ``rank = (dp_i * pcp + pcp_i) * tp + tp_i``. Node n holds the
    consecutive ranks from ``n * ranks_per_node``.

    Attributes:
        nodes: Hosts.
        ranks_per_node: Ranks of each host.
        dp: Data parallel replicas of the attention side.
        pcp: Prefill context parallel ranks of a replica.
        tp: Tensor parallel ranks of a context parallel rank.

    Raises:
        ConfigError: A size is not a whole number above 0, or nodes x ranks_per_node is not
            dp x pcp x tp.
    """

    nodes: int = 1
    ranks_per_node: int = 1
    dp: int = 1
    pcp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node", "dp", "pcp", "tp"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} = {value!r}: a whole number above 0")
        if self.nodes * self.ranks_per_node != self.world_size:
            raise ConfigError(
                f"dp {self.dp} x pcp {self.pcp} x tp {self.tp} = {self.world_size} ranks, but "
                f"nodes {self.nodes} x ranks_per_node {self.ranks_per_node} = "
                f"{self.nodes * self.ranks_per_node}"
            )

    @property
    def world_size(self) -> int:
        """R, ranks in the EP group."""
        return self.dp * self.pcp * self.tp

    def coordinates(self, rank: int) -> Coordinates:
        """Place of ``rank`` in the grid; ValueError outside [0, R)."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not one of the {self.world_size} ranks")
        outer, tp = divmod(rank, self.tp)
        dp, pcp = divmod(outer, self.pcp)
        return Coordinates(dp, pcp, tp)

    def rank_of(self, *, dp: int = 0, pcp: int = 0, tp: int = 0) -> int:
        """EP rank at a place in the grid; ValueError outside the grid."""
        for name, value, size in (("dp", dp, self.dp), ("pcp", pcp, self.pcp), ("tp", tp, self.tp)):
            if not 0 <= value < size:
                raise ValueError(f"{name} = {value} is outside [0, {size})")
        return (dp * self.pcp + pcp) * self.tp + tp

    def node_of(self, rank: int) -> int:
        """Host of ``rank``."""
        return rank // self.ranks_per_node
