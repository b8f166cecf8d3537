"""How results look on a terminal, and in a file or a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rich.box import ASCII, SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

__all__ = ["make_console", "make_table"]

PLAIN_WIDTH = 160


def make_console() -> Console:
    """Colours and the terminal's width, or neither where the output is no terminal."""
    if _is_terminal():
        return Console(highlight=False)
    return Console(width=PLAIN_WIDTH, highlight=False, force_terminal=False, color_system=None)


def make_table(title: str, columns: Sequence[str]) -> Table:
    """A table of numbers."""
    box = SIMPLE_HEAD if _is_terminal() else ASCII
    table = Table(title=title, box=box, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _is_terminal() -> bool:
    # Open MPI gives its ranks a pseudo terminal, wherever its own output goes.
    return sys.stdout.isatty() and "OMPI_COMM_WORLD_RANK" not in os.environ
