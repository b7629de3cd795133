"""`ttp ckpt prune PATH --keep N`: the older checkpoints go, the N newest valid ones stay.

Owns the choice and the removal. Goes by what a restart would load: a checkpoint counts as kept when its checksums were compared,
so that the newest valid one always stays. What is not valid is never removed: somebody may want to look at it.

A checkpoint that goes is renamed first, to a name that no search finds and that the next start of a job cleans away: a removal that is
cut short at any point leaves nothing that looks whole and is not.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Column, Table

from ttp.checkpoint.answer import Answer, Status, size_text
from ttp.checkpoint.durable import fsync_directory
from ttp.checkpoint.look import checked
from ttp.checkpoint.survey import (
    PRUNED,
    Leftover,
    Listed,
    State,
    folder_at,
    list_leftovers,
    list_published,
    nothing_in,
    size_of,
)
from ttp.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Plan:
    """What would be done with each checkpoint of a folder, newest first."""

    folder: Path
    kept: tuple[Listed, ...]
    removed: tuple[Listed, ...]
    left: tuple[Listed, ...]
    """Not valid, and not touched; `error` says why."""
    unfinished: tuple[Leftover, ...]
    """Half removed by an earlier prune: removed as well."""

    @property
    def going(self) -> list[Path]:
        """What the removal takes away."""
        return [*(entry.path for entry in self.removed), *(entry.path for entry in self.unfinished)]

    @property
    def nbytes(self) -> int:
        """Room that the removal gives back."""
        return sum(map(size_of, self.going))


def run(given: argparse.Namespace, console: Console) -> Answer:
    """Show what would go and, with --yes, remove it."""
    folder = folder_at(given.path)
    plan = plan_prune(folder, given.keep, lambda path: checked(path, console))
    nbytes = plan.nbytes
    told = {
        "folder": str(folder),
        "removed" if given.yes else "would_remove": [str(path) for path in plan.going],
        "kept": [str(entry.path) for entry in plan.kept],
        "left": [{"path": str(entry.path), "error": entry.error} for entry in plan.left],
        "bytes": nbytes,
    }
    shown: list[RenderableType] = [_table(plan)]
    count = len(plan.going)
    going = f"{count:,} {'directory' if count == 1 else 'directories'}, {size_text(nbytes)}"
    if not count:
        return Answer(Status.YES, told, [*shown, "nothing to remove"])
    if not given.yes:
        return Answer(Status.YES, told, [*shown, f"would remove {going}; nothing was changed: --yes removes"])
    remove(plan)
    return Answer(Status.YES, told, [*shown, f"removed {going}"])


def plan_prune(folder: Path, keep: int, check: Callable[[Path], object]) -> Plan:
    """Choose by reading: the newest checkpoints are checked, checksums and all, until `keep` valid ones are found.

    Older ones go if they are complete. Raises CheckpointError where none is valid, or where the folder is one node's own.
    """
    listed = list_published(folder)
    if not listed:
        raise nothing_in(folder)
    pieces = [entry for entry in listed if entry.state is State.PIECE]
    if pieces:
        raise CheckpointError(
            f"{pieces[0].path} is one node's piece of a checkpoint: which step is whole only all nodes together can tell (a start"
            " of the job does); remove old pieces by hand on all nodes, when a newer step was loaded"
        )
    kept: list[Listed] = []
    removed: list[Listed] = []
    left: list[Listed] = []
    for entry in listed:
        if entry.state is not State.COMPLETE:
            left.append(entry)
        elif len(kept) == keep:
            removed.append(entry)
        elif error := _problem(entry.path, check):
            left.append(Listed(entry.path, State.BROKEN, None, error))
        else:
            kept.append(entry)
    if not kept:
        raise CheckpointError(
            f"{folder} holds no valid checkpoint, so nothing is removed: {'; '.join(e.error for e in left)}"
        )
    unfinished = tuple(entry for entry in list_leftovers(folder) if PRUNED in entry.path.name)
    return Plan(folder, tuple(kept), tuple(removed), tuple(left), unfinished)


def _problem(path: Path, check: Callable[[Path], object]) -> str:
    try:
        check(path)
    except CheckpointError as error:
        return str(error)
    return ""


def remove(plan: Plan) -> None:
    """Remove what the plan says, oldest first. Raises OSError; what was renamed by then is gone for every search."""
    for half in plan.unfinished:
        _remove_tree(half.path)
    for entry in reversed(plan.removed):
        going = entry.path.with_name(f"{entry.path.name}{PRUNED}{uuid.uuid4().hex[:12]}")
        os.rename(entry.path, going)
        fsync_directory(plan.folder)  # a power cut must not bring the name back over files that are gone
        _remove_tree(going)


def _remove_tree(path: Path) -> None:
    while path.exists():
        with contextlib.suppress(FileNotFoundError):  # a start of the job may be cleaning the same away
            shutil.rmtree(path)


def _table(plan: Plan) -> Table:
    rows = [(entry, "[green]stays[/]", "valid, checksums compared") for entry in plan.kept]
    rows += [(entry, "[red]goes[/]", "older than those that stay") for entry in plan.removed]
    rows += [(entry, "[yellow]left alone[/]", escape(entry.error)) for entry in plan.left]
    table = Table(
        Column("step", justify="right"), Column("size", justify="right"), "what", Column("why", overflow="fold")
    )
    table.title, table.title_justify = escape(str(plan.folder)), "left"
    for entry, what, why in sorted(rows, key=lambda row: -row[0].step):
        table.add_row(str(entry.step), size_text(size_of(entry.path)), what, why)
    for leftover in plan.unfinished:
        table.add_row(
            "", size_text(leftover.nbytes), "[red]goes[/]", f"{escape(leftover.path.name)}: {leftover.meaning}"
        )
    return table
