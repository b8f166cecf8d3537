"""From a YAML file and overrides to a checked configuration, or to all that is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ValidationError

from crossdock.dispatch import DispatchConfig, ExpertPlacement, Topology
from crossdock.launch.models import (
    ClusterSection,
    Config,
    DispatchSection,
    MoeSection,
    ParallelSection,
    RunSection,
)
from crossdock.launch.problems import problems_of
from crossdock.launch.trace import TraceInfo, is_file, read_trace_info
from crossdock.launch.yaml_file import KeyPath, Problem, YamlDocument, dotted, read_yaml, shorten
from crossdock.scratch.errors import ConfigError

__all__ = ["Job", "load_job"]

MOST_PROBLEMS = 50
"""Lines about one file; nobody reads more."""

S = TypeVar("S", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A configuration that holds together, and what follows from it.

    Attributes:
        path: The YAML file.
        overrides: The ``key.path=value`` arguments that were applied to it.
        config: Its checked content.
        trace: The recorded routing that it names; None with synthetic routing.
    """

    path: Path
    overrides: tuple[str, ...]
    config: Config
    trace: Path | None

    @property
    def topology(self) -> Topology:
        """The rank grid."""
        cluster, parallel = self.config.cluster, self.config.parallel
        return Topology(
            nodes=cluster.nodes,
            ranks_per_node=cluster.ranks_per_node,
            dp=parallel.dp,
            pcp=parallel.pcp,
            tp=parallel.tp,
        )

    @property
    def placement(self) -> ExpertPlacement:
        """Which rank owns which expert."""
        moe, num_ranks = self.config.moe, self.config.cluster.num_ranks
        if moe.placement == "linear":
            return ExpertPlacement.linear(moe.num_experts, num_ranks)
        if moe.placement == "round_robin":
            return ExpertPlacement.round_robin(moe.num_experts, num_ranks)
        return ExpertPlacement.from_owner(torch.tensor(moe.placement), num_ranks)

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        return {
            "bfloat16": torch.bfloat16,
            "float16": torch.float16,
            "float32": torch.float32,
        }[self.config.moe.dtype]

    @property
    def dispatch_config(self) -> DispatchConfig:
        """Settings of the dispatcher."""
        moe = self.config.moe
        return DispatchConfig(
            num_experts=moe.num_experts,
            top_k=moe.top_k,
            hidden=moe.hidden,
            dtype=self.dtype,
            **self.config.dispatch.model_dump(exclude={"transport", "symmetric_heap"}),
        )


def load_job(path: Path, overrides: Sequence[str] = ()) -> Job:
    """Read, override and check a configuration.

    Raises:
        ConfigError: All that is wrong, one line each: ``file:line: key: message``, with the
            override in place of ``file:line`` where that is the origin.
    """
    document = read_yaml(path)
    for assignment in overrides:
        document.override(assignment)
    problems, more = list(document.problems), 0
    config: Config | None = None
    try:
        config = Config.model_validate(document.data)
    except ValidationError as error:
        found, more = problems_of(error, document, MOST_PROBLEMS)
        problems += found
    trace = _find_trace(document.data, path)
    problems += _cross_checks(document.data, path, trace)
    if problems:
        raise ConfigError("\n".join(_lines(document, problems, more)))
    assert config is not None
    return Job(path=path, overrides=tuple(overrides), config=config, trace=trace)


def _lines(document: YamlDocument, problems: Sequence[Problem], more: int) -> list[str]:
    each_once = list(dict.fromkeys(problems))
    lines = [
        f"{document.where(problem.path)}: {dotted(problem.path)}: {problem.message}"
        for problem in each_once[:MOST_PROBLEMS]
    ]
    more += len(each_once) - len(lines)
    return [*lines, f"and {more} more"] if more else lines


# What several sections must agree on. Each check runs as soon as its own sections are valid, so
# that a mistake elsewhere does not hide it until the next attempt.


def _cross_checks(data: Mapping[str, Any], path: Path, trace: Path | None) -> Iterator[Problem]:
    def section(name: str, model: type[S]) -> S | None:
        try:
            return model.model_validate(data.get(name, {}))
        except ValidationError:
            return None

    cluster = section("cluster", ClusterSection)
    parallel = section("parallel", ParallelSection)
    moe = section("moe", MoeSection)
    dispatch = section("dispatch", DispatchSection)
    run = section("run", RunSection)
    if cluster and parallel:
        yield from _check_grid(cluster, parallel)
    if moe:
        yield from _check_moe(moe, cluster)
    if dispatch and cluster:
        yield from _check_transport(dispatch, cluster)
    if run:
        yield from _check_run(run, cluster, parallel)
        if run.routing.trace is not None:
            yield from _check_trace(run, moe, path, trace)


def _check_grid(cluster: ClusterSection, parallel: ParallelSection) -> Iterator[Problem]:
    grid = parallel.dp * parallel.pcp * parallel.tp
    if grid != cluster.num_ranks:
        yield Problem(
            ("parallel",),
            f"dp {parallel.dp} x pcp {parallel.pcp} x tp {parallel.tp} = {grid} ranks, but cluster "
            f"has nodes {cluster.nodes} x ranks_per_node {cluster.ranks_per_node} = "
            f"{cluster.num_ranks}",
        )


def _check_moe(moe: MoeSection, cluster: ClusterSection | None) -> Iterator[Problem]:
    if moe.top_k > moe.num_experts:
        yield Problem(
            ("moe", "top_k"), f"{moe.top_k} experts a token, but num_experts is {moe.num_experts}"
        )
    if isinstance(moe.placement, list):
        if len(moe.placement) != moe.num_experts:
            yield Problem(
                ("moe", "placement"),
                f"{len(moe.placement)} owners for num_experts {moe.num_experts}",
            )
        for expert, owner in enumerate(moe.placement):
            if cluster and owner >= cluster.num_ranks:
                yield Problem(
                    ("moe", "placement", expert),
                    f"rank {owner} does not exist; the last is {cluster.num_ranks - 1}",
                )


def _check_transport(dispatch: DispatchSection, cluster: ClusterSection) -> Iterator[Problem]:
    transport, device = dispatch.transport, cluster.device
    if transport in ("nccl", "nvshmem") and device == "cpu":
        yield Problem(("dispatch", "transport"), f"{transport} needs cluster.device cuda")
    if transport == "shm" and device == "cuda":
        yield Problem(("dispatch", "transport"), "shm needs cluster.device cpu")
    if transport == "shm" and cluster.nodes > 1:
        yield Problem(
            ("dispatch", "transport"),
            f"shm reaches one node, cluster has {cluster.nodes}; take hierarchical or auto",
        )
    if dispatch.layout == "expert" and transport != "nvshmem":
        yield Problem(("dispatch", "layout"), "expert needs transport nvshmem")
    if dispatch.layout == "expert" and dispatch.algorithm == "allgather":
        yield Problem(("dispatch", "layout"), "expert needs algorithm alltoall")
    if dispatch.symmetric_heap is not None and transport != "nvshmem":
        yield Problem(
            ("dispatch", "symmetric_heap"), f"needs transport nvshmem; transport is {transport}"
        )


def _check_run(
    run: RunSection, cluster: ClusterSection | None, parallel: ParallelSection | None
) -> Iterator[Problem]:
    batch = run.batch
    if batch.tokens_per_rank is not None:
        if batch.prefill is not None or batch.decode is not None:
            yield Problem(
                ("run", "batch", "tokens_per_rank"),
                "stands instead of prefill and decode, not beside them",
            )
        if cluster and len(batch.tokens_per_rank) != cluster.num_ranks:
            yield Problem(
                ("run", "batch", "tokens_per_rank"),
                f"{len(batch.tokens_per_rank)} entries for {cluster.num_ranks} ranks",
            )
    elif batch.prefill is None and batch.decode is None:
        yield Problem(("run", "batch"), "give prefill, decode or both, or tokens_per_rank")
    for name in ("prefill", "decode"):
        entries: list[Any] | None = getattr(batch, name)
        if parallel and entries is not None and len(entries) != parallel.dp:
            yield Problem(
                ("run", "batch", name), f"{len(entries)} entries for {parallel.dp} DP ranks"
            )
    routing = run.routing
    kinds = [name for name in ("trace", "zipf", "uniform") if getattr(routing, name) is not None]
    if len(kinds) != 1:
        found = " and ".join(kinds) or "none of them"
        yield Problem(
            ("run", "routing", *kinds[-1:]), f"one of trace, zipf, uniform is wanted, not {found}"
        )
    if run.lock_after is not None and run.lock_after > run.steps:
        yield Problem(
            ("run", "lock_after"), f"after step {run.lock_after} of {run.steps}; null never locks"
        )


def _check_trace(
    run: RunSection, moe: MoeSection | None, path: Path, trace: Path | None
) -> Iterator[Problem]:
    key: KeyPath = ("run", "routing", "trace")
    if trace is None:
        places = ", ".join(
            shorten(str(place), 200) for place in _trace_places(str(run.routing.trace), path)
        )
        yield Problem(key, f"no such file; looked for {places}")
        return
    try:
        info: TraceInfo = read_trace_info(trace)
    except ConfigError as error:
        yield Problem(key, str(error))
        return
    if run.routing.layer >= info.num_layers:
        yield Problem(
            ("run", "routing", "layer"),
            f"{run.routing.layer}, but the trace has layers 0 to {info.num_layers - 1}",
        )
    if moe and info.num_experts != moe.num_experts:
        yield Problem(
            key, f"recorded with {info.num_experts} experts, but num_experts is {moe.num_experts}"
        )
    if moe and info.top_k != moe.top_k:
        yield Problem(key, f"recorded with top_k {info.top_k}, but moe.top_k is {moe.top_k}")


def _find_trace(data: Mapping[str, Any], path: Path) -> Path | None:
    try:
        name = data["run"]["routing"]["trace"]
    except (KeyError, TypeError):
        return None
    if not isinstance(name, str):
        return None
    return next((place for place in _trace_places(name, path) if is_file(place)), None)


def _trace_places(name: str, path: Path) -> list[Path]:
    return [path.parent / name, path.parent / "traces" / name]
