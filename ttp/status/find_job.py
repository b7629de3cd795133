"""Which job is meant: a folder of its files, or a controller's address.

Owns the places where a job's journals are looked for. Reads no file but the settings with which journals begin.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttp.controller.journal import inputs_path
from ttp.errors import ConfigError
from ttp.inputs import checked
from ttp.inputs.input_file import open_regular
from ttp.launch.report.story_file import REPORT_NAME

PLACES = ("", "log", "ttp_log", "checkpoints/ttp_log", "output/log", "output/ttp_log")
"""Where a job's journals may be below the folder that is named: a log_dir, an output_dir, a checkpoint directory, the folder of a job."""
_ADDRESS = re.compile(r"(\[[^\[\]/]+\]|[^\s:/\[\]]+):(\d{1,5})(/\d{1,19})?")
_JOURNAL = re.compile(r"(journal|standby)_(\d+)(?:_(\d+))?\.jsonl")
_SETTINGS_BYTES = 1 << 16
"""The settings are the first key of the first line; the state behind them may be large."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job, as it was named."""

    log_dir: Path | None
    """Where its journals are; None: a controller was named."""
    address: str = ""


@dataclass(frozen=True, slots=True)
class KnownController:
    """A controller of an attempt, by the beginning of its journal."""

    job_id: str
    """The attempt's name."""
    term: int
    address: str
    place: int
    """0: the one that the attempt began with; i: its i-th standby."""


def find(named: str) -> Job:
    """Return the job that is named: by a folder, or by host:port. Raises ConfigError: there is none."""
    folder = Path(named)
    try:
        exists = folder.exists()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"invalid job: got {checked.shown(named)} ({why}), expected the job's folder, or host:port"
        ) from None
    if not exists:
        if (match := _ADDRESS.fullmatch(named)) and 0 < int(match[2]) < 65536:
            return Job(None, named)
        raise ConfigError(
            f"invalid job: got {checked.shown(named)}, which is not there, expected a folder (the job's output_dir, log_dir or checkpoint directory) or the"
            " address of its controller, host:port"
        )
    if not folder.is_dir():
        raise ConfigError(
            f"invalid job: got {checked.shown(named)}, which is not a folder, expected the job's output_dir, log_dir or checkpoint directory"
        )
    places = [folder / place for place in PLACES]
    for place in places:
        try:
            if (place / REPORT_NAME).exists() or any(journals(place)):
                return Job(place)
        except OSError as error:
            raise ConfigError(
                f"invalid job: got {checked.shown(named)}, where {place} cannot be read ({error.strerror}), expected a job whose files this user may"
                " read. Ask as the job's user, or start the job with TTP_FILE_MODE=0640 for its group"
            ) from None
    looked = ", ".join(str(place) for place in places)
    raise ConfigError(
        f"no job found: got {checked.shown(named)}, expected a folder with journal_0.jsonl or {REPORT_NAME} in it (looked into {looked}). Name the job's"
        " output_dir or log_dir, or its controller's host:port"
    )


def journals(log_dir: Path) -> Iterator[tuple[Path, int, int]]:
    """Yield each journal of a folder, with its attempt and the place of its controller. Raises OSError."""
    if log_dir.is_dir():
        for path in sorted(log_dir.iterdir()):
            if match := _JOURNAL.fullmatch(path.name):
                yield path, int(match[2]), int(match[3] or 0)


def controllers(log_dir: Path, attempt: int) -> list[KnownController]:
    """Return the controllers of an attempt whose journals are here, the one of the highest term first. Raises OSError, ValueError."""
    found = []
    for path, number, place in journals(log_dir):
        if number == attempt and (fields := _settings(inputs_path(path))) is not None:
            job_id = checked.string(*checked.field(fields, "job_id", ""))
            term = checked.integer(*checked.field(fields, "term", ""))
            if address := checked.string(*checked.field(fields, "address", "")):
                found.append(KnownController(job_id, term, address, place))
    return sorted(found, key=lambda each: -each.term)


def _settings(path: Path) -> dict[str, Any] | None:
    """Return the settings that a journal's inputs begin with; None: they are not written yet."""
    try:
        with open_regular(path) as file:
            text = file.read(_SETTINGS_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return None
    head, key, rest = text.partition('"settings": ')
    if head != "{" or not key:
        return None
    try:
        value, _ = json.JSONDecoder().raw_decode(rest)
    except ValueError:
        return None  # its first line is being written
    return checked.mapping(value, "settings")


def no_answer(address: str, why: str) -> ConfigError:
    """Return the error of an address at which nothing can be asked, with nothing else to look at."""
    return ConfigError(
        f"no job found at {address}: {why}. Name the job's output_dir or log_dir to see what its files know"
    )
