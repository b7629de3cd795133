"""Looking at checkpoints from a terminal: `python -m ttp.checkpoint PATH {list,inspect,verify}`.

Owns what is shown and the exit status; changes nothing on disk. PATH is a checkpoint (`.../iter_0000042`) or a directory of
them; `inspect` and `verify` take the newest checkpoint of a directory.

    0  valid; with --shallow: complete, the checksums unknown (list: at least one checkpoint is there and every one listed is well-formed)
    1  something is broken, or nothing is there
    2  wrong usage: no such path, unknown command
"""

from __future__ import annotations

import argparse
import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Column, Table

from ttp.checkpoint.durable import read_tracker, step_of_directory
from ttp.checkpoint.load import list_checkpoints, read_manifest, verify
from ttp.checkpoint.manifest import Manifest
from ttp.checkpoint.verify import files_here
from ttp.console import open_console
from ttp.errors import CheckpointError

VALID, INVALID, USAGE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Listed:
    """One line of `list`: `manifest` or, if it is broken, `error`."""

    path: Path
    manifest: Manifest | None
    error: str


def inspect(directory: Path) -> list[Listed]:
    """Return what every published checkpoint of a directory says of itself, newest first, after the cheap checks."""
    listed = []
    for path in list_checkpoints([directory]):
        try:
            listed.append(Listed(path, verify(path, deep=False), ""))
        except (CheckpointError, OSError) as error:
            listed.append(Listed(path, None, str(error)))
    return listed


def main(argv: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Run the command line; return the exit status. argparse itself exits with 2."""
    parser = argparse.ArgumentParser(
        prog="python -m ttp.checkpoint",
        description="Look at checkpoints. Exit status: 0 valid, 1 broken or missing, 2 wrong usage.",
    )
    parser.add_argument("path", type=Path, help="a checkpoint (iter_0000042) or a directory of checkpoints")
    parser.add_argument("command", choices=["list", "inspect", "verify"])
    parser.add_argument(
        "--shallow", action="store_true", help="verify: names, sizes and completeness only, no checksums"
    )
    arguments = parser.parse_args(argv)
    console = console or open_console(soft_wrap=False)
    path: Path = arguments.path
    if not path.is_dir():
        console.print(f"[red]{escape(str(path))} is not a directory[/]: name a checkpoint or a directory of them")
        return USAGE
    if arguments.command == "list":
        return _list(path, console)
    chosen = _one(path)
    if chosen is None:
        console.print(f"[red]no checkpoint[/] in {escape(str(path))} (wanted directories like iter_0000042)")
        return INVALID
    try:
        if arguments.command == "inspect":
            _print_manifest(chosen, read_manifest(chosen), console)
        else:
            _verify(chosen, not arguments.shallow, console)
    except (CheckpointError, OSError) as error:
        console.print(f"[red]INVALID[/] {escape(str(error))}")
        return INVALID
    return VALID


def _one(path: Path) -> Path | None:
    if step_of_directory(path.absolute()) is not None or (path / "manifest.json").exists():
        return path
    return next(iter(list_checkpoints([path])), None)


def _list(path: Path, console: Console) -> int:
    root = path.absolute().parent if step_of_directory(path.absolute()) is not None else path
    listed = inspect(root)
    table = Table(title=str(root), title_justify="left")
    for name in ("step", "cause", "ranks lost", "size", "written", "state"):
        table.add_column(name, justify="right" if name in ("step", "size") else "left", overflow="fold")
    for entry in listed:
        step, found = str(step_of_directory(entry.path)), entry.manifest
        if found is None:
            table.add_row(step, "", "", "", "", f"[red]broken[/]: {escape(entry.error)}")
            continue
        lost = ", ".join(map(str, found.cause.ranks)) or "-"
        size, state = size_text(found.nbytes), _state(found)
        table.add_row(step, found.cause.kind.value, lost, size, _when(found), state)
    console.print(table)
    tracker = read_tracker(root)
    console.print(f"tracker: {'none' if tracker is None else f'step {tracker}'}")
    if any(entry.manifest for entry in listed):
        console.print("complete: names, sizes and completeness were checked; `verify` compares the checksums, too")
    return VALID if listed and all(entry.manifest for entry in listed) else INVALID


def _print_manifest(path: Path, found: Manifest, console: Console) -> None:
    table = Table(title=str(path), title_justify="left", show_header=False)
    rows: list[tuple[str, object]] = [
        ("step", found.step),
        ("cause", f"{found.cause.kind.value}: {found.cause.text} (ranks {list(found.cause.ranks)})"),
        ("written", f"{_when(found)} by torch {found.versions.get('torch')}, ttp {found.versions.get('ttp')}"),
        ("attempt", f"{found.attempt}, term {found.term}"),
        ("layout", found.layout),
        ("commit record", found.record or "none survived"),
        ("host state", found.state),
        ("tensors", f"{len(found.tensors)}, {sum(math.prod(t.shape) for t in found.tensors.values()):,} elements"),
        *([("nodes", ", ".join(sorted(set(found.hosts))) + " (each has its own ranks' files)")] if found.hosts else []),
        ("files", f"{len(found.files)}, {size_text(found.nbytes)}"),
    ]
    for name, value in rows:
        table.add_row(name, escape(str(value)))
    console.print(table)
    files = Table(Column("file", overflow="fold"), "rank", "size", "sha256")
    for file in found.files:
        files.add_row(file.name, str(file.rank), size_text(file.nbytes), file.sha256[:16])
    console.print(files)
    tensors = Table(Column("tensor", overflow="fold"), "dtype", "shape")
    for key, spec in sorted(found.tensors.items()):
        tensors.add_row(escape(key), spec.dtype, str(list(spec.shape)))
    console.print(tensors)


def _verify(path: Path, deep: bool, console: Console) -> None:
    columns = (TextColumn("checking"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("checking", total=None)
        found = verify(path, deep=deep, progress=lambda done, total: bar.update(task, completed=done, total=total))
    if found.hosts:
        here = files_here(path, found)
        nodes = len(set(found.hosts))
        console.print(
            f"{'[green]VALID[/]' if deep else '[yellow]WELL-FORMED[/]'} {escape(str(path))}: step {found.step}, one node's piece:"
            f" {len(here)} of {len(found.files)} files are here, {size_text(sum(file.nbytes for file in here))} of"
            f" {size_text(found.nbytes)}; {nodes} nodes wrote it"
        )
        return
    verdict = "[green]VALID[/]" if deep else "[yellow]COMPLETE[/]"
    what = "checksums, sizes and completeness" if deep else "names, sizes and completeness, not the checksums"
    console.print(
        f"{verdict} {escape(str(path))}: step {found.step}, {len(found.files)} files, {size_text(found.nbytes)} "
        f"(checked: {what})"
    )


def _state(found: Manifest) -> str:
    return f"[green]{'piece of a node' if found.hosts else 'complete'}[/], sums not checked"


def size_text(nbytes: float) -> str:
    """`12.3 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def _when(found: Manifest) -> str:
    return datetime.datetime.fromtimestamp(found.created_unix_s).astimezone().isoformat(" ", "seconds")
