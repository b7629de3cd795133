"""`ttp ckpt inspect`: all that a checkpoint says of itself, and which rank wrote what of it.

Owns what is shown of it; changes nothing on disk.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from ttp.checkpoint.cli.output import Answer, Status, invalid, time_text
from ttp.checkpoint.find import all_at, judged
from ttp.checkpoint.format.file_index import TensorEntry, read_contents
from ttp.checkpoint.format.manifest import Manifest, file_fields, read_manifest
from ttp.checkpoint.format.signature import SIGNATURE_NAME
from ttp.errors import CheckpointError, CorruptCheckpoint
from ttp.proto.messages import Cause, CommitRecord, FileEntry, ShareResult
from ttp.text.wording import ranks_text, size_text


def run(given: argparse.Namespace, console: Console) -> Answer:
    """Tell all that a checkpoint says of itself, and which rank wrote what of it."""
    try:
        path = all_at(given.path)[0]
        found = read_manifest(path)
    except CheckpointError as error:
        return invalid(given.path, str(error))
    written = _written(path, found)
    wrong = written.error or judged(path).error
    fields = {
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
        "signed": (path / SIGNATURE_NAME).exists(),
        "files": [file_fields(file) for file in found.files],
        "tensors": {
            key: {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "ranks": written.ranks(key),
            }
            for key, spec in sorted(found.tensors.items())
        },
        "error": wrong or None,
    }
    shown = [_summary(path, found), _writers(found, written), _files(found), _tensors(found, written)]
    if wrong:
        return Answer(Status.NO, fields, [*shown, f"[red]INVALID[/] {escape(wrong)}"])
    return Answer(Status.YES, fields, shown)


@dataclass(frozen=True, slots=True)
class _Written:
    """What the files' tables of contents say."""

    boxes: Mapping[str, Sequence[tuple[int, TensorEntry]]]
    """Of each tensor: (rank, box)."""
    plain_values: frozenset[int]
    """Ranks that wrote some."""
    error: str
    """What could not be read; empty: all was."""

    def ranks(self, key: str) -> list[int]:
        """Return who wrote a part of this tensor."""
        return sorted({rank for rank, _ in self.boxes.get(key, ())})


def _written(path: Path, found: Manifest) -> _Written:
    boxes: dict[str, list[tuple[int, TensorEntry]]] = {}
    plain_values = set()
    error = ""
    for file in found.files:
        if not file.name.endswith(".distcp") or (found.hosts and not (path / file.name).exists()):
            continue
        try:
            contents = read_contents(path, [ShareResult((file,))])
        except FileNotFoundError:
            error = error or f"{path / file.name} is missing; rank {file.rank} wrote it"
            continue
        except CorruptCheckpoint as corrupt:
            error = error or str(corrupt)
            continue
        for entry in contents.tensors:
            boxes.setdefault(entry.key, []).append((file.rank, entry))
        if contents.blobs:
            plain_values.add(file.rank)
    return _Written(boxes, frozenset(plain_values), error)


def _summary(path: Path, found: Manifest) -> Table:
    table = Table(title=escape(str(path)), title_justify="left", show_header=False)
    by_kind: dict[str, int] = {}
    for key, spec in found.tensors.items():
        kind = {"model": "weights", "optim": "optimizer state"}.get(key.partition(".")[0], "others")
        by_kind[kind] = by_kind.get(kind, 0) + math.prod(spec.shape)
    rows: list[tuple[str, object]] = [
        ("step", found.step),
        ("cause", _cause_text(found.cause)),
        (
            "written",
            f"{time_text(found.created_unix_s)} by torch {found.versions.get('torch')}, ttp {found.versions.get('ttp')}",
        ),
        ("staged", f"as {found.attempt}, term {found.term}"),
        *(_entry_rows("layout", found.layout) or [("layout", "-")]),
        *(_record_rows(found.record) if found.record is not None else [("commit record", "none survived")]),
        *(_entry_rows("host state", found.state) or [("host state", "-")]),
        ("tensors", f"{len(found.tensors):,}: {', '.join(f'{n:,} elements of {kind}' for kind, n in by_kind.items())}"),
        *([("nodes", ", ".join(sorted(set(found.hosts))) + " (each has its own ranks' files)")] if found.hosts else []),
        ("files", f"{len(found.files):,}, {size_text(found.nbytes)}"),
        ("signature", "verify --key checks it" if (path / SIGNATURE_NAME).exists() else "none"),
    ]
    for name, value in rows:
        table.add_row(name, escape(str(value)))
    return table


def _cause_text(cause: Cause) -> str:
    """`exited: signal SIGKILL (rank 2)`."""
    return f"{cause.kind.value}: {cause.text}" + (f" ({ranks_text(cause.ranks)})" if cause.ranks else "")


def _record_rows(record: CommitRecord) -> list[tuple[str, object]]:
    """The step's numbers; a norm of 0 was not taken, as in `barrier` mode."""
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
    fields = ", ".join(f"{key} {value}" for key, value in plain.items())
    return [(name, fields), *((f"  {key}", value) for key, value in below)]


def _writers(found: Manifest, written: _Written) -> Table:
    """A row a rank; a rank that wrote torch's metadata and the plain values published."""
    table = Table(Column("rank", justify="right"), "node", Column("files", justify="right"), Column("size", justify="right"),
                  Column("tensors", justify="right"), Column("elements", justify="right"), "wrote")  # fmt: skip
    files_of: dict[int, list[FileEntry]] = {}
    for file in found.files:
        files_of.setdefault(file.rank, []).append(file)
    boxes_of: dict[int, list[tuple[str, int]]] = {}
    for key, entries in written.boxes.items():
        for writer, entry in entries:
            boxes_of.setdefault(writer, []).append((key, math.prod(entry.sizes)))
    for rank, files in sorted(files_of.items()):
        boxes = boxes_of.get(rank, [])
        keys, elements = {key for key, _ in boxes}, sum(count for _, count in boxes)
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
        Column("file", overflow="fold"), Column("rank", justify="right"), Column("size", justify="right"), "checksum"
    )
    for file in found.files:
        table.add_row(escape(file.name), str(file.rank), size_text(file.nbytes), file.checksum[:25])
    return table


def _tensors(found: Manifest, written: _Written) -> Table:
    table = Table(Column("tensor", overflow="fold"), "dtype", "shape", "written by ranks")
    for key, spec in sorted(found.tensors.items()):
        ranks = ", ".join(map(str, written.ranks(key))) or "?"
        table.add_row(escape(key), spec.dtype, escape(str(list(spec.shape))), ranks)
    return table
