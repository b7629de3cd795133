"""Checkpoints whose files lie on several nodes, each with directories of its own: a node publishes its *piece*.

A piece is a directory `iter_0000042` with the files that this node's ranks wrote and a manifest that lists the files of
all nodes, with each one's host, size and checksum. A step counts as published when every file that a manifest lists is
found among the nodes. `gather.py` finds out, and makes pieces loadable.

Owns the publishing of one piece. A publisher never removes what is published: a piece of the same step from an earlier attempt
is renamed (`iter_0000042_superseded_1`), is found there all the same, and an attempt of a lower term gives way to it. Such
pieces go when a newer step has been loaded by all ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import ttp
from ttp.checkpoint.contents import read_contents, wrong_files
from ttp.checkpoint.durable import (
    advance_tracker,
    fsync_directory,
    step_directory_name,
    step_of_directory,
    steps_in,
)
from ttp.checkpoint.manifest import Manifest, TensorSpec, read_manifest, to_bytes, write_manifest
from ttp.checkpoint.publish import PUBLISH_TRIES
from ttp.checkpoint.share import write_share
from ttp.checkpoint.staging import check_files, check_name, claim_of, names_of_attempt
from ttp.errors import CheckpointError, CorruptCheckpoint, NotWritable
from ttp.proto.messages import Cause, CommitRecord, FileEntry, ShareResult

logger = logging.getLogger(__name__)

SUPERSEDED = "_superseded_"
_ASIDE = re.compile(rf"(iter_[0-9]{{7,}}){SUPERSEDED}[0-9]+")


def publish_piece(
    directory: str | os.PathLike[str],
    tmp_name: str,
    *,
    step: int,
    results: Sequence[ShareResult],
    hosts: Sequence[str],
    cause: Cause,
    record: CommitRecord | None,
    state: Mapping[str, Any],
    layout: Mapping[str, Any],
    blobs: Mapping[str, object],
    rank: int,
    start: int,
    term: int,
    advance: Callable[[int], None] = lambda count: None,
) -> str:
    """Make what this rank's node has of the attempt `tmp_name` its piece of the checkpoint of `step`; return its path.

    results: of the ranks of all nodes; hosts: every rank's node; start: this start's number, `term` its controller's;
    advance: told that the work gets on. Called by one rank of every node that wrote something, without a collective; may be
    called again by another one. Raises CorruptCheckpoint (a file is not there; TornShare: it ended short), CheckpointError
    (the attempt is gone, or a later term's is published), NotWritable. Nothing is visible then.
    """
    root = Path(directory)
    final = root / step_directory_name(step)
    check_name(tmp_name, step)
    check_files(file for result in results for file in result.files)
    files = [file for result in results for file in result.files]
    mine = [file for file in files if hosts[file.rank] == hosts[rank]]
    fields = Manifest(
        step=step,
        cause=cause,
        layout=layout,
        files=tuple(files),
        tensors={},
        state=state,
        record=record,
        created_unix_s=time.time(),
        attempt=tmp_name,
        term=term,
        versions={"torch": str(torch.__version__), "ttp": ttp.__version__},
        hosts=tuple(hosts),
        start=start,
    )
    to_bytes(fields)  # a state that JSON cannot carry is found before anything is touched
    try:
        for _ in range(PUBLISH_TRIES):
            if _is_done(final, fields) or _publish_once(root, tmp_name, final, fields, mine, blobs, rank, advance):
                break
        else:
            raise CheckpointError(
                f"{root / tmp_name} is gone or was taken over by other publishers: nothing to publish; write the step again as a new attempt"
            )
        fsync_directory(root)
    except OSError as error:
        raise NotWritable(
            f"rank {rank} cannot publish its node's piece of step {step} in {root}: {error.strerror or error}"
            f" ({error.filename}); make room there or list another checkpoint directory after it"
        ) from error
    try:
        advance_tracker(root, step)
    except OSError as error:  # the piece is published all the same: the tracker is a hint
        logger.warning("step %d is published as %s, but its tracker was not replaced: %s", step, final, error)
    return str(final)


def next_start(save_dirs: Sequence[str]) -> int:
    """Return a number above those of all starts that have left pieces in these directories, as far as they can be read."""
    newest = 0
    for directory in save_dirs:
        with contextlib.suppress(OSError):  # what the start thinks of it, its claim decides
            for path in pieces_behind(list_pieces([directory])):
                with contextlib.suppress(CorruptCheckpoint, OSError):
                    newest = max(newest, read_manifest(path).start)
    return newest + 1


def list_pieces(save_dirs: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return the published names of all pieces of these directories, newest step first (then in the directories' order).

    A name may have superseded pieces only: a publisher that is killed between two renames leaves it so.
    """
    found: set[tuple[int, int, Path]] = set()
    for order, folder in enumerate(map(Path, save_dirs)):
        found |= {(-step, order, path) for step, path in steps_in(folder)}
        for name in os.listdir(folder) if folder.is_dir() else []:
            match = _ASIDE.fullmatch(name)
            if match and (step := step_of_directory(Path(match.group(1)))) is not None:
                found.add((-step, order, folder / match.group(1)))
    return [path for _, _, path in sorted(found)]


def pieces_behind(names: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return the directories of published names: each that is there, and those that a later attempt has superseded."""
    found = []
    for path in map(Path, names):
        beside = os.listdir(path.parent) if path.parent.is_dir() else []
        aside = re.compile(rf"{re.escape(path.name)}{SUPERSEDED}[0-9]+")
        found += [path] if path.is_dir() else []
        found += sorted(path.parent / name for name in beside if aside.fullmatch(name))
    return found


def remove_superseded(save_dirs: Sequence[str | os.PathLike[str]], below: int) -> list[Path]:
    """Remove the superseded pieces of all steps below `below`, and return them (one keeper of each node calls).

    To be called when every file of the checkpoint of `below` was verified and all ranks have loaded it. A step of which only a
    superseded piece is left here keeps it. One that cannot be removed takes room, no more.
    """
    removed = []
    for path in list_pieces(save_dirs):
        if not path.is_dir() or (step_of_directory(path) or 0) >= below:
            continue
        for aside in (behind for behind in pieces_behind([path])[1:] if not behind.is_symlink()):
            # Under a name that the next start cleans away: half a piece must never pass for one.
            going = aside.with_name(f"{path.name}_tmp_superseded_{uuid.uuid4().hex[:12]}")
            try:
                os.rename(aside, going)
                shutil.rmtree(going)
            except OSError as error:
                logger.warning("%s, which a later attempt has superseded, cannot be removed: %s", aside, error)
            else:
                removed.append(aside)
    return removed


def _is_done(final: Path, mine: Manifest) -> bool:
    """True when this attempt is published already. Raises CheckpointError when a later start's or term's is."""
    if not final.is_dir():
        return False
    try:
        there = read_manifest(final)
    except CorruptCheckpoint:
        return False
    if (there.start, there.term, there.attempt) == (mine.start, mine.term, mine.attempt):
        return True
    if (there.start, there.term) > (mine.start, mine.term):
        raise CheckpointError(
            f"{final} was published by a controller of term {there.term} in start {there.start}; this order is of term"
            f" {mine.term} in start {mine.start}: it comes late, and nothing is changed"
        )
    return False


def _publish_once(
    root: Path,
    tmp_name: str,
    final: Path,
    fields: Manifest,
    mine: Sequence[FileEntry],
    blobs: Mapping[str, object],
    rank: int,
    advance: Callable[[int], None],
) -> bool:
    """Claim the attempt, complete it, give it its name. False when another publisher of this node came first: look again."""
    claim = _claim(root, tmp_name, mine)
    if claim is None:
        return False
    try:
        _complete(claim, fields, mine, blobs, rank, advance)
        _place(claim, final, fields)
    except (FileNotFoundError, CheckpointError):
        if claim.exists():
            raise
        return False  # claimed away while we worked: one that had stood still goes on
    return True


def _claim(root: Path, tmp_name: str, mine: Sequence[FileEntry]) -> Path | None:
    """Give the attempt's directory a name that nobody else knows; None: there is none.

    Of several (an earlier publisher died over its claim, and a late writer has made the directory anew) the one with the
    files.
    """
    for name in sorted(names_of_attempt(root, tmp_name), key=lambda name: (_wrong_file(root / name, mine) != "", name)):
        claim = claim_of(root, tmp_name)
        try:
            os.rename(root / name, claim)
        except FileNotFoundError:
            continue
        return claim
    return None


def _wrong_file(folder: Path, mine: Sequence[FileEntry]) -> str:
    """Say which listed file is not in `folder` with its size; empty: none."""
    for file in mine:
        path = folder / file.name
        nbytes = path.stat().st_size if path.exists() else -1
        if nbytes != file.nbytes:
            what = "is missing" if nbytes < 0 else f"has {nbytes} bytes"
            return f"{path}, written by rank {file.rank}, {what}: wanted {file.nbytes} bytes"
    return ""


def _complete(
    claim: Path,
    fields: Manifest,
    mine: Sequence[FileEntry],
    blobs: Mapping[str, object],
    rank: int,
    advance: Callable[[int], None],
) -> None:
    """Remove what no writer reported; add the blobs and the manifest, all durable."""
    if wrong := _wrong_file(claim, mine):
        raise wrong_files(f"{wrong}; is TTP_SHARED_DIRS the same on every node? Write the step again", claim, mine)
    for name in sorted(set(os.listdir(claim)) - {file.name for file in mine}):
        os.unlink(claim / name)
    contents = read_contents(claim, [ShareResult(tuple(mine))], advance)
    tensors = {entry.key: TensorSpec(entry.dtype, entry.shape) for entry in contents.tensors}
    share = write_share(claim.parent, claim.name, rank, (), blobs, suffix="blobs", make=False, advance=advance)
    files = sorted((*fields.files, *share.files), key=lambda file: file.name)
    write_manifest(claim, replace(fields, files=tuple(files), tensors=tensors, finite=contents.finite))
    fsync_directory(claim)


def _place(claim: Path, final: Path, mine: Manifest) -> None:
    """Rename the finished piece to its final name; what is there is moved aside first."""
    while True:
        try:
            os.rename(claim, final)  # fails when `final` is there: a piece is never empty
            return
        except OSError:
            if not final.is_dir():
                raise
        if _is_done(final, mine):
            return
        supersede(final)


def supersede(final: Path) -> None:
    """Give a published piece another name, under which it is found as well."""
    for number in itertools.count(1):
        aside = final.with_name(f"{final.name}{SUPERSEDED}{number}")
        if not os.path.lexists(aside):
            os.rename(final, aside)
            return
