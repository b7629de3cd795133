"""`story.jsonl`: the lines for programs, and the journals' lines that they are made of.

Owns the file's place and what could not be written yet. A disk that fails costs lines, one that hangs no time of a fault.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ttp.inputs.input_file import open_text
from ttp.launch.rendezvous.bounded_call import BoundedCall
from ttp.launch.report.incident import Line, leading_lines

log = logging.getLogger("ttp.launch")

STORY_NAME = "story.jsonl"
WRITE_S = 1.0
"""How long the launcher waits, while it holds ranks, for a line to be written."""


class StoryFile:
    """Appended to by one launcher; others may append to the same file."""

    def __init__(self, path: Path | None, lock: threading.Lock, launch: str) -> None:
        """`path`: None: beside the journals, once there are any. `lock`: held by whoever calls `write`. `launch`: names this launcher in each
        line."""
        self.path = path
        self._next_path: Path | None = None
        self._lock = lock
        self._launch = launch
        self._unwritten: list[str] = []
        self._late: deque[str] = deque()
        """Lines of a hold, in order, that a thread of their own is to write."""

    def beside(self, log_dir: Path) -> None:
        """An attempt has its journals there: lines go there if they have no other place, or cannot go on where they are."""
        self._next_path = log_dir / STORY_NAME
        self.path = self.path or self._next_path

    def write(self, unix_s: float, event: str, fields: Mapping[str, Any]) -> None:
        """Append a line; one that cannot be written waits for the next."""
        self._unwritten.append(self._text(unix_s, event, fields))
        self._write_out()

    def write_aside(self, unix_s: float, event: str, fields: Mapping[str, Any]) -> None:
        """Append a line in the middle of a fault, on a thread of its own: a disk that hangs may hold the lock."""
        self._late.append(self._text(unix_s, event, fields))

        def write() -> None:
            with self._lock:
                while self._late:
                    self._unwritten.append(self._late.popleft())
                self._write_out()

        with suppress(RuntimeError):  # no thread can be started: the line goes out with the next one
            BoundedCall(write).wait(WRITE_S)

    def _text(self, unix_s: float, event: str, fields: Mapping[str, Any]) -> str:
        return json.dumps({"unix_s": unix_s, "event": event, "launch": self._launch, **fields}) + "\n"

    def _write_out(self) -> None:
        if self.path is None:
            return
        try:
            while self._unwritten:
                _append(self.path, self._unwritten[0])
                self._unwritten.pop(0)
        except OSError as error:
            log.warning("the story could not be written to %s: %s", self.path, error)
            if self._next_path not in (None, self.path):
                self.path, self._next_path = self._next_path, None
                self._write_out()


def _append(path: Path, text: str) -> None:
    """Append a line, after the end of one that was cut off: the disk was full, or its writer was lost."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        file.write((b"\n" if _is_cut_off(path) else b"") + text.encode())


def _is_cut_off(path: Path) -> bool:
    if not path.is_file():  # a pipe, which cannot be read
        return False
    with open(path, "rb") as file:
        return file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"


def read_story(path: Path) -> list[Line]:
    """Return a story file's lines but for those that were cut off. Raises OSError."""
    found: list[Line] = []
    with open_text(path) as file:
        for line in file:
            with suppress(json.JSONDecodeError):
                found.append(json.loads(line))
    return found


def read_journals(log_dir: Path, start: int, begun_unix_s: float) -> list[Line]:
    """Return the lines that count of an attempt's journals, in order of time; a line that was cut off is left out.

    An earlier job may have appended to files of the same names: what is older than the attempt is not the attempt's.
    Raises OSError and ValueError.
    """
    lines: list[Line] = []
    for path in (*log_dir.glob(f"journal_{start}.jsonl"), *log_dir.glob(f"standby_{start}_*.jsonl")):
        place = int(path.stem.rpartition("_")[2]) if path.stem.startswith("standby") else 0
        with open_text(path) as file:
            read = [json.loads(line) for line in file if line.endswith("\n")]
        lines += [{**line, "controller": place} for line in read if line["unix_s"] >= begun_unix_s]
    return leading_lines(lines)
