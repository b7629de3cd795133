"""The answer of a `ttp ckpt` command: an exit status, the same for people and for machines, or why there is no answer.

Owns the meaning of the exit statuses and the two forms of the output. Knows no checkpoint.
"""

from __future__ import annotations

import datetime
import enum
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table


class Status(enum.IntEnum):
    """Exit status of `ttp ckpt`; docs/checkpoints.md lists them."""

    YES = 0
    """Valid, complete, equal; written, removed, signed, or nothing to do."""
    NO = 1
    """A checkpoint is broken or none is there (list, inspect, verify, sign); two differ (diff)."""
    USAGE = 2
    """The command line is wrong, or names what cannot be meant: no such folder, an output that is there already."""
    FAILED = 3
    """There is no answer, or the work was not done: no right to read, no room, a broken checkpoint to compare or export."""


class UsageError(Exception):
    """The command line is well-formed, and names something that cannot be meant."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command found out or did."""

    status: Status
    fields: Mapping[str, Any]
    """Plain values, for --json."""
    shown: Sequence[RenderableType]
    """The same for people."""


def print_answer(answer: Answer, console: Console, *, as_json: bool) -> None:
    """Print it: tables with lines on a terminal, aligned columns without any elsewhere, or one JSON object."""
    if as_json:
        text = json.dumps(_finite({"status": int(answer.status), **answer.fields}), indent=1, allow_nan=False)
        console.print(text, markup=False, soft_wrap=True)
        return
    for number, item in enumerate(answer.shown):
        if not isinstance(item, Table):
            console.print(item, soft_wrap=isinstance(item, str))  # a sentence goes on over the edge: it can be searched
        elif console.is_terminal:
            console.print(item)
        else:
            if number:
                console.print()
            _print_columns(item, console)


def _print_columns(table: Table, console: Console) -> None:
    """Print a table without lines, and without the blanks that make its rows equally long."""
    table.box, table.pad_edge = None, False
    with console.capture() as printed:
        console.print(table)
    rows = "\n".join(row.rstrip() for row in printed.get().splitlines())
    console.print(rows, markup=False, soft_wrap=True)


def _finite(value: Any) -> Any:
    """Return plain values with numbers that JSON has not (`nan`, `inf`) as text."""
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case Mapping():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return value


def system_error_text(error: OSError) -> str:
    """Say what could not be read or written, and what to do."""
    named = f"{error.filename}: " if error.filename else ""
    advice = "; have it read by who may, or correct its permissions" if isinstance(error, PermissionError) else ""
    return f"{named}{error.strerror or error}{advice}"


def invalid(path: Path, text: str) -> Answer:
    """Answer that there is no valid checkpoint."""
    return Answer(Status.NO, {"path": str(path), "valid": False, "error": text}, [f"[red]INVALID[/] {escape(text)}"])


def time_text(unix_s: float) -> str:
    """Return a time in this machine's zone."""
    return datetime.datetime.fromtimestamp(unix_s).astimezone().isoformat(" ", "seconds")
