"""Where commands print: as wide as the terminal, and uncut in a file or a pipe."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import IO

from rich.console import Console

UNCUT = 10_000
"""Columns of a file: wider than any table here."""


class _Raising(Console):
    """A console whose lost reader is an error like others. rich ends the program there, which is right for a command only."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def open_console(file: IO[str] | None = None, *, soft_wrap: bool = True, ends_program: bool = True) -> Console:
    """Return a console for `file` (default: stdout).

    soft_wrap: lines go on over a terminal's edge; without it, and where there are tables with long cells, they are folded.
    ends_program: where the reader is gone the program ends with 1; else that is a BrokenPipeError.
    """
    stream = file or sys.stdout
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="backslashreplace")  # a path need not be UTF-8
    kind = Console if ends_program else _Raising
    console = kind(file=file, highlight=False, soft_wrap=soft_wrap)
    if not console.is_terminal:
        console.width = UNCUT
    return console
