"""What happened, as JSON lines: the event log for people and tools, and every input, so that a run can be replayed.

- `PATH`: one line per event: `{"unix_s", "monotonic_s", "event", "fields"}`. Small; kept whole.
- `PATH.inputs`: the machine's state, then every event that went into it with its time. When it has grown to
  `segment_bytes` it becomes `PATH.inputs.1` (the one before is dropped) and a new one begins with a fresh state; so each
  file replays on its own, and a long job keeps its recent past.

A new launch in the same folder has files of the same names: those of the earlier one go to `earlier/`.

Lines are written and flushed by a thread of its own: a slow or full disk delays and loses lines, never a decision.
Never decides anything.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from ttp import files
from ttp.controller.json_codec import from_json, plain_json, to_json
from ttp.inputs.checked import field, mapping, number, string
from ttp.inputs.input_file import open_regular

from .core.facts.events import ControllerSettings, Effect, Event, HeartbeatBatch

SEGMENT_BYTES = 64 << 20
MOST_QUEUED = 300_000
"""Inputs that wait to be written, some hundred bytes each: a log directory may not answer for hours."""
BATCH_LINES = 512
"""At most so many lines between two flushes; under less load every line is flushed."""

PATIENCE_S = 0.25
"""How long a batch of lines waits for the driver to be idle. Python runs one thread at a time: with 10,000 ranks' reports still
to be written down, a decision would take twice as long."""
LINES_AT_ONCE = 8
"""So many are written between two looks whether the driver is busy; one may hold a hundred heartbeats."""


@dataclass(frozen=True, slots=True)
class JournalLine:
    """One line of the event log, read back."""

    unix_s: float
    monotonic_s: float
    event: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Recording:
    """One inputs file, read back: `state` is what the machine had before the first of `inputs`."""

    settings: ControllerSettings
    state: Any
    inputs: tuple[tuple[float, Event], ...]
    """(the machine's time, event)."""


class Journal:
    """Open at construction (raises OSError: the caller says what to do), then written from the driver's thread."""

    def __init__(self, path: Path, settings: ControllerSettings, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        files.make_folder(path.parent)
        with contextlib.suppress(OSError):  # then this attempt's lines follow the earlier ones
            set_aside(path)
        self._settings = settings
        self._segment_bytes = segment_bytes
        self._inputs_path = inputs_path(path)
        self._events: IO[str] = open(path, "a", encoding="utf-8", opener=files.opener)  # noqa: SIM115
        try:
            self._inputs: IO[str] = self._open_inputs()
        except OSError:
            self._events.close()
            raise
        self._input_bytes = 0
        """Of the inputs file behind its state; counted by the thread that writes."""
        self._state_queued = False
        self._lost = 0
        """Inputs since the last one that was queued: the disk does not answer, and they would fill the memory."""
        self._queue: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._heartbeats: list[tuple[float, Event]] = []
        """Not queued yet; of the driver's thread, and of `close` once that has ended."""
        self._complained = False
        self._idle = threading.Event()  # set while the driver has nothing to do
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name="ttp-journal", daemon=True)
        self._thread.start()

    def driver_busy(self) -> None:
        """The driver has begun to work: lines wait until it says that it is idle, or for PATIENCE_S."""
        self._idle.clear()

    def driver_idle(self) -> None:
        """The driver waits for the next input."""
        self._idle.set()

    def write_event(self, unix_s: float, monotonic_s: float, event: str, fields: Mapping[str, Any]) -> None:
        """Add one line to the event log, behind the inputs so far: one of them has caused it."""
        self._queue_heartbeats()
        self._queue.put(("event", (unix_s, monotonic_s, event, fields)))

    def starting_state(self, state: Any) -> None:
        """Begin the inputs with the machine's state (immutable); also whenever `wants_state` says so."""
        self._state_queued = True
        self._queue_heartbeats()
        self._queue.put(("state", state))
        if self._lost:
            self._queue.put(("lost", self._lost))
            self._lost = 0

    @property
    def wants_state(self) -> bool:
        """The inputs file has grown enough, or lacks inputs that were lost and the disk answers again: call `starting_state` with the state of now."""
        grown = self._queue.qsize() < MOST_QUEUED if self._lost else self._input_bytes >= self._segment_bytes
        return grown and not self._state_queued

    def input(self, now: float, event: Event) -> None:
        """Record an event that is about to go into the machine at its time `now`. Several heartbeats in one are written with what comes behind them, a
        tick at the latest: each line on its own would wake the thread a thousand times a second. While too many wait to be written it is lost, with all
        that follow until `starting_state`."""
        if self._lost or self._queue.qsize() >= MOST_QUEUED:
            self._lost += 1
            return
        if isinstance(event, HeartbeatBatch):
            self._heartbeats.append((now, event))
            return
        self._queue_heartbeats()
        self._queue.put(("input", (now, event)))

    def _queue_heartbeats(self) -> None:
        for beats in self._heartbeats:
            self._queue.put(("input", beats))
        self._heartbeats.clear()

    def wait_written(self, timeout_s: float = 5.0) -> bool:
        """Wait until all that was queued before is written; say whether it is."""
        done = threading.Event()
        self._queue.put(("mark", done))
        return done.wait(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued and close the files, or give up after `timeout_s` (a hung file system)."""
        self._idle.set()
        self._queue_heartbeats()
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        batch: list[tuple[str, Any]] = []
        item: tuple[str, Any] | None = ("", None)
        while item is not None:
            item = self._queue.get()
            while item is not None:
                batch.append(item)
                if self._queue.empty() or len(batch) >= BATCH_LINES:
                    break
                item = self._queue.get()
            self._guarded(lambda: self._write_all(batch))
            batch.clear()
        self._guarded(self._events.close)
        self._guarded(self._inputs.close)

    def _open_inputs(self) -> IO[str]:
        return open(self._inputs_path, "w", encoding="utf-8", opener=files.opener)

    def _begin_segment(self) -> None:
        """Write into a new file. Raises OSError: then the old one is written on, whatever it is called now."""
        with contextlib.suppress(FileNotFoundError):  # somebody has removed it, to make room
            os.replace(self._inputs_path, f"{self._inputs_path}.1")
        begun = self._open_inputs()
        before, self._inputs = self._inputs, begun
        with contextlib.suppress(OSError):  # the last lines do not fit: the new file begins with its state all the same
            before.close()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # a full disk, say: what follows would stay in memory if the thread ended
            if not self._complained:
                self._complained = True
                print(f"ttp-controller: the journal {self._events.name} lost lines: {error}", file=sys.stderr)

    def _write_all(self, batch: list[tuple[str, Any]]) -> None:
        waited = not self._idle.wait(PATIENCE_S)
        for place, (kind, content) in enumerate(batch):
            if place % LINES_AT_ONCE == 0 and not waited:
                waited = not self._idle.wait(PATIENCE_S)
            self._guarded(functools.partial(self._write, kind, content))
        self._flush()

    def _flush(self) -> None:
        self._events.flush()
        self._inputs.flush()

    def _write(self, kind: str, content: Any) -> None:
        if kind == "mark":
            self._flush()
            content.set()
            return
        if kind == "lost":
            raise OSError(f"its disk did not answer, and {content:,} inputs are not in the files for a replay")
        if kind == "event":
            unix_s, monotonic_s, event, fields = content
            line = {"unix_s": unix_s, "monotonic_s": monotonic_s, "event": event, "fields": plain_json(fields)}
            self._events.write(json.dumps(line) + "\n")
            return
        if kind == "state":
            self._input_bytes, self._state_queued = 0, False
            if self._inputs.tell() > 0:
                self._begin_segment()
            first = {"settings": to_json(self._settings), "state": to_json(content)}
            self._inputs.write(json.dumps(first) + "\n")
            return
        now, event = content
        text = json.dumps([now, to_json(event)]) + "\n"  # ASCII: a character is a byte
        self._input_bytes += len(text)
        self._inputs.write(text)


def inputs_path(path: Path) -> Path:
    """Return where the inputs of the journal `path` are."""
    return path.with_name(path.name + ".inputs")


def set_aside(path: Path) -> None:
    """Move the journal `path` of an earlier launch, if there is one, into the folder `earlier` beside it, under the time (UTC) of its
    last line; its inputs too, so that it replays there. Raises OSError."""
    inputs = inputs_path(path)
    _set_aside(path, inputs, Path(f"{inputs}.1"))


def set_aside_earlier(log_dir: Path, attempt: int) -> None:
    """Do so with all journals of this attempt, before its first controller is started, and of later ones: an earlier launch had more attempts, or
    more standbys. Before the first attempt also with the stacks of all its hangs and the curve of its status page. Raises OSError."""
    for path in (*log_dir.glob("journal_*.jsonl"), *log_dir.glob("standby_*_*.jsonl")):
        number = path.stem.split("_")[1]
        if number.isdecimal() and int(number) >= attempt:
            set_aside(path)
    for path in (*log_dir.glob("stacks_*.txt"), log_dir / "status_curve.json") if attempt == 0 else ():
        _set_aside(path)


def _set_aside(path: Path, *companions: Path) -> None:
    """Move a file and those that belong to it, under the time of its last change. Raises OSError."""
    if not path.is_file():
        return
    last = time.strftime("%Y%m%dT%H%M%S", time.gmtime(path.stat().st_mtime))
    folder = path.parent / "earlier"
    files.make_folder(folder)
    for file in (path, *companions):
        if file.exists():
            os.replace(file, folder / f"{last}_{file.name}")


def read_events(path: Path) -> Iterator[JournalLine]:
    """Yield the event log's lines; a last line that was cut off by a crash is left out. Raises OSError, ValueError."""
    for line in _whole_lines(path):
        entry = mapping(line, "a line")
        yield JournalLine(
            unix_s=number(*field(entry, "unix_s", "")),
            monotonic_s=number(*field(entry, "monotonic_s", "")),
            event=string(*field(entry, "event", "")),
            fields=mapping(*field(entry, "fields", "")),
        )


def read_inputs(path: Path) -> Recording:
    """Read one inputs file. Raises OSError, and ValueError when it has no first line or lines that no journal has."""
    lines = _whole_lines(path)
    first = next(lines, None)
    if first is None:
        raise ValueError(f"{path} is empty, expected settings and state on its first line")
    try:
        inputs = tuple((now, from_json(event)) for now, event in lines)
        return Recording(from_json(first["settings"]), from_json(first["state"]), inputs)
    except (TypeError, LookupError, AttributeError, RecursionError, ImportError) as error:
        raise ValueError(f"{path} holds a line that no journal has: {type(error).__name__}: {error}") from None


class Transition(Protocol):
    def __call__(self, state: Any, event: Event, now: float, /) -> tuple[Any, Iterable[Effect]]: ...


def replay(recording: Recording, transition: Transition) -> Iterator[tuple[float, Event, Any, tuple[Effect, ...]]]:
    """Run the recorded inputs through a machine; yield (time, event, state after, effects) for each.

    A ProtocolError is raised as it was in the run: there, the state stayed as it was; catch it in `transition` to go on.
    """
    state = recording.state
    for now, event in recording.inputs:
        state, effects = transition(state, event, now)
        yield now, event, state, tuple(effects)


def _whole_lines(path: Path) -> Iterator[Any]:
    with open_regular(path) as raw, io.TextIOWrapper(io.BufferedReader(raw), encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                try:
                    yield json.loads(line)
                except RecursionError:
                    raise ValueError(f"{path} holds a line that is nested too deep") from None
