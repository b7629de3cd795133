"""What is seen of a job under faults: what its ranks report and hold, its controllers' journals, its checkpoints and trackers.

Owns the record of one run, in order of coming; judges nothing but whether a checkpoint that was published is whole, which
is unknown later, when it has been pruned.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttp.chaos.observed.leaks import Curve
from ttp.checkpoint.find import list_checkpoints
from ttp.checkpoint.format.durable import read_tracker
from ttp.checkpoint.verify import verify
from ttp.errors import CheckpointError

DEEP_BYTES = 1 << 30
"""A larger checkpoint's checksums are not compared while the job comes back: that would slow it down."""

OUT_OF_ORDER_S = 60.0
"""No line of a journal is read so much later than another one that is younger."""

Line = dict[str, Any]
Key = tuple[int, int]
"""An attempt of the job: how often the harness had started the command, and the attempt's number."""


@dataclass(frozen=True, slots=True)
class ReportedStep:
    """A rank has finished a step; or had its record read back from a checkpoint (`recovered`)."""

    step: int
    unix_s: float
    rank: int
    key: Key
    grad_norm: str
    sums: tuple[str, ...]
    recovered: bool = False
    pid: int = 0
    """The process that has reported it; 0: not known."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """A rank has loaded a checkpoint."""

    step: int
    unix_s: float
    rank: int
    key: Key
    path: str
    skipped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Seen:
    """A checkpoint, when it was first seen after its publication."""

    path: str
    step: int
    unix_s: float
    broken: str
    """Why it is not whole; empty: it is."""
    kind: str
    """Its manifest's cause."""


@dataclass(slots=True)
class Record:
    """One run, as far as it was seen."""

    world_size: int = 0
    hellos: list[tuple[float, Key, int, int]] = field(default_factory=list)
    """(time, attempt, rank, pid)."""
    steps: list[ReportedStep] = field(default_factory=list)
    resumes: list[Resumed] = field(default_factory=list)
    journal: list[Line] = field(default_factory=list)
    """Lines of all controllers, in the order in which they were read; an event's fields stand beside its name and time."""
    checkpoints: list[Seen] = field(default_factory=list)
    tracker: list[tuple[float, str, int]] = field(default_factory=list)
    """Every change: (time, directory, step)."""
    save_dirs: list[str] = field(default_factory=list)
    memory: dict[tuple[Key, int], Curve] = field(default_factory=dict)
    """What every rank of every attempt held, by (attempt, rank)."""
    replaced: list[Curve] = field(default_factory=list)
    """The same of processes whose place another one took within the attempt."""
    newest_step: int = 0
    """Where the newest attempt stands: after a broken checkpoint it may be less than it once was."""
    newest_key: Key = (0, 0)

    def curves(self) -> list[Curve]:
        """Return what every process of a rank held."""
        return [*self.replaced, *self.memory.values()]

    def finished_in(self, key: Key, until_unix_s: float) -> int:
        """Return the newest step that a rank had finished by then in this attempt, or the one that it began with."""
        reported = (reported.step for reported in self.steps if reported.key == key and reported.unix_s <= until_unix_s)
        began = (one.step for one in self.resumes if one.key == key)
        return max((*reported, *began), default=0)

    def lines(self, since_unix_s: float, *events: str) -> list[Line]:
        """Return the journal's lines of these events since then (all events unless some are named), in order of time."""
        found = []
        for line in reversed(self.journal):  # read in nearly the order of time
            if line["unix_s"] < since_unix_s - OUT_OF_ORDER_S:
                break
            if line["unix_s"] >= since_unix_s and (not events or line["event"] in events):
                found.append(line)
        return sorted(found, key=lambda line: float(line["unix_s"]))


class JournalTail:
    """Reads what controllers add to their journals in one folder."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._read: dict[int, int] = {}
        """By inode, so many bytes: a launch that follows in the same folder renames the file, and has its own under that name."""

    def new_lines(self) -> Iterator[Line]:
        """Yield the whole lines that were added since the last call."""
        found = [*self._log_dir.glob("journal_*.jsonl"), *self._log_dir.glob("standby_*_*.jsonl")]
        for path in sorted((*self._log_dir.glob("earlier/*.jsonl"), *found)):
            place = int(path.stem.rpartition("_")[2]) if "standby" in path.stem else 0
            for text in self._added(path).splitlines():
                line = json.loads(text)
                yield {**line.get("fields", {}), **line, "controller": place}

    def _added(self, path: Path) -> bytes:
        """Return the whole lines that a file has got; none where it was renamed just now, as the next look finds it there."""
        try:
            with open(path, "rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                begin = self._read.get(inode, 0)
                file.seek(begin)
                content = file.read()
        except FileNotFoundError:
            return b""
        whole = content[: content.rfind(b"\n") + 1]
        self._read[inode] = begin + len(whole)
        return whole


class Recorder:
    """Fills a record; the harness calls it whenever something has come, and now and then."""

    def __init__(self) -> None:
        self.record = Record()
        self._tails: dict[str, JournalTail] = {}
        """By folder: a restart whose first directory has died keeps its journals in the next one."""
        self._known: set[tuple[str, int]] = set()
        self._trackers: dict[str, int | None] = {}

    def receive(self, facts: Line, key: Key, message: Line) -> None:
        """Take what a rank has said."""
        record, rank, unix_s = self.record, int(facts["rank"]), float(message["unix_s"])
        match message["type"]:
            case "hello":
                record.world_size = int(message["world_size"])
                record.hellos.append((unix_s, key, rank, int(message["pid"])))
                record.replaced += [record.memory.pop((key, rank))] if (key, rank) in record.memory else []
                record.memory[key, rank] = Curve(key, rank, int(message["pid"]))
                record.save_dirs = list(message["save_dirs"])
            case "log_dir":
                self._tails.setdefault(message["log_dir"], JournalTail(Path(message["log_dir"])))
            case "step":
                record.steps.append(_reported(message, rank, key, int(facts["pid"]), recovered=False))
                record.memory[key, rank].step = record.steps[-1].step
                self._stands(key, record.steps[-1].step)
            case "resumed":
                skipped = tuple(message["skipped"])
                self._stands(key, int(message["step"]))
                record.resumes.append(Resumed(int(message["step"]), unix_s, rank, key, message["path"], skipped))
                if message["record"] is not None:
                    fields = {**message["record"], "step": message["step"], "unix_s": unix_s}
                    record.steps.append(_reported(fields, rank, key, int(facts["pid"]), recovered=True))

    def _stands(self, key: Key, step: int) -> None:
        record = self.record
        if key > record.newest_key:
            record.newest_key, record.newest_step = key, step
        elif key == record.newest_key:
            record.newest_step = max(record.newest_step, step)

    def look(self) -> list[Line]:
        """Read what is new in journals and directories; return the journal's new lines."""
        new = [line for tail in self._tails.values() for line in tail.new_lines()]
        self.record.journal += new
        for line in new:
            if line["event"] == "published":
                self._check([Path(line["path"])], float(line["unix_s"]))
        return new

    def look_at_memory(self, unix_s: float) -> None:
        """Note what each rank of the newest attempt holds."""
        for (key, _), curve in self.record.memory.items():
            if key == self.record.newest_key:
                curve.look(unix_s)

    def look_at_directories(self, unix_s: float) -> None:
        """Check every checkpoint that was not seen before, and note where trackers stand."""
        self._check(list_checkpoints(self.record.save_dirs), unix_s)
        for directory in self.record.save_dirs:
            step = read_tracker(Path(directory))
            if step is not None and step != self._trackers.get(directory):
                self.record.tracker.append((unix_s, directory, step))
            self._trackers[directory] = step

    def _check(self, paths: Iterable[Path], unix_s: float) -> None:
        for path in paths:
            try:
                identity = (str(path), path.stat().st_ino)
                if identity in self._known:
                    continue
                nbytes = sum(file.stat().st_size for file in path.iterdir())
                self._known.add(identity)
                found = verify(path, deep=nbytes <= DEEP_BYTES)
            except FileNotFoundError:
                continue  # pruned meanwhile
            except (CheckpointError, OSError) as error:
                if path.is_dir():
                    self.record.checkpoints.append(Seen(str(path), -1, unix_s, str(error), ""))
                continue
            self.record.checkpoints.append(Seen(str(path), found.step, unix_s, "", found.cause.kind.value))


def _reported(message: Line, rank: int, key: Key, pid: int, *, recovered: bool) -> ReportedStep:
    sums = tuple(message["sums"])
    return ReportedStep(
        int(message["step"]), float(message["unix_s"]), rank, key, message["grad_norm"], sums, recovered, pid
    )
