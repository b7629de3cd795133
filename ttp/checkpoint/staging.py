"""Staging directories: where the shares of one attempt at a checkpoint lie until it is published.

Owns their names, the refusal of every other name, and their removal. What a caller names is made, renamed or removed only when it
is the staging directory of one attempt: a real directory called `iter_0000042_tmp_NAME`, or a publisher's claim of it. Never touches
a published checkpoint, one that was moved aside, or what other parts of this package keep under names of the same kind.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterable
from pathlib import Path

from ttp.checkpoint.durable import step_directory_name
from ttp.errors import CheckpointError
from ttp.proto.messages import FileEntry

logger = logging.getLogger(__name__)

_ATTEMPT = re.compile(r"(iter_[0-9]{7,19})_tmp_([0-9A-Za-z][0-9A-Za-z_.-]{0,127})")
_CLAIM = "_claim_"
_KEPT_BY_OTHERS = re.compile(r"published|(pruned|superseded|gather)_.*")
"""What comes after `_tmp_` in the names of directories and notes that belong to no attempt."""


def check_name(tmp_name: str, step: int | None = None) -> None:
    """Raise CheckpointError unless this is the name of an attempt's staging directory; of this step's, if one is given."""
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
    """Make an attempt's directory if it is not there, and return it. Raises CheckpointError for another name, or a link; OSError."""
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
    """Return a name for an attempt's directory that no other process knows."""
    return root / f"{tmp_name}{_CLAIM}{uuid.uuid4().hex[:12]}"


def names_of_attempt(root: Path, tmp_name: str) -> list[str]:
    """Return what an attempt's directory is called now: its own name, or a claim's. Raises CheckpointError for another name, or
    a link."""
    check_name(tmp_name)
    claims = re.compile(rf"{re.escape(tmp_name)}({_CLAIM}[0-9a-f]+)?")
    names = sorted(name for name in os.listdir(root) if claims.fullmatch(name))
    for name in names:
        _check_real(root / name)
    return names


def discard_attempt(directory: str | os.PathLike[str], tmp_name: str) -> None:
    """Remove what was written of an attempt that failed or is not needed; its writers must have ended. Raises as
    `names_of_attempt`, with nothing removed."""
    root = Path(directory)
    for name in names_of_attempt(root, tmp_name):
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
