"""Taking a checkpoint, or a node's piece of one, away so that a cut at any moment leaves nothing that looks whole and is not.

Owns the two steps of it: a rename to a name that no search finds and that the next start of a job cleans away, durable before the
first file goes; then the removal.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from pathlib import Path

from ttp.checkpoint.durable import fsync_directory, step_directory_name
from ttp.checkpoint.survey import PRUNED
from ttp.errors import CheckpointError

LINKED = "a symbolic link, which is removed by hand"
"""Why a checkpoint that would go is left."""


def take_away(path: Path, step: int) -> None:
    """Remove the directory of a published name (or a superseded one) of `step`. Raises OSError; CheckpointError for a link."""
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a symbolic link to {os.readlink(path)}: remove the link, or the checkpoint, by hand"
        )
    going = path.with_name(f"{step_directory_name(step)}{PRUNED}{uuid.uuid4().hex[:12]}")
    os.rename(path, going)
    fsync_directory(path.parent)  # a power cut must not bring the name back over files that are gone
    remove_tree(going)


def remove_tree(path: Path) -> None:
    """Remove a directory that is no checkpoint any more."""
    if path.is_symlink():  # of a link the link alone
        path.unlink(missing_ok=True)
    while path.exists():
        with contextlib.suppress(FileNotFoundError):  # a start of the job may be cleaning the same away
            shutil.rmtree(path)
