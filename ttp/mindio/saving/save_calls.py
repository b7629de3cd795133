"""How the publisher has the save handler run on other ranks: by files in the directory that has the shares.

    iter_0000042_tmp_saves_<id>/call.json       who is asked, and the newest plan: who saves which model part with whom
    iter_0000042_tmp_saves_<id>/rank_<r>.json   that rank's answer, written again every second: alive, busy, done

Files need no process group, no connection and no living peer. Owns their form, and who counts as lost: a rank that writes no
answer for SILENT_S. Never decides who saves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttp import files
from ttp.checkpoint.format.durable import step_directory_name
from ttp.errors import CheckpointError
from ttp.mindio.saving.local_save import LocalSave, Saving
from ttp.proto.messages import FileEntry, ShareResult

log = logging.getLogger("ttp")

SILENT_S = 10.0
"""A rank that has not answered for so long is lost; so is one whose handler has written nothing for so long, to a later publisher."""
POLL_S = 0.2
_BEAT_S = 1.0
_MARK = "_tmp_saves_"
_CALL = "call.json"


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Who saves what; `number` counts the plans of one call."""

    number: int
    claim: str
    """Name of the shares' directory."""
    step: int
    host: Mapping[str, Any]
    results: tuple[ShareResult, ...]
    parts: tuple[Saving, ...]

    def of(self, rank: int) -> Saving | None:
        return next((saving for saving in self.parts if rank in saving.ranks), None)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> SavePlan:
        results = tuple(
            ShareResult(tuple(FileEntry(**file) for file in result["files"])) for result in found["results"]
        )
        parts = tuple(Saving(part["step"], part["save_rank"], tuple(part["ranks"])) for part in found["parts"])
        return cls(found["number"], found["claim"], found["step"], found["host"], results, parts)


@dataclass(frozen=True, slots=True)
class SaveAnswer:
    """What a rank has written last, and when (this process's monotonic seconds)."""

    busy: bool
    work: int
    done: Mapping[str, str]
    """The error of each plan that it has carried out, by the plan's number; empty: it was saved."""
    beat_at: float
    work_at: float


@dataclass(slots=True)
class Call:
    """The publisher's side: one publish."""

    folder: Path
    advance: Callable[[int], None]
    silent_s: float = field(default_factory=lambda: SILENT_S)
    clock: Callable[[], float] = time.monotonic
    _asked: dict[int, float] = field(default_factory=dict)
    _answers: dict[int, SaveAnswer] = field(default_factory=dict)
    _bodies: dict[int, str] = field(default_factory=dict)
    _plan: SavePlan | None = None

    @classmethod
    def begin(cls, root: Path, step: int, advance: Callable[[int], None]) -> Call:
        """Take over from any earlier publisher."""
        for folder in _calls(root):
            _remove(folder)
        folder = root / f"{step_directory_name(step)}{_MARK}{uuid.uuid4().hex[:12]}"
        files.make_folder(folder)
        return cls(folder, advance)

    def end(self) -> None:
        _remove(self.folder)

    def free(self, ranks: Iterable[int]) -> set[int]:
        """Ask ranks, wait until each has answered and has no handler running, and return them; without those that are lost."""
        waiting, free = set(ranks), set[int]()
        for rank in waiting:
            self._asked[rank] = self.clock()
        self._write()
        while waiting:
            self._read(waiting)
            now = self.clock()
            for rank in sorted(waiting):
                answer = self._answers.get(rank)
                if answer is not None and not answer.busy and answer.beat_at >= self._asked[rank]:
                    free.add(rank)
                elif now - max(self._asked[rank], answer.work_at if answer else 0.0) <= self.silent_s:
                    continue
                waiting.discard(rank)
            self._pause(bool(waiting))
        return free

    def usable(self, rank: int, parts: Sequence[Sequence[int]], writers: set[int], lost: set[int]) -> set[int]:
        """Return the ranks that can save these model parts now: `rank`, which asks, the writers of each part, and a part's other ranks
        where none of these answers."""
        members = {member for ranks in parts for member in ranks} - lost - {rank}
        found = {rank} | self.free(members & writers)
        without = [ranks for ranks in parts if not found.intersection(ranks)]
        return found | self.free({member for ranks in without for member in ranks} & members - writers)

    def post(self, plan: SavePlan) -> None:
        self._plan = plan
        self._write()

    def wait(self, ranks: Iterable[int]) -> set[int]:
        """Wait until these ranks have carried out the plan; return those that were lost. Raises CheckpointError when a handler raised."""
        assert self._plan is not None
        waiting, lost, number = set(ranks), set[int](), str(self._plan.number)
        while waiting:
            self._read(waiting)
            for rank in sorted(waiting):
                answer = self._answers[rank]
                if number in answer.done:
                    if error := answer.done[number]:
                        raise CheckpointError(f"rank {rank}: {error}")
                elif self.clock() - answer.beat_at > self.silent_s:
                    lost.add(rank)
                else:
                    continue
                waiting.discard(rank)
            self._pause(bool(waiting))
        return lost

    def _pause(self, more: bool) -> None:
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is gone: another publisher took over")
        if more:
            time.sleep(POLL_S)

    def _read(self, ranks: Iterable[int]) -> None:
        now = self.clock()
        for rank in ranks:
            body = _text(self.folder / f"rank_{rank}.json")
            if body is None or body == self._bodies.get(rank):
                continue
            found, before = json.loads(body), self._answers.get(rank)
            progressed = before is None or found["work"] > before.work or found["busy"] != before.busy
            if progressed:
                self.advance(1)
            work_at = now if progressed or before is None else before.work_at
            self._bodies[rank] = body
            self._answers[rank] = SaveAnswer(found["busy"], found["work"], found["done"], now, work_at)

    def _write(self) -> None:
        plan = None if self._plan is None else self._plan.to_dict()
        _replace(self.folder / _CALL, {"asked": sorted(self._asked), "plan": plan})


class Watcher:
    """Every rank's side: a thread that answers calls while this rank's state is frozen, and runs the save handler when asked."""

    def __init__(self, rank: int, root: Path, save: LocalSave, frozen: Callable[[], bool]) -> None:
        self._rank, self._root, self._save, self._frozen = rank, root, save, frozen
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ttp-save-calls", daemon=True)
        self._handler: threading.Thread | None = None
        self._call = ""
        self._taken = 0
        self._done: dict[str, str] = {}
        self._beats = 0
        self._written: tuple[object, ...] = ()
        self._beat_at = 0.0
        self._own_bytes = 0
        """Of the bytes that this process wrote while a handler ran: those of answers, which are not the handler's work."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            if self._frozen():
                try:
                    self.look()
                except OSError as error:  # the call has ended, or the disk failed: the publisher finds out by itself
                    log.debug("rank %d: a call to save was not answered: %s", self._rank, error)

    def look(self) -> None:
        """Look once whether this rank is called."""
        folder = next(iter(_calls(self._root)), None)
        body = None if folder is None else _text(folder / _CALL)
        if folder is None or body is None:
            return
        call = json.loads(body)
        if self._rank not in call["asked"]:
            return
        if folder.name != self._call:
            self._call, self._taken, self._done = folder.name, 0, {}
        busy = self._handler is not None and self._handler.is_alive()
        if not busy and call["plan"] is not None and call["plan"]["number"] > self._taken:
            plan = SavePlan.from_dict(call["plan"])
            self._taken = plan.number
            if (saving := plan.of(self._rank)) is not None:
                self._handler = threading.Thread(
                    target=self._carry_out, args=(plan, saving, self._done), name="ttp-save-handler", daemon=True
                )
                self._handler.start()
                busy = True
        self._answer(folder, busy)

    def _answer(self, folder: Path, busy: bool) -> None:
        done = dict(self._done)
        work = self._save.work_done - self._own_bytes
        now, status = time.monotonic(), (folder.name, busy, len(done))
        if status == self._written and now - self._beat_at < _BEAT_S:
            return
        self._beats, self._beat_at, self._written = self._beats + 1, now, status
        answer = {"beat": self._beats, "busy": busy, "work": work, "done": done}
        nbytes = _replace(folder / f"rank_{self._rank}.json", answer)
        self._own_bytes += nbytes if busy else 0

    def _carry_out(self, plan: SavePlan, saving: Saving, done: dict[str, str]) -> None:
        error = ""
        try:
            self._save.save(saving, self._root / plan.claim, plan.results, plan.host, lambda count: None)
        except BaseException as raised:
            error = str(raised) or type(raised).__name__
            log.exception("rank %d: step %d was not saved here", self._rank, plan.step)
        done[str(plan.number)] = error


def _calls(root: Path) -> list[Path]:
    """Return the calls in `root`, the newest first."""
    try:
        found = [Path(entry.path) for entry in os.scandir(root) if _MARK in entry.name]
    except FileNotFoundError:
        return []

    def changed(path: Path) -> int:
        with contextlib.suppress(OSError):
            return path.stat().st_ctime_ns
        return 0

    return sorted(found, key=changed, reverse=True)


def _remove(folder: Path) -> None:
    """Remove a call. It gets another name first, so that no rank can write an answer into it meanwhile."""
    ended = folder.with_name(folder.name.replace(_MARK, "_tmp_ended_"))
    with contextlib.suppress(OSError):  # another publisher has removed it
        os.rename(folder, ended)
    for _ in range(2):  # an answer may come into being just as the folder is renamed: it is there the second time
        shutil.rmtree(ended, ignore_errors=True)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _replace(path: Path, value: Mapping[str, Any]) -> int:
    """Write a file that is read whole or not at all; return its size."""
    body = json.dumps(value)
    files.replace(path, body)
    return len(body)


def savings(step: int, parts: Sequence[Sequence[int]], usable: set[int], first: int) -> tuple[Saving, ...]:
    """Return who saves each model part: rank `first` its own, the lowest usable rank the others'. Raises CheckpointError for a part
    without a usable rank."""
    found = []
    for ranks in parts:
        here = tuple(sorted(usable.intersection(ranks)))
        if not here:
            raise CheckpointError(
                f"step {step}: no rank that has the model part of ranks {list(ranks)} answers, and only they have the trainer's"
                " objects of that part to save"
            )
        found.append(Saving(step, first if first in here else here[0], here))
    return tuple(found)
