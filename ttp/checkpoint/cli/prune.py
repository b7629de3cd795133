"""`ttp ckpt prune PATH ... --keep N`: remove the older checkpoints; the N newest valid ones stay.

Owns what is shown of it. What goes: `ttp.checkpoint.prune`, and `node_local.prune` for parts of nodes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Column, Table

from ttp.checkpoint import prune
from ttp.checkpoint.cli.output import Answer, Status, UsageError
from ttp.checkpoint.cli.verify import checked, key_given
from ttp.checkpoint.find import State, folder_at, list_published, size_of
from ttp.checkpoint.format.signature import SIGNATURE_NAME
from ttp.checkpoint.node_local import prune as node_local
from ttp.checkpoint.passed_over import read_notes
from ttp.errors import CheckpointError
from ttp.text.wording import size_text


def run(given: argparse.Namespace, console: Console) -> Answer:
    """Show what would go and, with --yes, remove it. Raises UsageError, CheckpointError."""
    folders = list(
        dict.fromkeys(folder_at(path).resolve() for path in given.path)
    )  # one folder may come under two names
    parts = any(entry.state is State.PART for folder in folders for entry in list_published(folder))
    plan = _plan_parts(folders, given, console) if parts else _plan_whole(folders, given, console)
    _check_unsigned(plan)
    where = {"folders": [str(folder) for folder in folders]} if parts else {"folder": str(folders[0])}
    fields = {
        **where,
        "kept": [str(path) for step in plan.kept for path in step.paths],
        "left": [{"path": str(path), "error": step.error} for step in plan.left for path in step.paths],
        "removed" if given.yes else "would_remove": [str(path) for path in plan.going],
        "bytes": plan.nbytes,
    }
    table, count = _table(plan, parts=parts), len(plan.going)
    text = f"{count:,} {'directory' if count == 1 else 'directories'}, {size_text(plan.nbytes)}"
    if not count:
        return Answer(Status.YES, fields, [table, "nothing to remove"])
    if not given.yes:
        return Answer(Status.YES, fields, [table, f"would remove {text}; nothing was changed: --yes removes"])
    prune.remove(plan)
    return Answer(Status.YES, fields, [table, f"removed {text}"])


def _plan_whole(folders: list[Path], given: argparse.Namespace, console: Console) -> prune.Plan:
    if len(folders) > 1:
        raise UsageError(
            f"{len(folders)} folders, and none has parts of nodes with directories of their own: prune one after the other"
        )
    if given.partial:
        raise UsageError("--partial is about parts of nodes with directories of their own: there is none here")
    key = key_given(given)
    return prune.plan_prune(folders[0], given.keep, lambda path: checked(path, console, key=key), read_notes(folders))


def _plan_parts(folders: list[Path], given: argparse.Namespace, console: Console) -> prune.Plan:
    columns = (TextColumn("checking"), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("checking", total=None)
        return node_local.plan_prune(
            folders,
            given.keep,
            given.partial,
            lambda nbytes: bar.advance(task, nbytes),
            key_given(given),
            read_notes(folders),
        )


def _check_unsigned(plan: prune.Plan) -> None:
    """Raise CheckpointError where signed checkpoints go and only unsigned ones stay: a job with a key resumes from the signed ones alone."""
    going = [path for step in plan.removed for path in step.paths if (path / SIGNATURE_NAME).exists()]
    if going and not any((path / SIGNATURE_NAME).exists() for step in plan.kept for path in step.paths):
        raise CheckpointError(
            f"{going[0]} is signed and would go, and what would stay is not signed: a job with TTP_VERIFY_KEY cannot resume from that. Give"
            " --key (or TTP_VERIFY_KEY), or remove the signed ones by hand"
        )


def _table(plan: prune.Plan, *, parts: bool) -> Table:
    whole = "whole" if parts else "valid"
    rows = [(step, "[green]stays[/]", f"{whole}, checksums compared") for step in plan.kept]
    rows += [(step, "[red]goes[/]", "older than those that stay") for step in plan.removed]
    rows += [(step, "[yellow]left alone[/]", escape(step.error)) for step in plan.left]
    table = Table(
        Column("step", justify="right"), Column("size", justify="right"), "what", Column("why", overflow="fold")
    )
    table.title, table.title_justify = escape(", ".join(map(str, plan.folders))), "left"
    for step, what, reason in sorted(rows, key=lambda row: -row[0].step):
        count = f" in {len(step.paths)} parts" if len(step.paths) > 1 else ""
        table.add_row(
            str(step.step) if step.step else "", size_text(sum(map(size_of, step.paths))) + count, what, reason
        )
    for leftover in plan.unfinished:
        name = escape(leftover.path.name)
        table.add_row("", size_text(leftover.nbytes), "[red]goes[/]", f"{name}: {leftover.meaning}")
    return table
