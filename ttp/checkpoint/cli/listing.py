"""`ttp ckpt list`: the published checkpoints of a folder with their state, and what else takes room there.

Owns what is shown of it; compares no checksums and changes nothing on disk.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Column, Table

from ttp.checkpoint.cli.output import Answer, Status, time_text
from ttp.checkpoint.find import Leftover, Listed, State, folder_at, list_leftovers, list_published, nothing_in
from ttp.checkpoint.format.durable import read_tracker
from ttp.proto.messages import CauseKind
from ttp.text.wording import size_text

_FINITE = {True: "yes", False: "[red]no[/]", None: "unknown"}
_COLOURS = {State.COMPLETE: "green", State.PART: "green", State.BROKEN: "red", State.UNREADABLE: "yellow"}


def run(given: argparse.Namespace, console: Console) -> Answer:
    """List each checkpoint of a folder, newest first, and what else takes room there."""
    folder = folder_at(given.path)
    listed, leftovers, tracker = list_published(folder), list_leftovers(folder), read_tracker(folder)
    fields = {
        "folder": str(folder),
        "checkpoints": [_listed_fields(entry) for entry in listed],
        "tracker": tracker,
        "leftovers": [{"path": str(e.path), "meaning": e.meaning, "bytes": e.nbytes} for e in leftovers],
    }
    if not listed:
        error = str(nothing_in(folder))
        return Answer(Status.NO, {**fields, "error": error}, [f"[red]{escape(error)}[/]", *_leftover_tables(leftovers)])
    table = Table(Column("step", justify="right"), "cause", "ranks lost", Column("size", justify="right"), "written",
                  "finite", Column("state", overflow="fold"), title=escape(str(folder)), title_justify="left")  # fmt: skip
    for entry in listed:
        table.add_row(*_listed_row(entry))
    shown: list[RenderableType] = [table, *_leftover_tables(leftovers)]
    shown.append(f"tracker: {'none' if tracker is None else f'step {tracker}'}")
    if newest := _newest_finite(listed):
        shown.append(newest)
    states = {entry.state for entry in listed}
    if states & {State.COMPLETE, State.PART}:
        shown.append("complete: names, sizes and completeness were checked; `verify` compares the checksums, too")
    if State.UNREADABLE in states:
        return Answer(Status.FAILED, fields, shown)
    return Answer(Status.NO if State.BROKEN in states else Status.YES, fields, shown)


def _newest_finite(listed: Sequence[Listed]) -> str:
    """Name the newest checkpoint without NaN and infinity where a newer one has some; empty: none has."""
    found = [entry for entry in listed if entry.manifest is not None]
    if all(entry.manifest.finite is not False for entry in found if entry.manifest is not None):
        return ""
    whole = [entry.step for entry in found if entry.manifest is not None and entry.manifest.finite]
    newest = f"of step {max(whole)}" if whole else "not among these"
    return f"the newest checkpoint with a finite state is {newest}; move the newer ones away to resume it"


def _listed_fields(entry: Listed) -> dict[str, Any]:
    fields: dict[str, Any] = {"path": str(entry.path), "step": entry.step, "state": entry.state.value}
    if entry.manifest is None:
        return {**fields, "error": entry.error}
    cause = entry.manifest.cause
    return {
        **fields,
        "cause": cause.kind.value,
        "ranks_lost": list(cause.ranks),
        "bytes": entry.nbytes,
        "written_unix_s": entry.manifest.created_unix_s,
        "finite": entry.manifest.finite,
    }


def _listed_row(entry: Listed) -> tuple[str, ...]:
    state = f"[{_COLOURS[entry.state]}]{entry.state.value}[/]"
    found = entry.manifest
    if found is None:
        return str(entry.step), "", "", "", "", "", f"{state}: {escape(entry.error)}"
    left = found.cause.kind is CauseKind.PREEMPTED  # all was saved
    lost = "-" if left else ", ".join(map(str, found.cause.ranks)) or "-"
    return (
        str(entry.step),
        found.cause.kind.value,
        lost,
        size_text(entry.nbytes),
        time_text(found.created_unix_s),
        _FINITE[found.finite],
        f"{state}, sums not checked",
    )


def _leftover_tables(leftovers: Sequence[Leftover]) -> list[RenderableType]:
    if not leftovers:
        return []
    table = Table("also here", Column("size", justify="right"), "what it is")
    for entry in leftovers:
        table.add_row(escape(entry.path.name), size_text(entry.nbytes), entry.meaning)
    return [table]
