"""What a run tells: the JSON of the whole job, and the table on the screen."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from crossdock.dispatch import Topology
from crossdock.launch.config import Job
from crossdock.launch.screen import make_table

__all__ = ["RankReport", "RunReport", "versions"]


@dataclass(kw_only=True)
class RankReport:
    """What one rank saw; the lists have one entry a step.

    Attributes:
        bytes_sent: Bytes of rows sent to other ranks, there and back, in all steps.
        bytes_sent_across_nodes: Those of them that went to other nodes.
        seconds: By phase: dispatch, experts, combine.
        num_wraps: How often the trace started over, on the next layer.
        ok: All results were within the tolerance.
        max_abs_error: Largest difference from the oracle.
        tolerance: Largest tolerance of an element.
    """

    rank: int
    dp: int
    pcp: int
    tp: int
    node: int
    tokens_attention: list[int] = field(default_factory=list)
    tokens_owned: list[int] = field(default_factory=list)
    rows_received: list[int] = field(default_factory=list)
    bucket_capacity: list[int] = field(default_factory=list)
    pairs: list[int] = field(default_factory=list)
    scratch_capacity: list[int] = field(default_factory=list)
    bytes_sent: int = 0
    bytes_sent_across_nodes: int = 0
    seconds: dict[str, list[float]] = field(
        default_factory=lambda: {"dispatch": [], "experts": [], "combine": []}
    )
    num_wraps: int = 0
    ok: bool = True
    max_abs_error: float = 0.0
    tolerance: float = 0.0

    @classmethod
    def begin(cls, job: Job, rank: int, *, num_wraps: int) -> RankReport:
        """An empty report."""
        dp, pcp, tp = job.topology.coordinates(rank)
        node = job.topology.node_of(rank)
        return cls(rank=rank, dp=dp, pcp=pcp, tp=tp, node=node, num_wraps=num_wraps)

    def add_step(
        self,
        *,
        tokens_attention: int,
        tokens_owned: int,
        rows_received: int,
        bucket_capacity: int,
        pairs: int,
        scratch_capacity: int,
        sent: Sequence[int],
        topology: Topology,
        seconds: tuple[float, float, float],
    ) -> None:
        """Note one step. ``sent``: bytes to each rank. ``seconds``: dispatch, experts, combine."""
        self.tokens_attention.append(tokens_attention)
        self.tokens_owned.append(tokens_owned)
        self.rows_received.append(rows_received)
        self.bucket_capacity.append(bucket_capacity)
        self.pairs.append(pairs)
        self.scratch_capacity.append(scratch_capacity)
        for name, value in zip(("dispatch", "experts", "combine"), seconds, strict=True):
            self.seconds[name].append(value)
        for peer, num_bytes in enumerate(sent):
            if peer != self.rank:
                self.bytes_sent += num_bytes
                if topology.node_of(peer) != self.node:
                    self.bytes_sent_across_nodes += num_bytes


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What all ranks saw."""

    job: Job
    transport: str
    ranks: list[RankReport]
    checked: bool

    @property
    def ok(self) -> bool:
        """All results of all ranks were within the tolerance."""
        return all(rank.ok for rank in self.ranks)

    @property
    def max_abs_error(self) -> float:
        """Largest difference from the oracle, over ranks and steps."""
        return max(rank.max_abs_error for rank in self.ranks)

    @property
    def tolerance(self) -> float:
        """Largest tolerance of an element, over ranks and steps."""
        return max(rank.tolerance for rank in self.ranks)

    def as_json(self) -> dict[str, Any]:
        """The promised JSON."""
        internal = ("num_wraps", "ok", "max_abs_error", "tolerance")
        return {
            "ok": self.ok,
            "config": self.job.config.model_dump(),
            "world_size": len(self.ranks),
            "transport": self.transport,
            "algorithm": self.job.config.dispatch.algorithm,
            "steps": self.job.config.run.steps,
            "max_abs_error": self.max_abs_error,
            "tolerance": self.tolerance,
            "ranks": [
                {name: value for name, value in asdict(rank).items() if name not in internal}
                for rank in self.ranks
            ],
            "versions": versions(),
        }

    def show(self, console: Console) -> None:
        """The table, what to know about it, and the verdict as the last line."""
        console.print(self._table())
        lock_after = self.job.config.run.lock_after
        locked = "never locked" if lock_after is None else f"locked after step {lock_after}"
        console.print(
            "Counts: largest of the steps. ms: medians, waiting for slower ranks included. "
            f"{self.transport}, {self.job.config.dispatch.algorithm}, {locked}.",
            style="dim",
        )
        if self.ranks[0].num_wraps:
            times = self.ranks[0].num_wraps
            console.print(f"The trace was used up {times} x, each time on to the next layer.")
        console.print(self._verdict(), style="bold green" if self.ok else "bold red")

    def _table(self) -> Table:
        many_nodes = self.job.config.cluster.nodes > 1
        names = ["rank", "node"] if many_nodes else ["rank"]
        names += ["dp.\npcp.\ntp", "tokens/\nowned", "rows/\nbucket", "pairs/\nscratch", "MB\nsent"]
        names += ["dispatch/\nexperts/\ncombine ms", "max\nerror"]
        table = make_table(self.job.config.name, names)
        for r in self.ranks:
            times = (median(r.seconds[name]) * 1e3 for name in ("dispatch", "experts", "combine"))
            table.add_row(
                *map(str, (r.rank, r.node) if many_nodes else (r.rank,)),
                f"{r.dp}.{r.pcp}.{r.tp}",
                f"{max(r.tokens_attention)}/{max(r.tokens_owned)}",
                f"{max(r.rows_received)}/{max(r.bucket_capacity)}",
                f"{max(r.pairs)}/{max(r.scratch_capacity)}",
                f"{r.bytes_sent / 1e6:.1f}",
                "/".join(f"{ms:.0f}" if ms >= 10 else f"{ms:.1f}" for ms in times),
                f"{r.max_abs_error:.2g}" if self.checked else "-",
                style=None if r.ok else "red",
            )
        return table

    def _verdict(self) -> str:
        steps, ranks = self.job.config.run.steps, len(self.ranks)
        if not self.checked:
            return f"{steps} steps on {ranks} ranks, not compared with the oracle (--no-check)."
        numbers = f"max abs error {self.max_abs_error:.3g}, tolerance {self.tolerance:.3g}"
        if self.ok:
            matched = f"All {steps} steps on all {ranks} ranks match the single-process oracle"
            return f"{matched}: {numbers}."
        wrong = ", ".join(str(rank.rank) for rank in self.ranks if not rank.ok)
        return f"MISMATCH with the single-process oracle on rank {wrong}: {numbers}."


def versions() -> dict[str, str]:
    """Of what computed."""
    return {
        "crossdock": version("crossdock"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
