"""Staging directories: where the shares of one checkpoint are written before it is published.

Owns their names, the refusal of every other name, and their removal; also the test, at an attempt's startup, that a directory takes a checkpoint.
What a caller names is made, renamed or removed only when it is a staging directory: a real directory called `iter_0000042_tmp_NAME`, or a
publisher's claim of it. Never touches a published checkpoint, one that was renamed as broken, or what this package keeps under names of the
same kind.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterable
from pathlib import Path

from ttp.checkpoint.format.durable import TRACKER_NAME, fsync_directory, step_directory_name
from ttp.errors import CheckpointError, NotWritable
from ttp.proto.messages import FileEntry

logger = logging.getLogger(__name__)

_ATTEMPT = re.compile(r"(iter_[0-9]{7,19})_tmp_([0-9A-Za-z][0-9A-Za-z_.-]{0,127})")
_CLAIM = "_claim_"
PRUNED = "_tmp_pruned_"
"""In the name of a checkpoint that is being removed: no search finds it, and the next attempt of the job cleans it away."""
SUPERSEDED = "_superseded_"
"""In the name of a node's part that a later write of its step has replaced: it is found all the same."""
_KEPT_BY_OTHERS = re.compile(r"published|(pruned|superseded|gather)_.*")
"""What comes after `_tmp_` in the names of directories and notes that are not staging directories."""
_STALE = re.compile(rf"iter_[0-9]{{7,}}_tmp.*|\.{re.escape(TRACKER_NAME)}\..*|\.ttp_probe.*")


def check_name(tmp_name: str, step: int | None = None) -> None:
    """Raise CheckpointError unless this is the name of a staging directory; of this step's, if one is given."""
    match = _ATTEMPT.fullmatch(tmp_name)
    wrong = match is None or _CLAIM in tmp_name or _KEPT_BY_OTHERS.fullmatch(match.group(2)) is not None
    if wrong or (step is not None and match is not None and match.group(1) != step_directory_name(step)):
        of = "iter_STEP" if step is None else step_directory_name(step)
        raise CheckpointError(
            f"invalid name of a staging directory: got {tmp_name[:200]!r}, expected {of}_tmp_NAME. Nothing was changed"
        )


def check_files(files: Iterable[FileEntry]) -> None:
    """Raise CheckpointError for a file that is not in the staging directory itself."""
    for file in files:
        if file.name in ("", ".", "..") or "/" in file.name or "\0" in file.name:
            raise CheckpointError(
                f"invalid file of rank {file.rank}: got {file.name[:200]!r}, expected a name without a directory. Nothing was changed"
            )


def make_staging(root: Path, tmp_name: str) -> Path:
    """Make a staging directory if it is not there, and return it. Raises CheckpointError for another name, or a link; OSError."""
    check_name(tmp_name)
    path = root / tmp_name
    path.mkdir(parents=True, exist_ok=True)
    _check_real(path)
    return path


def claimed(root: Path, claim: str) -> Path:
    """Return the directory of a claim, which is not made: its publisher has it or fails. Raises as `make_staging`."""
    tmp_name, mark, number = claim.rpartition(_CLAIM)
    check_name(tmp_name if mark and re.fullmatch("[0-9a-f]+", number) else claim)
    _check_real(root / claim)
    return root / claim


def claim_of(root: Path, tmp_name: str) -> Path:
    """Return a name for a staging directory that no other process knows."""
    return root / f"{tmp_name}{_CLAIM}{uuid.uuid4().hex[:12]}"


def names_of_staging(root: Path, tmp_name: str) -> list[str]:
    """Return what a staging directory is called now: its own name, or a claim's. Raises CheckpointError for another name, or a link."""
    check_name(tmp_name)
    claims = re.compile(rf"{re.escape(tmp_name)}({_CLAIM}[0-9a-f]+)?")
    names = sorted(name for name in os.listdir(root) if claims.fullmatch(name))
    for name in names:
        _check_real(root / name)
    return names


def free_name(final: Path, mark: str) -> Path:
    """Return a name beside a published checkpoint that is free: `iter_0000042_broken_1`."""
    names = (final.with_name(f"{final.name}{mark}{number}") for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def discard_staging(directory: str | os.PathLike[str], tmp_name: str) -> None:
    """Remove a staging directory that failed or is not needed; its writers must have ended. Raises as `names_of_staging`, with nothing
    removed."""
    root = Path(directory)
    for name in names_of_staging(root, tmp_name):
        shutil.rmtree(root / name, ignore_errors=True)


def _check_real(path: Path) -> None:
    """Refuse a link in a staging directory's place: what it points to is none."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return  # renamed meanwhile, by another publisher
    if not stat.S_ISDIR(mode):
        what = "a symbolic link" if stat.S_ISLNK(mode) else "a file"
        raise CheckpointError(
            f"invalid staging directory: got {path}, which is {what}, expected a directory of its own. Nothing was changed;"
            " remove it"
        )


def clean_stale(directory: str | os.PathLike[str]) -> list[str]:
    """Remove stale staging directories, claims, probes and half-removed checkpoints; return the names. The caller ensures that no process
    writes. Never touches published checkpoints and those renamed as broken."""
    root = Path(directory)
    removed = []
    for name in sorted(os.listdir(root)) if root.is_dir() else []:
        if not _STALE.fullmatch(name):
            continue
        try:
            real = (root / name).is_dir() and not (root / name).is_symlink()
            shutil.rmtree(root / name) if real else os.unlink(root / name)  # of a link the link alone
        except OSError as error:  # it only takes room
            logger.warning("%s, left by an interrupted writer, cannot be removed: %s", root / name, error)
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
