"""`ttp ckpt verify`: check that a checkpoint, or all of a folder, is as it was written.

Owns what is shown of it, and the progress bar of a check for the other commands; changes nothing on disk.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from ttp.checkpoint import find
from ttp.checkpoint import verify as checks
from ttp.checkpoint.cli.output import Answer, Status, UsageError, invalid, system_error_text
from ttp.checkpoint.format.manifest import Manifest
from ttp.checkpoint.format.signature import VerifyKey, key_of_environment, read_verify_key
from ttp.checkpoint.reader import Reader
from ttp.errors import CheckpointError, ConfigError
from ttp.mirror import view
from ttp.text.wording import counted, size_text


def run(given: argparse.Namespace, console: Console) -> Answer:
    """Check a checkpoint, or all of a folder, with their checksums unless --shallow says otherwise."""
    deep, key = not given.shallow, key_given(given)
    try:
        paths = find.all_at(given.path)
    except CheckpointError as error:
        return invalid(given.path, str(error))
    if find.is_checkpoint(given.path):
        return _verified(given.path, console, "checking", deep=deep, key=key)
    answers = [
        _verified(path, console, f"checking {path.name}, {number} of {len(paths)}", deep=deep, key=key)
        for number, path in enumerate(paths, 1)
    ]
    answers = still_there(answers)
    status = max(answer.status for answer in answers)
    fields = {"folder": str(paths[0].parent), "valid": not status, "checkpoints": [answer.fields for answer in answers]}
    if errors := [answer.fields["error"] for answer in answers if answer.status]:
        fields["error"] = errors[0]
    statuses = [answer.status for answer in answers]
    bad = [(statuses.count(Status.NO), "broken"), (statuses.count(Status.FAILED), "unreadable")]
    outcome = ", ".join(f"{count:,} {what}" for count, what in bad if count) or "none is broken"
    if removed := len(paths) - len(answers):
        outcome += f"; {removed:,} removed meanwhile"
    shown = [item for answer in answers for item in answer.shown]
    return Answer(status, fields, [*shown, f"{counted(len(answers), 'checkpoint')} checked: {outcome}"])


def still_there(answers: Sequence[Answer]) -> list[Answer]:
    """Leave out what the job has removed while it was looked at: it is not broken. Raises CheckpointError: nothing is there any more."""
    found = [answer for answer in answers if not answer.status or not find.is_gone(Path(answer.fields["path"]))]
    if not found:
        raise CheckpointError(f"{answers[0].fields['path']} was removed while it was checked. Start the command again")
    return found


def _verified(path: Path, console: Console, doing: str, *, deep: bool, key: VerifyKey | None) -> Answer:
    try:
        found = checked(path, console, doing, deep=deep, key=key)
    except CheckpointError as error:
        return invalid(path, str(error))
    except OSError as error:
        text = system_error_text(error)
        return Answer(Status.FAILED, {"path": str(path), "error": text}, [f"[yellow]UNREADABLE[/] {escape(text)}"])
    here = checks.files_here(path, found) if found.hosts else found.files
    sums = "checksums" if key is None else "SHA-256"
    what = f"{sums}, sizes and completeness" if deep else f"names, sizes and completeness, not the {sums}"
    what = what if key is None else f"signature, {what}"
    fields = {
        "path": str(path),
        "valid": True,
        "checked": what,
        "step": found.step,
        "files": len(here),
        "bytes": sum(file.nbytes for file in here),
        "part_of_nodes": len(set(found.hosts)),
    }
    if found.hosts:
        nodes = len(set(found.hosts))
        text = (
            f"{'[green]VALID[/]' if deep else '[yellow]WELL-FORMED[/]'} {escape(str(path))}: step {found.step}, one node's"
            f" part: {len(here)} of {len(found.files)} files are here, {size_text(sum(file.nbytes for file in here))} of"
            f" {size_text(found.nbytes)}; {nodes} nodes wrote it"
        )
    else:
        text = (
            f"{'[green]VALID[/]' if deep else '[yellow]COMPLETE[/]'} {escape(str(path))}: step {found.step},"
            f" {counted(len(found.files), 'file')}, {size_text(found.nbytes)} (checked: {what})"
        )
    return Answer(Status.YES, fields, [text])


def checked(
    path: Path, console: Console, doing: str = "checking", *, deep: bool = True, key: VerifyKey | None = None
) -> Manifest:
    """Verify a checkpoint with a progress bar on a terminal; return its manifest. Raises as `verify.verify` does."""
    with progress_of(console, doing) as progress:
        manifest = checks.verify(path, deep=deep and not view.is_view(path), progress=progress, key=key)
        if deep:
            view.check_sums(path, progress, key)
        return manifest


@contextlib.contextmanager
def progress_of(console: Console, doing: str) -> Iterator[checks.Progress]:
    """Give what shows how far a check is, on a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def key_given(given: argparse.Namespace) -> VerifyKey | None:
    """Return the public key of --key, or that of TTP_VERIFY_KEY; None: neither is there. Raises UsageError."""
    try:
        return key_of_environment() if given.key is None else read_verify_key(given.key, "--key")
    except ConfigError as error:
        raise UsageError(str(error)) from None


def open_given(path: Path, console: Console, *, deep: bool = True, key: VerifyKey | None = None) -> Reader:
    """Open the checkpoint at `path`, or the newest valid one of the folder `path`, with a progress bar; print what is skipped.

    deep: compare checksums. key: who must have signed it. Raises CheckpointError when none is valid, or for a node's part without those of the others.
    """
    return find.open_at(
        path,
        lambda each: checked(each, console, deep=deep, key=key),
        lambda skipped, reason: console.print(f"skipped: {reason}", markup=False),
    )
