"""What ranks saved without a controller, from rank 0 to its agent: a small file beside the controllers' journals.

Owns the file `saved_alone_<attempt>.json`. A file that cannot be written or read costs the agent's report of the save, not the save.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from ttp import files
from ttp.inputs import checked
from ttp.inputs.input_file import read_text

log = logging.getLogger("ttp")

MOST_BYTES = 1 << 24
MOST_RANKS = 1 << 20


@dataclass(frozen=True, slots=True)
class SavedAlone:
    """Rank 0's account of a save without a controller."""

    began_unix_s: float
    unix_s: float
    step: int
    path: str
    """Empty: the step was not saved."""
    error: str
    noticed: tuple[int, ...]
    """Ranks that had a preemption notice."""
    world_size: int
    newest: str
    """The newest checkpoint that rank 0 knew of, if the step was not saved."""


def cause_text(step: int) -> str:
    """Return why the step was saved, without the signal."""
    return f"step {step} is finished, and no controller led the ranks"


def path_of(log_dir: Path, round_number: int) -> Path:
    return log_dir / f"saved_alone_{round_number}.json"


def write(path: Path, account: SavedAlone) -> None:
    """Replace the file of an attempt (rank 0). One that cannot be written costs the agent's report of it."""
    try:
        files.replace(path, json.dumps(asdict(account)))
    except OSError as error:
        log.warning(
            "that step %d was saved without a controller cannot be written to %s: %s", account.step, path, error
        )


def read(log_dir: Path, round_number: int, since_unix_s: float) -> SavedAlone | None:
    """Return what rank 0 of an attempt wrote; None: nothing that can be read, or an earlier job's."""
    try:
        fields = checked.mapping(json.loads(read_text(path_of(log_dir, round_number), MOST_BYTES)), "account")
        account = SavedAlone(
            began_unix_s=checked.number(*checked.field(fields, "began_unix_s", ""), least=0),
            unix_s=checked.number(*checked.field(fields, "unix_s", ""), least=since_unix_s),
            step=checked.integer(*checked.field(fields, "step", "")),
            path=_text(*checked.field(fields, "path", "")),
            error=_text(*checked.field(fields, "error", "")),
            noticed=checked.integers(*checked.field(fields, "noticed", "")),
            world_size=checked.integer(*checked.field(fields, "world_size", ""), least=1, most=MOST_RANKS),
            newest=_text(*checked.field(fields, "newest", "")),
        )
    except (OSError, ValueError, RecursionError):
        return None
    return account if all(rank < account.world_size for rank in account.noticed) else None


def _text(value: object, path: str) -> str:
    """Return a string; the bytes of a path need not be UTF-8."""
    if type(value) is not str:
        raise checked.Invalid(path, value, "a string")
    return value
