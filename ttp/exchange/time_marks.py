"""When an attempt's ranks finished their first step, and how long saves held training up: rank 0's notes beside the controller's journal.

Owns the file `times_<attempt>.jsonl`: a line for the first finished step of the attempt and of each recovery, and one for each save. Lines are written by
threads of their own: a disk that hangs delays no step, and a line that cannot be written costs a part of the report on the job's time.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ttp import files
from ttp.inputs import checked
from ttp.inputs.input_file import open_text

STEPPED, SAVED = "stepped", "saved"


@dataclass(frozen=True, slots=True)
class Mark:
    """One line of the file."""

    unix_s: float
    """When the step was finished, or the save had ended."""
    what: str
    """`stepped` or `saved`."""
    step: int
    took_s: float = 0.0
    """Of a save: how long training waited for it."""


def path_of(log_dir: Path, attempt: int) -> Path:
    return log_dir / f"times_{attempt}.jsonl"


class TimeMarks:
    """Rank 0's notes of one attempt. Any thread; never blocks, never raises."""

    def __init__(self, log_dir: Path, attempt: int) -> None:
        self._path = path_of(log_dir, attempt)

    def stepped(self, step: int) -> None:
        """The first step is finished, of the attempt or since a recovery."""
        self._note(Mark(time.time(), STEPPED, step))

    def saved(self, step: int, took_s: float) -> None:
        """Training has waited so long for a save."""
        self._note(Mark(time.time(), SAVED, step, round(took_s, 3)))

    def _note(self, mark: Mark) -> None:
        line = {"unix_s": mark.unix_s, "event": mark.what, "step": mark.step, "took_s": mark.took_s}
        with contextlib.suppress(RuntimeError):  # no thread can be started any more
            threading.Thread(target=self._append, args=(json.dumps(line) + "\n",), name="ttp-mark", daemon=True).start()

    def _append(self, text: str) -> None:
        with contextlib.suppress(OSError), open(self._path, "a", encoding="utf-8", opener=files.opener) as file:
            file.write(text)


def read(log_dir: Path, attempt: int, since_unix_s: float) -> list[Mark]:
    """Return the marks of an attempt in order of time, without an earlier job's, and without other lines."""
    try:
        with open_text(path_of(log_dir, attempt)) as file:
            found = [mark for line in file for mark in _mark(line)]
    except (OSError, ValueError):
        return []
    return sorted((mark for mark in found if mark.unix_s >= since_unix_s), key=lambda mark: mark.unix_s)


def _mark(line: str) -> Iterator[Mark]:
    with contextlib.suppress(ValueError, RecursionError):
        fields = checked.mapping(json.loads(line), "mark")
        what = checked.string(*checked.field(fields, "event", ""))
        if what in (STEPPED, SAVED):
            yield Mark(
                checked.number(*checked.field(fields, "unix_s", "")),
                what,
                checked.integer(*checked.field(fields, "step", "")),
                checked.number(*checked.field(fields, "took_s", ""), least=0.0),
            )
