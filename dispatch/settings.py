"""A dispatcher's settings as whole numbers, so that ranks can find out in which one they differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from crossdock.dispatch.agreement import Words
from crossdock.dispatch.config import DTYPES, DispatchConfig
from crossdock.dispatch.placement import ExpertPlacement
from crossdock.dispatch.topology import Topology
from crossdock.scratch.errors import DisagreementError

__all__ = ["compare_settings", "settings_of"]

_ALGORITHMS = ("alltoall", "allgather")
_WIRES = ("payload", "fp8")
_LAYOUTS = ("row", "expert")
_GROW = -1
_NONE = -1


@dataclass(frozen=True)
class _Setting:
    name: str
    show: Callable[[int], object] = int


_SETTINGS = (
    _Setting("num_experts"),
    _Setting("top_k"),
    _Setting("hidden"),
    _Setting("dtype", lambda code: str(DTYPES[code])),
    _Setting("algorithm", lambda code: _ALGORITHMS[code]),
    _Setting("wire", lambda code: _WIRES[code]),
    _Setting("bucket", lambda rows: "grow" if rows == _GROW else rows),
    _Setting("layout", lambda code: _LAYOUTS[code]),
    _Setting("expert_alignment"),
    _Setting("num_sms", lambda sms: None if sms == _NONE else sms),
    _Setting("timeout_s", lambda ms: ms / 1000),
    _Setting("debug", bool),
    _Setting("placement (hash)", hex),
    _Setting("topology nodes"),
    _Setting("topology ranks_per_node"),
    _Setting("topology dp"),
    _Setting("topology pcp"),
    _Setting("topology tp"),
    _Setting("num_slots"),
)


def settings_of(
    config: DispatchConfig, topology: Topology, placement: ExpertPlacement, num_slots: int
) -> tuple[int, ...]:
    """All settings that ranks must share, in the order of ``_SETTINGS``."""
    return (
        config.num_experts,
        config.top_k,
        config.hidden,
        DTYPES.index(config.dtype),
        _ALGORITHMS.index(config.algorithm),
        _WIRES.index(config.wire),
        _GROW if config.bucket == "grow" else config.bucket,
        _LAYOUTS.index(config.layout),
        config.expert_alignment,
        _NONE if config.num_sms is None else config.num_sms,
        round(config.timeout_s * 1000),
        int(config.debug),
        placement.digest,
        topology.nodes,
        topology.ranks_per_node,
        topology.dp,
        topology.pcp,
        topology.tp,
        num_slots,
    )


def compare_settings(values: Words) -> DisagreementError | None:
    """The error that names each setting that differs, the ranks and their values.

    Args:
        values: int64 [R, >= number of settings], one row a rank.
    """
    differences = []
    blamed: set[int] = set()
    for column, setting in enumerate(_SETTINGS):
        by_value: dict[int, list[int]] = {}
        for rank, value in enumerate(values[:, column].tolist()):
            by_value.setdefault(value, []).append(rank)
        if len(by_value) > 1:
            minority: list[int] = min(by_value.values(), key=len)
            blamed.update(minority)
            said = ", ".join(
                f"{setting.show(value)} on rank{'s' * (len(ranks) > 1)} {_few(ranks)}"
                for value, ranks in by_value.items()
            )
            differences.append(f"{setting.name} is {said}")
    if not differences:
        return None
    return DisagreementError(
        f"ranks constructed a Dispatcher with different settings: {'; '.join(differences)}",
        ranks=tuple(sorted(blamed)),
    )


def _few(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
