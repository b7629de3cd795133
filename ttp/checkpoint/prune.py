"""`ttp ckpt prune PATH ... --keep N`: the older checkpoints go, the N newest valid ones stay.

Owns the choice and the removal. Goes by what a restart would load: a checkpoint counts as kept when its checksums were compared,
so that the newest valid one always stays. What is not valid is never removed: somebody may want to look at it.

How one is removed: `removal.py`. Which pieces of nodes go: `prune_pieces.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Column, Table

from ttp.checkpoint.answer import Answer, Status, UsageError
from ttp.checkpoint.look import checked
from ttp.checkpoint.prune_pieces import PiecesPlan, plan_pieces, remove_pieces
from ttp.checkpoint.removal import LINKED, remove_tree, take_away
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
from ttp.wording import size_text


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
    """Show what would go and, with --yes, remove it. Raises UsageError, CheckpointError."""
    folders = list(
        dict.fromkeys(folder_at(path).resolve() for path in given.path)
    )  # one folder may come under two names
    if any(entry.state is State.PIECE for folder in folders for entry in list_published(folder)):
        return _run_pieces(folders, given, console)
    if len(folders) > 1:
        raise UsageError(
            f"{len(folders)} folders, and none has pieces of nodes with directories of their own: prune one after the other"
        )
    if given.partial:
        raise UsageError("--partial is about pieces of nodes with directories of their own: there is none here")
    (folder,) = folders
    plan = plan_prune(folder, given.keep, lambda path: checked(path, console))
    told = {
        "folder": str(folder),
        "kept": [str(entry.path) for entry in plan.kept],
        "left": [{"path": str(entry.path), "error": entry.error} for entry in plan.left],
    }
    return _answer(given, told, _table(plan), plan, lambda: remove(plan))


def _run_pieces(folders: Sequence[Path], given: argparse.Namespace, console: Console) -> Answer:
    with Progress(
        TextColumn("checking"), DownloadColumn(), TransferSpeedColumn(), console=console, transient=True,
        disable=not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task("checking", total=None)
        plan = plan_pieces(folders, given.keep, given.partial, lambda nbytes: bar.advance(task, nbytes))
    told = {
        "folders": [str(folder) for folder in folders],
        "kept": [str(path) for step in plan.kept for path in step.paths],
        "left": [
            *({"path": str(path), "error": step.missing} for step in plan.left for path in step.paths),
            *({"path": str(path), "error": error} for path, error in plan.broken),
        ],
    }
    return _answer(given, told, _pieces_table(plan), plan, lambda: remove_pieces(plan))


def _answer(
    given: argparse.Namespace,
    told: Mapping[str, object],
    table: Table,
    plan: Plan | PiecesPlan,
    act: Callable[[], None],
) -> Answer:
    nbytes, count = plan.nbytes, len(plan.going)
    going = {"removed" if given.yes else "would_remove": [str(path) for path in plan.going]}
    whole = {**told, **going, "bytes": nbytes}
    text = f"{count:,} {'directory' if count == 1 else 'directories'}, {size_text(nbytes)}"
    if not count:
        return Answer(Status.YES, whole, [table, "nothing to remove"])
    if not given.yes:
        return Answer(Status.YES, whole, [table, f"would remove {text}; nothing was changed: --yes removes"])
    act()
    return Answer(Status.YES, whole, [table, f"removed {text}"])


def plan_prune(folder: Path, keep: int, check: Callable[[Path], object]) -> Plan:
    """Choose by reading: the newest checkpoints are checked, checksums and all, until `keep` valid ones are found.

    Older ones go if they are complete; where none of those kept has a finite state, the newest that has one stays as well. Raises
    CheckpointError where none is valid.
    """
    listed = list_published(folder)
    if not listed:
        raise nothing_in(folder)
    kept: list[Listed] = []
    removed: list[Listed] = []
    left: list[Listed] = []
    for entry in listed:
        goes = len(kept) >= keep and (any(map(_may_be_finite, kept)) or not _may_be_finite(entry))
        if entry.state is not State.COMPLETE:
            left.append(entry)
        elif goes and entry.path.is_symlink():
            left.append(replace(entry, error=LINKED))
        elif goes:
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


def _may_be_finite(entry: Listed) -> bool:
    """False where the manifest says that the state holds NaN or infinity."""
    return entry.manifest is not None and entry.manifest.finite is not False


def _problem(path: Path, check: Callable[[Path], object]) -> str:
    try:
        check(path)
    except CheckpointError as error:
        return str(error)
    return ""


def remove(plan: Plan) -> None:
    """Remove what the plan says, oldest first. Raises OSError; what was renamed by then is gone for every search."""
    for half in plan.unfinished:
        remove_tree(half.path)
    for entry in reversed(plan.removed):
        take_away(entry.path, entry.step)


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


def _pieces_table(plan: PiecesPlan) -> Table:
    rows = [(step, "[green]stays[/]", "whole, checksums compared") for step in plan.kept]
    rows += [(step, "[red]goes[/]", "older than those that stay") for step in plan.removed]
    rows += [(step, "[yellow]left alone[/]", f"not whole here: {escape(step.missing)}") for step in plan.left]
    table = Table(
        Column("step", justify="right"), Column("pieces", justify="right"), Column("size", justify="right"), "what",
        Column("why", overflow="fold"),
    )  # fmt: skip
    for step, what, why in sorted(rows, key=lambda row: -row[0].step):
        table.add_row(str(step.step), str(len(step.paths)), size_text(sum(map(size_of, step.paths))), what, why)
    for path, error in plan.broken:
        table.add_row("", "1", size_text(size_of(path)), "[yellow]left alone[/]", escape(error))
    for leftover in plan.unfinished:
        table.add_row(
            "", "1", size_text(leftover.nbytes), "[red]goes[/]", f"{escape(leftover.path.name)}: {leftover.meaning}"
        )
    return table
