"""Checkpoints that a job has passed over at its resume: they are another run's, or were refused.

Owns the note of them in each checkpoint directory, `.ttp_passed_over.json`, the inode of each by its name: `ttp ckpt prune` and `ttp status`
leave out what the job itself leaves out. Each resume replaces the note. It names no folder, for another node may have it elsewhere.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from ttp.checkpoint.format.durable import write_durably
from ttp.errors import CheckpointError
from ttp.inputs import checked
from ttp.inputs.input_file import read_json

log = logging.getLogger("ttp")

NOTE_NAME = ".ttp_passed_over.json"
MEANING = "another run's, or refused when the job resumed: move or remove it by hand"
"""Why prune neither removes nor counts one."""


def write_notes(directories: Iterable[str], passed_over: Mapping[str, int]) -> None:
    """Note in each directory what of it was passed over (inode by path); no note stays where there is nothing. A directory that cannot be written is
    warned of."""
    for directory in map(Path, directories):
        here = {Path(path).name: inode for path, inode in passed_over.items() if Path(path).parent == directory}
        try:
            if here:
                write_durably(directory / NOTE_NAME, json.dumps(here).encode())
            else:
                (directory / NOTE_NAME).unlink(missing_ok=True)
        except OSError as error:
            log.warning(
                "%s cannot be written: %s; `ttp ckpt prune` and `ttp status` do not know which checkpoints there are another run's",
                directory / NOTE_NAME,
                error.strerror or error,
            )


def read_notes(directories: Iterable[Path]) -> dict[str, int]:
    """Return the inodes of what was passed over in these directories, by path. Raises OSError, CheckpointError where a note cannot be read."""
    found: dict[str, int] = {}
    for directory in directories:
        try:
            note = checked.inodes(read_json(directory / NOTE_NAME), NOTE_NAME)
        except FileNotFoundError:
            continue
        except ValueError as error:
            raise CheckpointError(
                f"{directory / NOTE_NAME} is damaged: {error}. Start the job again, which writes it anew, or remove it"
            ) from None
        found |= {str(directory / name): inode for name, inode in note.items()}
    return found


def is_in(passed_over: Mapping[str, int], path: Path) -> bool:
    """Tell one that was passed over from another that has its name now."""
    try:
        return str(path) in passed_over and os.lstat(path).st_ino == passed_over[str(path)]
    except FileNotFoundError:  # removed meanwhile
        return False
