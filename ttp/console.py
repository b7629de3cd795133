"""Where commands print: as wide as the terminal, and uncut in a file or a pipe."""

from __future__ import annotations

from typing import IO

from rich.console import Console

UNCUT = 10_000
"""Columns of a file: wider than any table here."""


def open_console(file: IO[str] | None = None, *, soft_wrap: bool = True) -> Console:
    """Return a console for `file` (default: stdout).

    soft_wrap: lines go on over a terminal's edge; without it, and where there are tables with long cells, they are folded.
    """
    console = Console(file=file, highlight=False, soft_wrap=soft_wrap)
    if not console.is_terminal:
        console.width = UNCUT
    return console
