"""What ttprun tells of its job: a table at each start, the story of each fault, a summary at the end; and the same as JSON lines.

Read from the controllers' journals on the node of rank 0; another node's launcher keeps to its own short lines, but tells
a fault that a standby on its node has led, when rank 0's launcher cannot. Never
decides anything, and a journal that cannot be read costs a line of warning, no more.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from ttp import last_step, saved_alone
from ttp.console import open_console
from ttp.input_file import open_text
from ttp.last_step import LastStep
from ttp.launch.aside import Aside
from ttp.launch.earlier import Earlier, earlier
from ttp.launch.fault_story import NOTICE, FaultStory, Line, false_alarms, fault_of, leading_lines
from ttp.launch.hang_stacks import gather, main_frames, read_asked, read_blocks
from ttp.launch.hindsight import (
    CLOSE_ON_ALL,
    UNANNOUNCED,
    AtOnce,
    ended_at_once,
    gone_back,
    left_unannounced,
    told_by,
    until_second_signal,
)
from ttp.launch.saved_alone import lines_of
from ttp.launch.story import Recorded
from ttp.launch.story_text import Summary, fault_lines, summary_lines
from ttp.wording import counted

log = logging.getLogger("ttp.launch")

STORY_NAME = "story.jsonl"
WRITE_S = 1.0
"""How long the launcher waits, while it holds ranks, for a line to be written."""
_NEVER_ASSEMBLED = "no journal on this node says that all ranks were protected"
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, RecursionError)
"""What a journal that is missing, cut off or altered may raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of the workers, as the launcher on rank 0's node knows it."""

    number: int
    begun_unix_s: float
    world_size: int = 0
    """0: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a start ended on this node."""

    log_dir: Path | None
    """Where its journals are; None: no rank has said so."""
    exits: Mapping[int, str]
    """How workers ended that failed by themselves."""
    first_exit_unix_s: float | None
    next: str
    """What follows, in words."""
    pids: Mapping[int, int]
    """Of this node's workers, by rank."""
    left_saved: bool = False
    """Workers here left as a controller ordered once the state was saved."""
    raised: Mapping[int, Recorded] = field(default_factory=dict)
    """The exceptions that some of them recorded."""
    one_node: bool = True
    elsewhere: str | None = ""
    """What ended the start on another node, in the words of that one's launcher; None: something has, and it is not known what."""
    succeeded: bool = False
    """All workers on this node have ended with status 0."""
    first_step: int | None = None
    """The first step that the start has finished; None: not known, or none."""
    skipped: str = ""
    """The newest checkpoint that its ranks found broken before that; empty: none."""
    told_by: str = ""
    """The signal for which the launcher told the ranks to leave; empty: none came."""
    at_once: AtOnce = field(default_factory=AtOnce)


class Chronicle:
    """Tells one job. `watch` runs on the courier's thread of a start, the rest on the agent's."""

    def __init__(
        self, story_path: Path | None = None, clock: Callable[[], float] = time.time, *, launch: str = ""
    ) -> None:
        """`story_path`: where the JSON lines go (default: `story.jsonl` beside the journals of the first start, or of a later one
        whose journals are elsewhere, when it can be written no more). Lines wait for a place, or for room. `launch`: names this
        launcher in each: others append."""
        self._launch = launch
        self._story_path = story_path
        self._next_story_path: Path | None = None
        self._unwritten: list[str] = []
        self._late: deque[str] = deque()
        """Lines of a hold, in order, that a thread of their own is to write."""
        self._clock = clock
        self._begun_unix_s = clock()
        self._lock = threading.Lock()  # guards all below
        self._here = False
        self._starts = 0
        self._first = 0
        """The first start that this launcher took part in."""
        self._number = -1
        """Of the start that goes on."""
        self._told: set[int] = set()
        """Starts whose end this launcher has told, a calm one too."""
        self._untold: tuple[Start, Ending] | None = None
        """A start that the launcher on another node tells, unless that node is lost: then rank 0 comes to another one."""
        self._ended_in_fault = False
        """So has the newest start that was told here."""
        self._last: LastStep | None = None
        """Where its training ended, if that was no fault."""
        self._protected = False
        """A rank has called `ttp.start`: it has said where its journals are."""
        self._introduced = -1
        self._rows: Any = None
        self._stories: list[FaultStory] = []
        self._again = 0
        """Steps that starts have trained again though the fault before had left them whole."""
        self._first_steps: list[int] = []
        """Starts that have finished a step."""
        self._false_alarms = 0
        self._lost_s = 0.0
        self._down_since_unix_s: float | None = None

    def begin(self, here: bool, number: int | None = None) -> None:
        """A start begins; `here`: rank 0 is on this node. number: of this start in its job (None: the next one)."""
        with self._lock:
            self._here = here
            self._starts += 1
            self._number = self._number + 1 if number is None else number
            if self._starts == 1:
                self._first = self._number
            untold, self._untold = self._untold, None
            if here and untold is not None:
                self._guarded_end(*untold, introduce=False)

    def watch(self, start: Start, log_dir: Path) -> bool:
        """Show the start's table when all ranks are registered; False: not yet."""
        try:
            lines = read_start(log_dir, start)
        except _UNREADABLE as error:
            log.warning("start %d: what the job survives cannot be shown: %s", start.number, error)
            return True
        with self._lock:
            return self._introduce(start, log_dir, lines)

    def end(self, start: Start, ending: Ending) -> None:
        """All of a start's workers and controllers on this node have ended: tell its fault, if it had one."""
        with self._lock:
            if self._here or self._told_only_here(start, ending):
                self._guarded_end(start, ending, introduce=True)
            else:
                self._untold = (start, ending)

    def hold(self, start: int, cause: str, ranks: Sequence[int], up_to_s: float) -> None:
        """Write for machines that these ranks of this node have so long to persist and leave, and why."""
        self._write_aside("hold", start, {"cause": cause, "ranks": list(ranks), "up_to_s": round(up_to_s, 3)})

    def held(self, start: int, held_s: float, why: str, ranks: Sequence[int]) -> None:
        """Write for machines that this node's ranks are held no longer; `ranks` are still there, and are ended because of `why`."""
        self._write_aside("held", start, {"held_s": round(held_s, 3), "why": why, "ranks": list(ranks)})

    def _write_aside(self, event: str, start: int, fields: Mapping[str, Any]) -> None:
        """Write a line in the middle of a fault, on rank 0's node: a disk that hangs keeps nobody from the fault's deadline."""
        if not self._here:  # read without the lock, which a disk that hangs may hold
            return
        self._late.append(self._line(self._clock(), event, {"start": start, **fields}))

        def write() -> None:
            with self._lock:
                while self._late:
                    self._unwritten.append(self._late.popleft())
                self._write_out()

        with suppress(RuntimeError):  # no thread can be started: the line goes out with the next one
            Aside(write).wait(WRITE_S)

    def finish(self, result: str, why: str = "") -> None:
        """The job has ended on this node, for a reason that is in `why` if it is not in `result`. A launcher that is not rank 0's
        has a line for machines only, and none of a success."""
        with self._lock:
            if not self._here:
                if not result.startswith("succeeded"):
                    said = {"node": socket.gethostname(), "result": result, "why": why, "starts": self._starts}
                    self._write("left", said)
                return
            now = self._clock()
            if self._down_since_unix_s is not None:
                self._lost_s += now - self._down_since_unix_s
                self._down_since_unix_s = None
            summary = self._sum_up(result, now)
            if summary is None:  # who waits for the end must still see it
                self._write("end", {"result": result, "starts": self._first + self._starts, "why": why})
                return
            summary = replace(summary, why=why)
            self._write("end", asdict(summary))
            self._print(summary_lines(summary))

    # --- with the lock held ---

    def _sum_up(self, result: str, now: float) -> Summary | None:
        """Sum the job up; where what others told was altered, from what was told here alone. None: that cannot be summed up either."""
        nothing = earlier([], self._told, self._number)
        for others, without in ((self._earlier(), ""), (nothing, ", not even without what other launchers told")):
            try:
                return self._summary(result, now, others)
            except _UNREADABLE as error:
                log.warning("how the job went cannot be summed up%s: %s: %s", without, type(error).__name__, error)
        return None

    def _summary(self, result: str, now: float, others: Earlier) -> Summary:
        """Sum the job up from what was told here, and by the launchers of other nodes before and in between."""
        kinds = [*(story.kind for story in self._stories), *(fault["kind"] for fault in others.faults)]
        told = sorted([(story.start, *_kept(asdict(story))) for story in self._stories]
                      + [(int(fault["start"]), *_kept(fault)) for fault in others.faults])  # fmt: skip
        known = {*self._told, *(int(fault["start"]) for fault in others.faults)}
        whole = self._first == 0 or others.begun_unix_s is not None
        begun = min(self._begun_unix_s, others.begun_unix_s or self._begun_unix_s)
        losses = [lost for _, _, lost in told]
        return Summary(
            result=result,
            starts=self._first + self._starts,
            faults=len(told),
            notices=kinds.count(NOTICE),
            false_alarms=self._false_alarms,
            saved_steps=tuple(step for _, step, _ in told if step is not None),
            steps_lost=sum(lost or 0 for lost in losses) + self._again + others.again,
            steps_again=self._again + others.again,
            unknown_losses=sum(lost is None for lost in losses),
            lost_s=round(self._lost_s + others.lost_s, 3),
            lasted_s=round(now - begun, 3),
            untold_starts=tuple(number for number in range(self._number + 1) if number not in known),
            lasted_since=0 if whole else self._first,
            ended_in_fault=self._ended_in_fault,
            last=self._last,
            protected=self._protected or self._first > 0 or any(number not in self._told for number in known),
        )

    def _earlier(self) -> Earlier:
        """Read what other launchers told of the starts that were not told here; nothing where their file is not on this node."""
        if self._story_path is not None and not self._told.issuperset(range(self._number + 1)):
            try:
                return earlier(_read_story(self._story_path), self._told, self._number, self._first_steps)
            except FileNotFoundError:
                pass
            except _UNREADABLE as error:
                log.warning("what other launchers told of the job cannot be read from %s: %s", self._story_path, error)
        return earlier([], self._told, self._number)

    def _told_only_here(self, start: Start, ending: Ending) -> bool:
        """Say whether a standby on this node led the ranks and its journal is on this node's own disk, so that the launcher
        on rank 0's node cannot read it."""
        if ending.log_dir is None:
            return False
        try:
            if (ending.log_dir / f"journal_{start.number}.jsonl").exists():
                return False
            return bool(read_start(ending.log_dir, start))
        except _UNREADABLE:
            return False

    def _guarded_end(self, start: Start, ending: Ending, *, introduce: bool) -> None:
        try:
            if self._end(start, ending, introduce):
                self._told.add(start.number)
        except _UNREADABLE as error:
            log.warning("the story of start %d cannot be told from %s: %s", start.number, ending.log_dir, error)

    def _introduce(self, start: Start, log_dir: Path, lines: Sequence[Line]) -> bool:
        told = next((line for line in lines if line["event"] == "assembled"), None)
        if told is None or self._introduced == start.number:
            return told is not None
        self._introduced = start.number
        self._story_beside(log_dir)
        if self._down_since_unix_s is not None:
            self._lost_s += max(0.0, float(told["unix_s"]) - self._down_since_unix_s)
            self._down_since_unix_s = None
        fields = told["fields"]
        pids = {str(line["fields"]["rank"]): line["fields"]["pid"] for line in lines if line["event"] == "registered"}
        standbys = len(fields["standbys"])
        behind = "1 standby" if standbys == 1 else f"{standbys or 'no'} standbys"
        shown = ("world_size", "survives", "standbys", "warnings", "rows")
        self._write("start", {"start": start.number, **{name: fields[name] for name in shown}, "pids": pids})
        if fault_of(start.number, lines, {}) is not None:  # it came between two of the courier's looks
            self._print([f"start {start.number} as it was before its fault, which came before this could be told:"])
        self._print(
            [
                f"--- start {start.number}: {counted(fields['world_size'], 'rank')}, a controller with {behind}; "
                f"the job survives: {fields['survives']} ---"
            ]
        )
        if fields["rows"] != self._rows:  # a restart of the same ranks needs no second table
            self._rows = fields["rows"]
            self._show(start_table(fields["rows"], pids), soft_wrap=False)
        self._print([f"warning: {text}" for text in fields["warnings"]])
        return True

    def _end(self, start: Start, ending: Ending, introduce: bool) -> bool:
        """Tell a start's fault, if it had one; say whether it is known how it ended."""
        lines = read_start(ending.log_dir, start) if ending.log_dir is not None else []
        if ending.log_dir is not None:
            if introduce:  # a short start, that ended before the courier looked
                self._introduce(start, ending.log_dir, lines)
            self._story_beside(ending.log_dir)
        if introduce and self._introduced != start.number:
            self._write_unprotected(start, ending)
        self._false_alarms += false_alarms(lines)
        account = saved_alone.read(ending.log_dir, start.number, start.begun_unix_s) if ending.log_dir else None
        lines = lines_of(account, lines) if account else lines
        lines = until_second_signal(lines, ending.at_once)
        story = fault_of(
            start.number,
            lines,
            ending.exits,
            ending.first_exit_unix_s,
            raised=ending.raised,
            pids=ending.pids,
            one_node=ending.one_node,
            elsewhere=ending.elsewhere or "",
            left_saved=ending.left_saved,
        )
        if ending.at_once.ranks and lines:
            story = ended_at_once(start.number, story, lines, ending.at_once)
        if ending.first_step is not None:
            self._compare(start.number, ending.first_step, ending.skipped)
        self._ended_in_fault, self._last = story is not None, None
        if ending.succeeded and ending.log_dir is not None:
            self._last = last_step.read(ending.log_dir, start.number, start.begun_unix_s)
        if story is None:
            return bool(lines) or ending.elsewhere is not None
        unannounced = ending.succeeded and left_unannounced(story, ending.pids)
        if unannounced and story.saved is None:
            self._ended_in_fault = False
            self._write("unannounced", {"start": start.number, "ranks": [culprit.rank for culprit in story.culprits]})
            log.warning("start %d: %s", start.number, UNANNOUNCED)
            return True
        if ending.log_dir is not None:
            story = with_stacks(story, lines, ending.log_dir)
        if ending.told_by:
            story = told_by(story, ending.told_by, ending.at_once.ranks)
        what_next = CLOSE_ON_ALL if unannounced else ending.next
        story = replace(story, next=what_next, began_unix_s=story.began_unix_s or self._clock())
        self._stories.append(story)
        self._down_since_unix_s = self._down_since_unix_s or story.began_unix_s
        self._write("fault", asdict(story))
        self._print(fault_lines(story))
        return True

    def _compare(self, start: int, first_step: int, skipped: str) -> None:
        """Say where a start has not gone on where the fault before it, or an earlier job, had left off."""
        known = self._told.issuperset(range(start))
        left = gone_back(self._stories, start, first_step, self._first_steps, skipped if known else "")
        self._first_steps.append(start)
        if left is None:
            return
        self._again += left.steps
        self._write("again", {"start": start, **asdict(left)})
        log.warning("start %d %s", start, left.text(first_step))

    def _print(self, lines: Sequence[str]) -> None:
        if lines:
            self._show("\n".join(lines))

    def _show(self, what: str | Table, *, soft_wrap: bool = True) -> None:
        """Print on stderr, after the same was written for machines. A console that is lost costs what is printed, no more."""
        with suppress(OSError, ValueError):  # ValueError: the stream was closed
            open_console(sys.stderr, soft_wrap=soft_wrap, ends_program=False).print(what, markup=False)

    def _write_unprotected(self, start: Start, ending: Ending) -> None:
        """Write the line of a start of which no journal here says that all ranks were protected: nothing was told as it began."""
        self._introduced = start.number
        pids = {str(rank): pid for rank, pid in ending.pids.items()}
        nothing = {"survives": "", "standbys": [], "warnings": [_NEVER_ASSEMBLED], "rows": []}
        fields = {"start": start.number, "world_size": start.world_size, **nothing, "pids": pids}
        self._write("start", fields, start.begun_unix_s)

    def _write(self, event: str, fields: Mapping[str, Any], unix_s: float | None = None) -> None:
        self._unwritten.append(self._line(unix_s if unix_s is not None else self._clock(), event, fields))
        self._write_out()

    def _line(self, unix_s: float, event: str, fields: Mapping[str, Any]) -> str:
        return json.dumps({"unix_s": unix_s, "event": event, "launch": self._launch, **fields}) + "\n"

    def _write_out(self) -> None:
        if self._story_path is None:
            return
        try:
            while self._unwritten:
                _append(self._story_path, self._unwritten[0])
                self._unwritten.pop(0)
        except OSError as error:
            log.warning("the story could not be written to %s: %s", self._story_path, error)
            if self._next_story_path not in (None, self._story_path):
                self._story_path, self._next_story_path = self._next_story_path, None
                self._write_out()

    def _story_beside(self, log_dir: Path) -> None:
        """A start has its journals there: the story goes there if it has no other place, or cannot stay where it is."""
        self._protected = True
        self._next_story_path = log_dir / STORY_NAME
        self._story_path = self._story_path or self._next_story_path


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


def _read_story(path: Path) -> list[Line]:
    """Return a story file's lines but for those that were cut off. Raises OSError."""
    found: list[Line] = []
    with open_text(path) as file:
        for line in file:
            with suppress(json.JSONDecodeError):
                found.append(json.loads(line))
    return found


def _kept(fault: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the step that a told fault saved and the steps that it lost, each None where there is none or it is not known."""
    return (fault["saved"]["step"] if fault["saved"] is not None else None), fault["steps_lost"]


def read_start(log_dir: Path, start: Start) -> list[Line]:
    """Return the lines that count of a start's journals, in order of time; a line that was cut off is left out.

    An earlier job may have appended to files of the same names: what is older than the start is not the start's.
    Raises OSError and ValueError.
    """
    lines: list[Line] = []
    for path in (*log_dir.glob(f"journal_{start.number}.jsonl"), *log_dir.glob(f"standby_{start.number}_*.jsonl")):
        place = int(path.stem.rpartition("_")[2]) if path.stem.startswith("standby") else 0
        with open_text(path) as file:
            read = [json.loads(line) for line in file if line.endswith("\n")]
        lines += [{**line, "controller": place} for line in read if line["unix_s"] >= start.begun_unix_s]
    return leading_lines(lines)


def start_table(rows: Sequence[Mapping[str, Any]], pids: Mapping[str, int]) -> Table:
    """Lay out what lies where: a row for each rank, or for each node of a large job."""
    by_rank = any(row["shards"] for row in rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in (
        ("rank", "node", "pid", "holds", "also on") if by_rank else ("ranks", "node", "their shards also on")
    ):
        table.add_column(heading, overflow="fold")
    for row in rows:
        also_on = "; ".join(row["also_on"])
        cells = [row["ranks"], row["host"]]
        cells += [str(pids.get(row["ranks"], "")), "; ".join(row["shards"])] if by_rank else []
        table.add_row(*(Text(cell) for cell in (*cells, also_on)))
    return table


def with_stacks(story: FaultStory, lines: Sequence[Line], log_dir: Path) -> FaultStory:
    """Gather the stacks that the ranks saved for a hang, or were asked for before they were ended, and quote where the culprits
    stood. Raises OSError."""
    suspects: Sequence[int] = [culprit.rank for culprit in story.culprits]
    blocks = read_asked(log_dir, {culprit.rank: culprit.pid for culprit in story.culprits})
    if story.kind == "hung":
        hung = next(line["fields"] for line in reversed(lines) if line["event"] == "hung")
        blocks, suspects = blocks | read_blocks(log_dir, hung["text"]), hung["ranks"]
    if not blocks:
        return story
    path = log_dir / f"stacks_{story.start}.txt"
    gather(path, blocks, suspects)
    culprits = tuple(replace(c, stood=main_frames(blocks.get(c.rank, ""))) for c in story.culprits)
    return replace(story, culprits=culprits, stacks=str(path))
