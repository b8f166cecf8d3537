"""Benchmarks of one part of the layer, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from crossdock.launch.report import versions
from crossdock.launch.screen import make_console, make_table, write_json
from crossdock.scratch.errors import ConfigError

__all__ = ["PARTS", "bench_part"]

PARTS = ("permute", "experts")


def bench_part(part: str, json_path: Path | None) -> None:
    """Measure one of ``PARTS``, print a table, and write everything to a file if asked.

    Raises:
        ConfigError: This machine lacks what the benchmark needs.
    """
    result = _permute() if part == "permute" else _experts()
    if json_path is not None:
        write_json({"subject": part, **result, "versions": versions()}, json_path)
    console = make_console()
    if part == "permute":
        _show(f"permute on {result['device']}", result["cases"], console)
    else:
        for case, workers in result["cases"].items():
            rows = [{"worker": name, **figures} for name, figures in workers.items()]
            _show(f"experts on {result['gpu']}: {case}", rows, console)


def _permute() -> dict[str, Any]:
    from crossdock.scratch.bench_permute import run_permute_bench

    return run_permute_bench()


def _experts() -> dict[str, Any]:
    from crossdock.experts.bench import run_experts_bench

    if not torch.cuda.is_available():
        raise ConfigError("bench experts needs a CUDA GPU, and torch sees none here")
    return run_experts_bench()


def _show(title: str, rows: Sequence[dict[str, Any]], console: Console) -> None:
    """A table of what was measured in all rows (not of shapes); ``_us`` is microseconds."""
    label, *others = rows[0]
    measured = (name for name in others if all(isinstance(row.get(name), float) for row in rows))
    names = [label, *measured]
    table = make_table(title, [name.replace("_", " ") for name in names])
    for row in rows:
        cells = (row[name] for name in names)
        table.add_row(*(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells))
    console.print(table)
