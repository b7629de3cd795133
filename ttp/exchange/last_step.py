"""The last step of an attempt and the newest one on disk, from rank 0 to its agent: a small file beside the controller's journal.

Owns the file `last_step_<attempt>.json`. Written when training ends, not per step; a fault's step is in the journal. A file that cannot be
written or read costs a line of the job's summary.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ttp import files
from ttp.inputs import checked
from ttp.inputs.input_file import read_text

MOST_BYTES = 1 << 12


@dataclass(frozen=True, slots=True)
class LastStep:
    """Where training ended."""

    step: int
    """The newest finished step."""
    saved_step: int | None
    """The newest step of which TTP knows a checkpoint, 0: none; None: the trainer writes checkpoints of its own."""


def path_of(log_dir: Path, round_number: int) -> Path:
    return log_dir / f"last_step_{round_number}.json"


def write(log_dir: Path, round_number: int, last: LastStep) -> None:
    """Replace the file of an attempt (rank 0)."""
    with contextlib.suppress(OSError):
        files.replace(path_of(log_dir, round_number), json.dumps({"unix_s": time.time(), **asdict(last)}))


def read(log_dir: Path, round_number: int, since_unix_s: float) -> LastStep | None:
    """Return what rank 0 of an attempt wrote; None: nothing that can be read, or an earlier job's."""
    try:
        fields = checked.mapping(json.loads(read_text(path_of(log_dir, round_number), MOST_BYTES)), "last step")
        checked.number(*checked.field(fields, "unix_s", ""), least=since_unix_s)
        saved, where = checked.field(fields, "saved_step", "")
        return LastStep(
            checked.integer(*checked.field(fields, "step", "")),
            None if saved is None else checked.integer(saved, where),
        )
    except (OSError, ValueError, RecursionError):
        return None
