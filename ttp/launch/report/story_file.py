"""`story.jsonl`, the report for programs.

Owns the file's path and the lines that could not be written yet. A failing disk loses lines; a hanging one never delays a fault.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ttp import files
from ttp.inputs import checked
from ttp.inputs.input_file import open_text
from ttp.launch.rendezvous.bounded_call import BoundedCall
from ttp.launch.report.journals import Line

log = logging.getLogger("ttp.launch")

REPORT_NAME = "story.jsonl"
FREQUENT = frozenset({"mirror"})
"""Lines that say how far something has come: no events."""
WRITE_S = 1.0
"""How long the agent waits for a line to be written while ranks save."""


class ReportFile:
    """One agent's lines in a story.jsonl; other agents may append to the same file."""

    def __init__(
        self,
        path: Path | None,
        lock: threading.Lock,
        launch: str,
        on_event: Callable[[str], None] | None = None,
    ) -> None:
        """`path`: None: beside the journals, once there are any. `lock`: held by the caller of `write`. `launch`: names this agent in each
        line. `on_event(line)`: is given each line, before it is written; must return at once."""
        self._on_event = on_event
        self.path = path
        self._next_path: Path | None = None
        self._lock = lock
        self._launch = launch
        self._unwritten: list[str] = []
        self._late: deque[str] = deque()
        """Lines to be written in another thread, in order."""

    def beside(self, log_dir: Path) -> None:
        """Write beside an attempt's journals if there is no other path yet, or once the current one is not writable."""
        self._next_path = log_dir / REPORT_NAME
        self.path = self.path or self._next_path

    def write(self, unix_s: float, event: str, fields: Mapping[str, Any]) -> None:
        """Append a line; one that cannot be written is kept until the next."""
        self._unwritten.append(self._text(unix_s, event, fields))
        self._write_out()

    def announce(self, unix_s: float, event: str, fields: Mapping[str, Any]) -> None:
        """Give an event to `on_event` alone: another agent writes it."""
        self._text(unix_s, event, fields)

    def write_in_thread(self, unix_s: float, event: str, fields: Mapping[str, Any]) -> None:
        """Append a line during a fault, in a thread: a hanging disk may hold the lock."""
        self._late.append(self._text(unix_s, event, fields))

        def write() -> None:
            with self._lock:
                while self._late:
                    self._unwritten.append(self._late.popleft())
                self._write_out()

        with suppress(RuntimeError):  # no thread can be started: the line is written with the next one
            BoundedCall(write).wait(WRITE_S)

    def _text(self, unix_s: float, event: str, fields: Mapping[str, Any]) -> str:
        """Return an event's line, which is to be written."""
        text = json.dumps({"unix_s": unix_s, "event": event, "launch": self._launch, **fields}) + "\n"
        if self._on_event is not None and event not in FREQUENT:
            self._on_event(text)
        return text

    def _write_out(self) -> None:
        if self.path is None:
            return
        try:
            while self._unwritten:
                _append(self.path, self._unwritten[0])
                self._unwritten.pop(0)
        except OSError as error:
            log.warning("cannot write events to %s: %s", self.path, error)
            if self._next_path not in (None, self.path):
                self.path, self._next_path = self._next_path, None
                self._write_out()


def _append(path: Path, text: str) -> None:
    """Append a line. If the last one was cut off (full disk, lost writer), begin a new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab", opener=files.opener) as file:
        file.write((b"\n" if _is_cut_off(path) else b"") + text.encode())


def _is_cut_off(path: Path) -> bool:
    if not path.is_file():  # a pipe, which cannot be read
        return False
    with open(path, "rb") as file:
        return file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"


def read_events(path: Path) -> list[Line]:
    """Return a story.jsonl's lines, without those that were cut off. Raises OSError, and ValueError for a file that is something else."""
    found: list[Line] = []
    broken = 0
    with open_text(path) as file:
        for number, text in enumerate(file, 1):
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                broken = broken or number
                continue
            except RecursionError:
                raise ValueError(f"line {number}: got values nested too deep to be read") from None
            if not isinstance(line, dict) or not isinstance(line.get("event"), str):
                raise ValueError(
                    f"line {number}: got {checked.shown(text.strip())}, expected an object with the key event"
                )
            found.append(line)
    if broken and not found:
        raise ValueError(f"line {broken} is not JSON, expected one JSON object a line")
    return found
