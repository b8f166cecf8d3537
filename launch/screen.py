"""How results look: on a terminal, in a pipe, in a JSON file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import ASCII, SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from crossdock.scratch.errors import ConfigError

__all__ = ["make_console", "make_table", "require_parent", "write_json"]

PLAIN_WIDTH = 160


def make_console() -> Console:
    """Colours and the terminal's width, or neither where the output is no terminal."""
    if _is_terminal():
        return Console(highlight=False, markup=False)
    return Console(
        width=PLAIN_WIDTH, highlight=False, markup=False, force_terminal=False, color_system=None
    )


def make_table(title: str, columns: Sequence[str]) -> Table:
    """A table of numbers."""
    text = Text(title)  # a name may look like markup
    if _is_terminal():
        table = Table(title=text, box=SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    else:
        table = Table(title=text, box=ASCII, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def require_parent(path: Path) -> None:
    """Raises ConfigError if results cannot go to that file, before they are worked for."""
    try:
        found = path.parent.is_dir()
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}") from None
    if not found:
        raise ConfigError(f"--json {path}: there is no directory {path.parent}")


def write_json(result: Mapping[str, Any], path: Path) -> None:
    """Write results to a file.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        path.write_text(json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written: {error}") from None


def _is_terminal() -> bool:
    # Open MPI gives its ranks a pseudo terminal, wherever its own output goes.
    return sys.stdout.isatty() and "OMPI_COMM_WORLD_RANK" not in os.environ
