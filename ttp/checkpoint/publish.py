"""Making the shares of all writers one visible checkpoint, or nothing at all.

Owns the order of the acts (complete, checked, durable, then renamed, then the tracker) and the rule that a valid
published checkpoint is never replaced. Never writes a tensor.

Several publishers may be at work: one that was given up for dead may wake up beside its successor. So a publisher first
claims the attempt by renaming its directory; whoever loses the claim fails on a name that is gone, and changes nothing.
"""

from __future__ import annotations

import errno
import itertools
import logging
import math
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import ttp
from ttp.checkpoint import dcp
from ttp.checkpoint.contents import Contents, read_contents, wrong_files
from ttp.checkpoint.durable import (
    TRACKER_NAME,
    advance_tracker,
    fsync_directory,
    sha256_of,
    step_directory_name,
)
from ttp.checkpoint.manifest import Manifest, TensorSpec, to_bytes, write_manifest
from ttp.checkpoint.shards import tiling_error
from ttp.checkpoint.share import write_share
from ttp.checkpoint.staging import check_files, check_name, claim_of, discard_attempt, names_of_attempt
from ttp.checkpoint.verify import verify
from ttp.errors import CheckpointError, CheckpointMismatch, CorruptCheckpoint, NotWritable
from ttp.proto.messages import Cause, CommitRecord, FileEntry, ShareResult

logger = logging.getLogger(__name__)

_STALE = re.compile(rf"iter_[0-9]{{7,}}_tmp.*|\.{re.escape(TRACKER_NAME)}\..*|\.ttp_probe.*")
PUBLISH_TRIES = 5


def publish(
    directory: str | os.PathLike[str],
    tmp_name: str,
    *,
    step: int,
    results: Sequence[ShareResult],
    cause: Cause,
    record: CommitRecord | None,
    state: Mapping[str, Any],
    layout: Mapping[str, Any],
    expected: Mapping[str, Sequence[int]] | None = None,
    blobs: Mapping[str, object] | None = None,
    rank: int = 0,
    term: int = 0,
    trusted: Collection[str] = (),
    advance: Callable[[int], None] = lambda count: None,
    created_unix_s: float | None = None,
) -> str:
    """Make `directory/tmp_name`, which holds exactly `results`, the checkpoint of `step`; return its path.

    expected: shape of every tensor that must be there; blobs: plain values that this publisher adds (param groups);
    trusted: published checkpoints that this run has written or verified itself; advance: told that the work gets on.
    Called by one rank, without a collective; after a failure it may be called again by any rank. A valid checkpoint of
    the same step and tensors that is there already is kept and its path returned; a broken one is moved aside.
    Raises CorruptCheckpoint (the shares do not make a whole; TornShare: and whose it is, is known), CheckpointMismatch (the
    step is taken by another model's checkpoint), NotWritable (the file system refused), CheckpointError (the attempt is
    gone). Nothing is visible then, or the checkpoint is whole.
    """
    root = Path(directory)
    final = root / step_directory_name(step)
    check_name(tmp_name, step)
    check_files(file for result in results for file in result.files)
    fields = Manifest(
        step=step,
        cause=cause,
        layout=layout,
        files=(),
        tensors={},
        state=state,
        record=record,
        created_unix_s=time.time() if created_unix_s is None else created_unix_s,
        attempt=tmp_name,
        term=term,
        versions={"torch": str(torch.__version__), "ttp": ttp.__version__},
    )
    to_bytes(fields)  # a state that JSON cannot carry is found before anything is touched
    attempt = _Attempt(root, tmp_name, results, expected, trusted, advance)
    try:
        for _ in range(PUBLISH_TRIES):
            if os.path.lexists(final) and _is_kept(final, attempt):
                discard_attempt(root, tmp_name)
                break
            if _publish_once(attempt, final, fields, blobs or {}, rank):
                break
        else:
            raise CheckpointError(
                f"step {step}: {root / tmp_name} is gone or was taken over by other publishers, and {final} is not there: "
                "nothing to publish. Publish again, or write the step again as a new attempt"
            )
        fsync_directory(root)
    except OSError as error:
        raise NotWritable(
            f"rank {rank} cannot publish step {step} in {root}: {error.strerror or error} ({error.filename}); "
            "make room there or list another checkpoint directory after it"
        ) from error
    try:
        advance_tracker(root, step)
    except OSError as error:  # the checkpoint is published all the same: the tracker is a hint
        logger.warning("step %d is published as %s, but its tracker was not replaced: %s", step, final, error)
    return str(final)


def _publish_once(attempt: _Attempt, final: Path, fields: Manifest, blobs: Mapping[str, object], rank: int) -> bool:
    """Claim the attempt, complete it, rename it. False when another publisher came first: look again."""
    files = [file for result in attempt.results for file in result.files]
    claim = claim_attempt(attempt.root, attempt.tmp_name, files, final)
    if claim is None:
        return False
    try:
        contents = read_contents(claim, attempt.results, attempt.advance)
        fields = replace(fields, tensors=check_complete(contents, attempt.expected))
        _complete(claim, fields, contents, blobs, final, rank, attempt.advance)
    except (FileNotFoundError, CheckpointError):
        if claim.exists():
            raise
        return False  # claimed away while we worked
    try:
        os.rename(claim, final)  # fails when `final` is there: a published directory is never empty
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY):
            return False
        raise
    return True


def claim_attempt(root: Path, tmp_name: str, files: Sequence[FileEntry], final: Path) -> Path | None:
    """Give the attempt's directory a name that no other process knows. None when it went away meanwhile. Raises CheckpointError for a
    name that is no attempt's."""
    found = names_of_attempt(root, tmp_name)
    for name in found:
        if _missing(root / name, files) is None:
            claim = claim_of(root, tmp_name)
            try:
                os.rename(root / name, claim)
            except FileNotFoundError:
                return None
            return claim
    # What was listed may have been renamed by another publisher before it was looked at: only what stays put is broken.
    if not found or os.path.lexists(final) or not all((root / name).is_dir() for name in found):
        return None
    text = f"{_missing(root / found[0], files)}; is {root} the same directory on every node? Write the step again"
    raise wrong_files(text, root / found[0], files)


def _missing(path: Path, files: Sequence[FileEntry]) -> str | None:
    """Say which listed file is not in `path` with its size."""
    for file in files:
        try:
            nbytes = (path / file.name).stat().st_size
        except FileNotFoundError:
            return f"{path / file.name}, written by rank {file.rank}, is missing"
        if nbytes != file.nbytes:
            return f"{path / file.name}, written by rank {file.rank}, has {nbytes} bytes, wanted {file.nbytes}"
    return None


def _complete(
    claim: Path,
    fields: Manifest,
    contents: Contents,
    blobs: Mapping[str, object],
    final: Path,
    rank: int,
    advance: Callable[[int], None],
) -> None:
    """Remove what no writer reported; add blobs, torch's metadata and the manifest, all durable."""
    reported = {file.name for file in contents.files}
    for name in sorted(set(os.listdir(claim)) - reported):  # of a writer that died, or of a publisher before us
        os.unlink(claim / name)
    if blobs:
        share = write_share(claim.parent, claim.name, rank, (), blobs, suffix="blobs", make=False)
        added = read_contents(claim, [share])
        contents = replace(contents, files=contents.files + added.files, blobs=contents.blobs + added.blobs)
    dcp.write_metadata(claim, contents, str(final), fields.attempt, advance)
    metadata = claim / dcp.METADATA_NAME
    entry = FileEntry(dcp.METADATA_NAME, metadata.stat().st_size, sha256_of(metadata), rank)
    files = sorted((*contents.files, entry), key=lambda file: file.name)
    write_manifest(claim, replace(fields, files=tuple(files), finite=contents.finite))
    if (missing := _missing(claim, files)) is not None:
        raise CorruptCheckpoint(f"{missing}, though all was there before; write the step again as a new attempt")
    fsync_directory(claim)


@dataclass(frozen=True, slots=True)
class _Attempt:
    """What is to be published, as far as a published checkpoint of the same step is judged by it."""

    root: Path
    tmp_name: str
    results: Sequence[ShareResult]
    expected: Mapping[str, Sequence[int]] | None
    trusted: Collection[str]
    advance: Callable[[int], None]

    def contents(self) -> Contents | None:
        """Return what the attempt holds; None when it is gone."""
        for name in names_of_attempt(self.root, self.tmp_name):
            try:
                return read_contents(self.root / name, self.results, self.advance)
            except (OSError, CorruptCheckpoint):
                continue
        return None


def _is_kept(final: Path, attempt: _Attempt) -> bool:
    """True when `final` is a valid checkpoint of the attempt's tensors. A broken one is moved aside: False.

    Every byte is read only where there is a doubt. When the attempt's own files are gone, `final` is made of them: another
    publisher came first, and what they hold was durable and checksummed before anybody was told; besides, there would be
    nothing to put in its place. What this run wrote or verified is `trusted`. Otherwise the checkpoint is an older
    run's, which may have been skipped at start because it is broken: there a flipped bit must be found.
    """
    contents = attempt.contents()
    try:
        judged = os.lstat(final)
        doubtful = contents is not None and str(final) not in attempt.trusted
        manifest = verify(final, deep=doubtful, progress=lambda done, total: attempt.advance(1))
    except FileNotFoundError:
        return False
    except CorruptCheckpoint as error:
        _move_aside(final, (judged.st_dev, judged.st_ino), str(error))
        return False
    found = dict(manifest.tensors)
    if contents is not None:
        same = found == check_complete(contents, attempt.expected)
    else:
        shapes = {key: spec.shape for key, spec in found.items()}
        same = attempt.expected is None or shapes == {key: tuple(shape) for key, shape in attempt.expected.items()}
    if not same:
        raise CheckpointMismatch(
            f"{final} is already there and belongs to another model or optimizer: checkpoints are never overwritten. Use "
            "another checkpoint directory, or move it away"
        )
    logger.info("%s is already published and valid: kept", final)
    return True


def _move_aside(final: Path, judged: tuple[int, int], reason: str) -> None:
    for number in itertools.count(1):
        aside = final.with_name(f"{final.name}_broken_{number}")
        if os.path.lexists(aside):
            continue
        try:
            os.rename(final, aside)
        except FileNotFoundError:
            return
        now = os.lstat(aside)
        if (now.st_dev, now.st_ino) != judged:  # another publisher replaced it since it was judged: put it back
            os.rename(aside, final)
            return
        fsync_directory(final.parent)
        logger.error("%s is broken and was moved to %s: %s", final, aside, reason)
        return


def check_complete(contents: Contents, expected: Mapping[str, Sequence[int]] | None = None) -> dict[str, TensorSpec]:
    """Prove by exact arithmetic that the shares hold every tensor exactly once; return what each tensor is.

    expected: shape by key; None: whatever the shares name. Raises CorruptCheckpoint naming the first hole, overlap,
    contradiction or missing key. Blobs may be there more than once: the first one counts.
    """
    files = {file.name: file for file in contents.files}
    if len(files) != len(contents.files):
        raise CorruptCheckpoint("two shares name the same file: every writer must use names of its own")
    specs: dict[str, TensorSpec] = {}
    boxes: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    places: dict[str, list[tuple[int, int, str]]] = {}
    for entry in contents.tensors:
        spec = specs.setdefault(entry.key, TensorSpec(entry.dtype, entry.shape))
        if spec != TensorSpec(entry.dtype, entry.shape):
            raise CorruptCheckpoint(
                f"{entry.key!r} is {spec.dtype} of {spec.shape} in one share and {entry.dtype} of {entry.shape} in another"
            )
        dcp.dtype_of(entry.dtype)
        boxes.setdefault(entry.key, []).append((entry.offsets, entry.sizes))
        places.setdefault(entry.file, []).append((entry.position, entry.length, entry.key))
    for blob in contents.blobs:
        if blob.file not in files or not 0 <= blob.position <= blob.position + blob.length <= files[blob.file].nbytes:
            raise CorruptCheckpoint(f"blob {blob.key!r} is said to lie outside the file {blob.file}")
    _check_places(places, files)
    for key, shape in sorted((expected or {}).items()):
        if key not in specs:
            raise CorruptCheckpoint(f"{key!r} of shape {tuple(shape)} is in no share: no live holder wrote it")
        if specs[key].shape != tuple(shape):
            raise CorruptCheckpoint(f"{key!r} has shape {specs[key].shape} in the shares, wanted {tuple(shape)}")
    for key, spec in sorted(specs.items()):
        if expected is not None and key not in expected:
            raise CorruptCheckpoint(f"{key!r} of shape {spec.shape} is in a share but belongs to no expected tensor")
        # An empty tensor has nothing that could be there twice.
        error = tiling_error(spec.shape, boxes[key][:1] if math.prod(spec.shape) == 0 else boxes[key])
        if error is not None:
            raise CorruptCheckpoint(f"{key!r}: {error}")
    return specs


def _check_places(places: Mapping[str, list[tuple[int, int, str]]], files: Mapping[str, FileEntry]) -> None:
    """Every box has bytes of its own within a listed file."""
    for name, spans in sorted(places.items()):
        if name not in files:
            raise CorruptCheckpoint(f"{spans[0][2]!r} is said to lie in {name}, which no share lists")
        end = 0
        for position, length, key in sorted(spans):
            if position < end or length <= 0 or position + length > files[name].nbytes:
                raise CorruptCheckpoint(
                    f"{key!r} is said to lie at bytes {position} to {position + length} of {name}, which has "
                    f"{files[name].nbytes} bytes and whose last box ended at {end}"
                )
            end = position + length


def clean_stale(directory: str | os.PathLike[str]) -> list[str]:
    """Remove what interrupted attempts left in `directory`; return the names. The caller ensures that nobody writes.

    Published checkpoints and those moved aside as broken are never touched.
    """
    root = Path(directory)
    removed = []
    for name in sorted(os.listdir(root)) if root.is_dir() else []:
        if not _STALE.fullmatch(name):
            continue
        try:
            real = (root / name).is_dir() and not (root / name).is_symlink()
            shutil.rmtree(root / name) if real else os.unlink(root / name)  # of a link the link alone
        except OSError as error:  # it only takes room
            logger.warning("%s, left by an interrupted attempt, cannot be removed: %s", root / name, error)
        else:
            removed.append(name)
    return removed


def probe_writable(directory: str | os.PathLike[str]) -> None:
    """Find out now that a checkpoint can be written here: make the directory, then write, sync, rename and remove a probe.

    Raises NotWritable naming the directory, the reason and what to do.
    """
    root = Path(directory)
    probe = root / f".ttp_probe_{uuid.uuid4().hex}"
    renamed = probe.with_name(probe.name + "_renamed")
    try:
        os.makedirs(root, exist_ok=True)
        os.mkdir(probe)
        with open(probe / "probe", "xb") as stream:
            stream.write(b"probe")
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(probe, renamed)
        fsync_directory(root)
    except OSError as error:
        raise NotWritable(
            f"checkpoint directory {root} cannot be written: {error.strerror or error} ({error.filename}); "
            "choose another directory, or correct its permissions and free space"
        ) from error
    finally:
        for leftover in (probe, renamed):
            shutil.rmtree(leftover, ignore_errors=True)
