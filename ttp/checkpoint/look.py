"""`ttp ckpt list`, `inspect` and `verify`: what is there, what a checkpoint says of itself, and whether it is true.

Owns what is shown of it; changes nothing on disk.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Column, Table

from ttp.checkpoint import verify as checks
from ttp.checkpoint.answer import Answer, Status, told_by_system
from ttp.checkpoint.contents import TensorEntry, read_contents
from ttp.checkpoint.durable import read_tracker
from ttp.checkpoint.manifest import Manifest, read_manifest
from ttp.checkpoint.survey import (
    Leftover,
    Listed,
    State,
    all_at,
    folder_at,
    is_checkpoint,
    judged,
    list_leftovers,
    list_published,
    newest_at,
    nothing_in,
)
from ttp.errors import CheckpointError, CorruptCheckpoint
from ttp.proto.messages import Cause, CauseKind, CommitRecord, ShareResult
from ttp.wording import counted, ranks_text, size_text

_FINITE = {True: "yes", False: "[red]no[/]", None: "unknown"}
_COLOURS = {State.COMPLETE: "green", State.PIECE: "green", State.BROKEN: "red", State.UNREADABLE: "yellow"}


def list_folder(given: argparse.Namespace, console: Console) -> Answer:
    """Tell each checkpoint of a folder, newest first, and what else takes room there."""
    folder = folder_at(given.path)
    listed, leftovers, tracker = list_published(folder), list_leftovers(folder), read_tracker(folder)
    told = {
        "folder": str(folder),
        "checkpoints": [_listed_fields(entry) for entry in listed],
        "tracker": tracker,
        "leftovers": [{"path": str(e.path), "meaning": e.meaning, "bytes": e.nbytes} for e in leftovers],
    }
    if not listed:
        error = str(nothing_in(folder))
        return Answer(Status.NO, {**told, "error": error}, [f"[red]{escape(error)}[/]", *_leftover_tables(leftovers)])
    table = Table(Column("step", justify="right"), "cause", "ranks lost", Column("size", justify="right"), "written",
                  "finite", Column("state", overflow="fold"), title=escape(str(folder)), title_justify="left")  # fmt: skip
    for entry in listed:
        table.add_row(*_listed_row(entry))
    shown: list[RenderableType] = [table, *_leftover_tables(leftovers)]
    shown.append(f"tracker: {'none' if tracker is None else f'step {tracker}'}")
    if newest := _newest_finite(listed):
        shown.append(newest)
    states = {entry.state for entry in listed}
    if states & {State.COMPLETE, State.PIECE}:
        shown.append("complete: names, sizes and completeness were checked; `verify` compares the checksums, too")
    if State.UNREADABLE in states:
        return Answer(Status.FAILED, told, shown)
    return Answer(Status.NO if State.BROKEN in states else Status.YES, told, shown)


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
        "bytes": entry.manifest.nbytes,
        "written_unix_s": entry.manifest.created_unix_s,
        "finite": entry.manifest.finite,
    }


def _listed_row(entry: Listed) -> tuple[str, ...]:
    state = f"[{_COLOURS[entry.state]}]{entry.state.value}[/]"
    found = entry.manifest
    if found is None:
        return str(entry.step), "", "", "", "", "", f"{state}: {escape(entry.error)}"
    left = found.cause.kind is CauseKind.PREEMPTED  # when all was saved, and told to
    lost = "-" if left else ", ".join(map(str, found.cause.ranks)) or "-"
    return (
        str(entry.step),
        found.cause.kind.value,
        lost,
        size_text(found.nbytes),
        _when(found),
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


def inspect(given: argparse.Namespace, console: Console) -> Answer:
    """Tell all that a checkpoint says of itself, and which rank wrote what of it."""
    try:
        path = newest_at(given.path)
        found = read_manifest(path)
    except CheckpointError as error:
        return _invalid(given.path, str(error))
    written = _written(path, found)
    trouble = written.trouble or judged(path).error
    told = {
        "path": str(path),
        "step": found.step,
        "cause": {"kind": found.cause.kind.value, "ranks": list(found.cause.ranks), "text": found.cause.text},
        "written_unix_s": found.created_unix_s,
        "versions": dict(found.versions),
        "format_version": found.format_version,
        "attempt": found.attempt,
        "term": found.term,
        "start": found.start,
        "finite": found.finite,
        "hosts": list(found.hosts),
        "layout": found.layout,
        "record": None if found.record is None else dataclasses.asdict(found.record),
        "state": found.state,
        "bytes": found.nbytes,
        "files": [dataclasses.asdict(file) for file in found.files],
        "tensors": {
            key: {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "ranks": written.ranks(key),
            }
            for key, spec in sorted(found.tensors.items())
        },
        "error": trouble or None,
    }
    shown = [_summary(path, found), _writers(found, written), _files(found), _tensors(found, written)]
    if trouble:
        return Answer(Status.NO, told, [*shown, f"[red]INVALID[/] {escape(trouble)}"])
    return Answer(Status.YES, told, shown)


@dataclass(frozen=True, slots=True)
class _Written:
    """What the files' tables of contents say."""

    boxes: Mapping[str, Sequence[tuple[int, TensorEntry]]]
    """Of each tensor: (rank, box)."""
    plain_values: frozenset[int]
    """Ranks that wrote some."""
    trouble: str
    """What could not be read; empty: all was."""

    def ranks(self, key: str) -> list[int]:
        """Return who wrote a part of this tensor."""
        return sorted({rank for rank, _ in self.boxes.get(key, ())})


def _written(path: Path, found: Manifest) -> _Written:
    boxes: dict[str, list[tuple[int, TensorEntry]]] = {}
    plain_values = set()
    trouble = ""
    for file in found.files:
        if not file.name.endswith(".distcp") or (found.hosts and not (path / file.name).exists()):
            continue
        try:
            contents = read_contents(path, [ShareResult((file,))])
        except FileNotFoundError:
            trouble = trouble or f"{path / file.name} is missing; rank {file.rank} wrote it"
            continue
        except CorruptCheckpoint as error:
            trouble = trouble or str(error)
            continue
        for entry in contents.tensors:
            boxes.setdefault(entry.key, []).append((file.rank, entry))
        if contents.blobs:
            plain_values.add(file.rank)
    return _Written(boxes, frozenset(plain_values), trouble)


def _summary(path: Path, found: Manifest) -> Table:
    table = Table(title=escape(str(path)), title_justify="left", show_header=False)
    by_kind: dict[str, int] = {}
    for key, spec in found.tensors.items():
        kind = {"model": "weights", "optim": "optimizer state"}.get(key.partition(".")[0], "others")
        by_kind[kind] = by_kind.get(kind, 0) + math.prod(spec.shape)
    rows: list[tuple[str, object]] = [
        ("step", found.step),
        ("cause", _cause_text(found.cause)),
        ("written", f"{_when(found)} by torch {found.versions.get('torch')}, ttp {found.versions.get('ttp')}"),
        ("attempt", f"{found.attempt}, term {found.term}"),
        *(_entry_rows("layout", found.layout) or [("layout", "-")]),
        *(_record_rows(found.record) if found.record is not None else [("commit record", "none survived")]),
        *(_entry_rows("host state", found.state) or [("host state", "-")]),
        ("tensors", f"{len(found.tensors):,}: {', '.join(f'{n:,} elements of {kind}' for kind, n in by_kind.items())}"),
        *([("nodes", ", ".join(sorted(set(found.hosts))) + " (each has its own ranks' files)")] if found.hosts else []),
        ("files", f"{len(found.files):,}, {size_text(found.nbytes)}"),
    ]
    for name, value in rows:
        table.add_row(name, escape(str(value)))
    return table


def _cause_text(cause: Cause) -> str:
    """`exited: signal SIGKILL (rank 2)`."""
    return f"{cause.kind.value}: {cause.text}" + (f" ({ranks_text(cause.ranks)})" if cause.ranks else "")


def _record_rows(record: CommitRecord) -> list[tuple[str, object]]:
    """The step's numbers; nobody has taken a norm that is 0, which is so in `barrier` mode."""
    clipped = f", clipped by the factor {record.clip_factor:.6g}" if record.clip_factor != 1 else ""
    rows: list[tuple[str, object]] = [
        (
            "commit record",
            f"of step {record.step}{', a skipped step: its gradients overflowed' if record.skipped else ''}",
        ),
        ("  grad norm", f"{record.grad_norm:.6g}{clipped}" if record.grad_norm else "not taken"),
        ("  loss scale", f"{record.loss_scale:g}"),
        ("  learning rates", ", ".join(f"{rate:.6g}" for rate in record.learning_rates)),
    ]
    if record.sums:
        sums = ", ".join(f"{value:.6g}" for value in record.sums)
        rows.append(("  sums over ranks", f"{sums} (what optimizer.step(sums=...) was given: the loss, as a rule)"))
    return rows


def _entry_rows(name: str, entries: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Return a row of the plain entries, and below it those of each that has entries of its own, or is a list of such; none of nothing."""
    plain: dict[str, Any] = {}
    below: list[tuple[str, object]] = []
    for key, value in entries.items():
        if isinstance(value, Mapping):
            below += _entry_rows(key, value)
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            below += [row for number, item in enumerate(value) for row in _entry_rows(f"{key} {number}", item)]
        else:
            plain[key] = value
    if not plain and not below:
        return []
    told = ", ".join(f"{key} {value}" for key, value in plain.items())
    return [(name, told), *((f"  {key}", value) for key, value in below)]


def _writers(found: Manifest, written: _Written) -> Table:
    """A row a rank; a rank that wrote torch's metadata and the plain values published."""
    table = Table(Column("rank", justify="right"), "node", Column("files", justify="right"), Column("size", justify="right"),
                  Column("tensors", justify="right"), Column("elements", justify="right"), "wrote")  # fmt: skip
    boxes = [(rank, key, entry) for key, entries in written.boxes.items() for rank, entry in entries]
    for rank in sorted({file.rank for file in found.files}):
        files = [file for file in found.files if file.rank == rank]
        keys = {key for writer, key, _ in boxes if writer == rank}
        elements = sum(math.prod(entry.sizes) for writer, _, entry in boxes if writer == rank)
        heads = {key.partition(".")[0] for key in keys}
        parts = [name for head, name in (("model", "weights"), ("optim", "optimizer state")) if head in heads]
        parts += ["others"] if heads - {"model", "optim"} else []
        parts += ["plain values"] if rank in written.plain_values else []
        parts += ["metadata"] if any(file.name == ".metadata" for file in files) else []
        node = found.hosts[rank] if rank < len(found.hosts) else "-"
        table.add_row(str(rank), escape(node), str(len(files)), size_text(sum(file.nbytes for file in files)),
                      f"{len(keys):,}", f"{elements:,}", ", ".join(parts) or "?")  # fmt: skip
    return table


def _files(found: Manifest) -> Table:
    table = Table(
        Column("file", overflow="fold"), Column("rank", justify="right"), Column("size", justify="right"), "sha256"
    )
    for file in found.files:
        table.add_row(escape(file.name), str(file.rank), size_text(file.nbytes), file.sha256[:16])
    return table


def _tensors(found: Manifest, written: _Written) -> Table:
    table = Table(Column("tensor", overflow="fold"), "dtype", "shape", "written by ranks")
    for key, spec in sorted(found.tensors.items()):
        ranks = ", ".join(map(str, written.ranks(key))) or "?"
        table.add_row(escape(key), spec.dtype, escape(str(list(spec.shape))), ranks)
    return table


def verify(given: argparse.Namespace, console: Console) -> Answer:
    """Check a checkpoint, or all of a folder, with their checksums unless --shallow says otherwise."""
    deep = not given.shallow
    try:
        paths = all_at(given.path)
    except CheckpointError as error:
        return _invalid(given.path, str(error))
    if is_checkpoint(given.path):
        return _verified(given.path, console, "checking", deep=deep)
    answers = [
        _verified(path, console, f"checking {path.name}, {number} of {len(paths)}", deep=deep)
        for number, path in enumerate(paths, 1)
    ]
    status = max(answer.status for answer in answers)
    told = {"folder": str(paths[0].parent), "valid": not status, "checkpoints": [answer.told for answer in answers]}
    if errors := [answer.told["error"] for answer in answers if answer.status]:
        told["error"] = errors[0]
    statuses = [answer.status for answer in answers]
    bad = [(statuses.count(Status.NO), "broken"), (statuses.count(Status.FAILED), "unreadable")]
    outcome = ", ".join(f"{count:,} {what}" for count, what in bad if count) or "none is broken"
    shown = [item for answer in answers for item in answer.shown]
    return Answer(status, told, [*shown, f"{counted(len(answers), 'checkpoint')} checked: {outcome}"])


def _verified(path: Path, console: Console, doing: str, *, deep: bool) -> Answer:
    try:
        found = checked(path, console, doing, deep=deep)
    except CheckpointError as error:
        return _invalid(path, str(error))
    except OSError as error:
        text = told_by_system(error)
        return Answer(Status.FAILED, {"path": str(path), "error": text}, [f"[yellow]UNREADABLE[/] {escape(text)}"])
    here = checks.files_here(path, found) if found.hosts else found.files
    what = "checksums, sizes and completeness" if deep else "names, sizes and completeness, not the checksums"
    told = {
        "path": str(path),
        "valid": True,
        "checked": what,
        "step": found.step,
        "files": len(here),
        "bytes": sum(file.nbytes for file in here),
        "piece_of_nodes": len(set(found.hosts)),
    }
    if found.hosts:
        nodes = len(set(found.hosts))
        text = (
            f"{'[green]VALID[/]' if deep else '[yellow]WELL-FORMED[/]'} {escape(str(path))}: step {found.step}, one node's"
            f" piece: {len(here)} of {len(found.files)} files are here, {size_text(sum(file.nbytes for file in here))} of"
            f" {size_text(found.nbytes)}; {nodes} nodes wrote it"
        )
    else:
        text = (
            f"{'[green]VALID[/]' if deep else '[yellow]COMPLETE[/]'} {escape(str(path))}: step {found.step},"
            f" {counted(len(found.files), 'file')}, {size_text(found.nbytes)} (checked: {what})"
        )
    return Answer(Status.YES, told, [text])


def checked(path: Path, console: Console, doing: str = "checking", *, deep: bool = True) -> Manifest:
    """Verify a checkpoint with a progress bar on a terminal; return its manifest. Raises as `verify.verify` does."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(doing, total=None)
        return checks.verify(
            path, deep=deep, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )


def _invalid(path: Path, text: str) -> Answer:
    return Answer(Status.NO, {"path": str(path), "valid": False, "error": text}, [f"[red]INVALID[/] {escape(text)}"])


def _when(found: Manifest) -> str:
    return datetime.datetime.fromtimestamp(found.created_unix_s).astimezone().isoformat(" ", "seconds")
