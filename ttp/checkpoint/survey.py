"""What lies in a folder of checkpoints: the published ones with their state, and what else takes room there.

Owns the finding and the cheap judgement of each; compares no checksums and changes nothing.
"""

from __future__ import annotations

import enum
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ttp.checkpoint.answer import UsageError
from ttp.checkpoint.durable import step_of_directory, steps_in
from ttp.checkpoint.load import list_checkpoints
from ttp.checkpoint.manifest import MANIFEST_NAME, Manifest
from ttp.checkpoint.pieces import SUPERSEDED
from ttp.checkpoint.verify import verify
from ttp.errors import CheckpointError

PRUNED = "_tmp_pruned_"
"""In the name of a checkpoint that is being removed: no search finds it, and a start of the job cleans it away."""

_BESIDE = re.compile(r"iter_\d{7,}_\w.*")
_MEANINGS = (
    (PRUNED, "half removed; the next prune or start removes it"),
    ("_tmp", "an unfinished attempt; it is being written, or the next start removes it"),
    ("_broken_", "was broken and moved aside; remove it when nobody needs it"),
    (SUPERSEDED, "superseded by a later attempt; goes when all ranks have loaded a newer step"),
)


class State(enum.Enum):
    COMPLETE = "complete"
    """Names, sizes and completeness are right; the checksums were not compared."""
    PIECE = "piece of a node"
    BROKEN = "broken"
    UNREADABLE = "unreadable"
    """The system did not let us look."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One published checkpoint: `manifest` or, if there is no good one, `error`."""

    path: Path
    state: State
    manifest: Manifest | None
    error: str

    @property
    def step(self) -> int:
        return step_of_directory(self.path) or 0


@dataclass(frozen=True, slots=True)
class Leftover:
    """A directory beside the published ones."""

    path: Path
    meaning: str
    nbytes: int


def list_published(folder: Path) -> list[Listed]:
    """Return every published checkpoint of a folder, newest first, after the cheap checks."""
    return [judged(path) for path in list_checkpoints([folder])]


def judged(path: Path) -> Listed:
    """Return what one checkpoint is after the cheap checks."""
    try:
        manifest = verify(path, deep=False)
    except CheckpointError as error:
        return Listed(path, State.BROKEN, None, str(error))
    except OSError as error:
        return Listed(path, State.UNREADABLE, None, f"{error.filename or path}: {error.strerror or error}")
    return Listed(path, State.PIECE if manifest.hosts else State.COMPLETE, manifest, "")


def list_leftovers(folder: Path) -> list[Leftover]:
    """Return what attempts, removals and damage have left in a folder, by name."""
    found = []
    for name in sorted(os.listdir(folder)):
        path = folder / name
        if _BESIDE.fullmatch(name) and path.is_dir():
            meaning = next((text for mark, text in _MEANINGS if mark in name), "not a name of TTP's")
            found.append(Leftover(path, meaning, size_of(path)))
    return found


def size_of(path: Path) -> int:
    """Return the bytes of all files of a directory; what goes meanwhile counts nothing."""
    nbytes = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                nbytes += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return nbytes


def folder_at(path: Path) -> Path:
    """Return the folder of checkpoints that `path` means: itself, a checkpoint's parent, `checkpoints` of an output folder.

    Raises UsageError.
    """
    _check_folder(path)
    if is_checkpoint(path):
        return path.absolute().parent
    below = path / "checkpoints"
    return below if below.is_dir() and not steps_in(path) else path


def is_checkpoint(path: Path) -> bool:
    """Tell a checkpoint from a folder of them."""
    return step_of_directory(path.absolute()) is not None or (path / MANIFEST_NAME).exists()


def newest_at(path: Path) -> Path:
    """Return the first of `all_at`."""
    return all_at(path)[0]


def all_at(path: Path) -> list[Path]:
    """Return the checkpoint that `path` is, or all published ones of the folder, newest first, valid or not.

    Raises UsageError when there is no such folder, CheckpointError when nothing is there.
    """
    _check_folder(path)
    if is_checkpoint(path):
        return [path]
    folder = folder_at(path)
    found = list_checkpoints([folder])
    if not found:
        raise nothing_in(folder)
    return found


def nothing_in(folder: Path) -> CheckpointError:
    """Return the error for a folder without checkpoints."""
    if (folder / ".metadata").exists():
        return CheckpointError(
            f"no checkpoint in {folder}: it has .metadata and no {MANIFEST_NAME}, so torch.distributed.checkpoint wrote it"
            " alone; load it with that"
        )
    return CheckpointError(
        f"no checkpoint in {folder}: wanted directories like iter_0000042; name the folder that was given as save_dirs"
    )


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        what = "is a file" if path.exists() else "is not there"
        raise UsageError(f"{path} {what}: wanted a checkpoint (iter_0000042) or a folder of checkpoints")
