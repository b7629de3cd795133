"""Reports the job: a table at each attempt, each fault, a summary at the end; and the same as JSON lines.

Owns what is reported, and by which agent: the one on rank 0's node. Another agent reports a fault that a standby on its node led, when rank 0's
agent cannot read that journal. Never decides anything; an unreadable journal costs a warning only.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from ttp.checkpoint.format.durable import step_of_directory
from ttp.exchange import last_step, saved_alone, time_marks
from ttp.exchange.last_step import LastStep
from ttp.launch.report.incident import NOTICE, AttemptEnd, Report, false_alarms, report_fields, report_of, with_stacks
from ttp.launch.report.journals import Line, journal_sizes, read_journals
from ttp.launch.report.merge import Earlier, earlier
from ttp.launch.report.recovery import Recovery, recoveries, recovery_fields, recovery_lines
from ttp.launch.report.regression import gone_back
from ttp.launch.report.render import attempt_table, fault_lines, labelled
from ttp.launch.report.saved_alone_report import report_of_save
from ttp.launch.report.slow_ranks import slow_rank_events, slow_rank_text
from ttp.launch.report.story_file import ReportFile, read_events
from ttp.launch.report.summary import Summary, mirror_text, summary_lines
from ttp.launch.report.time_use import (
    AttemptTime,
    Loss,
    TimeUse,
    attempt_fields,
    attempt_time,
    read_attempt,
    time_use,
    with_fault,
    with_repeats,
    without_fault,
)
from ttp.text.console import open_console
from ttp.text.wording import counted

log = logging.getLogger("ttp.launch")

UNANNOUNCED = (
    "the ranks exited with code 0 without calling close(), and the controller declared them dead. No fault is counted. Only the trainer knows"
    " whether the weights are on disk. Decorate the training function with ttp.ttp_to_persist, or call close() on every rank at its end"
)
CLOSE_ON_ALL = (
    "none: all workers on this node succeeded. A rank that exits without calling close() is reported as failed by ranks still waiting in"
    " close(). Call close() on every rank, or decorate the training function with ttp.ttp_to_persist"
)
_NEVER_ASSEMBLED = "no journal on this node shows that all ranks were protected"
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What a journal that is missing, cut off or altered may raise."""


def _clock_s() -> float:
    """Return the wall clock against one that is never set."""
    return time.time() - time.monotonic()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStart:
    """One attempt, as the agent on rank 0's node knows it."""

    number: int
    begun_unix_s: float
    world_size: int = 0
    """0: not known."""
    begins_here: bool = False
    """Rank 0 begins it on this node: it moves an earlier launch's files away before it has the first controller."""
    clock_s: float = field(default_factory=_clock_s)
    """Where the wall clock was when it began."""

    @property
    def since_unix_s(self) -> float:
        """From when on files are this attempt's; where the clock was set back, by that clock."""
        return 0.0 if self.begins_here else self.begun_unix_s + min(0.0, _clock_s() - self.clock_s)


class Reporter:
    """Reports one job. `watch` runs on the thread of an attempt's controller client, the rest on the agent's."""

    def __init__(
        self,
        report_path: Path | None = None,
        clock: Callable[[], float] = time.time,
        *,
        launch: str = "",
        on_event: Callable[[str], None] | None = None,
    ) -> None:
        """`on_event(line)`: is given each event as its line; must return at once. `report_path`: the file of the JSON lines (default: `story.jsonl` beside the journals of the first attempt; once that is not writable,
        beside those of a later one). `launch`: names this agent in each line: other agents append to the same file."""
        self._clock = clock
        self._begun_unix_s = clock()
        self._lock = threading.Lock()  # guards all below
        self._file = ReportFile(report_path, self._lock, launch, on_event)
        self._here = False
        self._starts = 0
        self._first = 0
        """The first attempt that this agent took part in."""
        self._number = -1
        """Of the current attempt."""
        self._reported: set[int] = set()
        """Attempts whose end this agent has reported, with or without a fault."""
        self._unreported: tuple[AttemptStart, AttemptEnd] | None = None
        """An attempt that another node's agent reports, unless that node is lost: then rank 0 moves to another node."""
        self._ended_in_fault = False
        """Whether the newest attempt that was reported here ended in a fault."""
        self._last: LastStep | None = None
        """Where its training ended, unless in a fault."""
        self._protected = False
        """A rank has called `ttp.start`: it has reported where its journals are."""
        self._introduced = -1
        self._rows: Any = None
        self._copied_steps: list[int] = []
        """Steps that were saved from copies in memory."""
        self._reports: list[Report] = []
        self._again: dict[int, int] = {}
        """Attempt -> steps that it has repeated though the fault before had kept them."""
        self._times: list[AttemptTime] = []
        """Where the time of the attempts that were reported here went."""
        self._first_steps: list[int] = []
        """Attempts that have completed a step."""
        self._false_alarms = 0
        self._mirror: Mapping[str, Any] | None = None
        """The last report of this node's mirror process."""
        self._lost_s = 0.0
        self._recovered: list[Recovery] = []
        self._excluded: list[str] = []
        """The nodes that were excluded, and why."""
        self._followed = -1
        """The attempt whose table was shown; used by `follow` only."""
        self._sizes: Mapping[str, int] = {}
        """Of its journals, as `follow` read them last."""
        self._slow_events = 0
        """How many events of slow ranks the current attempt has had."""
        self._down_since_unix_s: float | None = None

    def begin(self, here: bool, number: int | None = None) -> None:
        """Note the beginning of an attempt. `here`: rank 0 is on this node. number: of this attempt in its job (None: the next one)."""
        with self._lock:
            self._here = here
            self._starts += 1
            self._number = self._number + 1 if number is None else number
            self._slow_events = 0
            if self._starts == 1:
                self._first = self._number
            unreported, self._unreported = self._unreported, None
            if here and unreported is not None:
                self._guarded_end(*unreported, introduce=False)

    def place_taken(self, attempt: int, spare: str, lost: str) -> None:
        """Write to story.jsonl that a spare node takes a lost node's place from this attempt on."""
        with self._lock:
            self._write("spare", {"start": attempt, "node": spare, "in_place_of": lost})

    def excluded(self, node: str, reason: str) -> None:
        """Note that a sick node takes no part any more, and write it to story.jsonl."""
        with self._lock:
            self._excluded.append(f"{node}: {reason}")
            if self._here:
                self._write("sick_node", {"start": self._number, "node": node, "reason": reason})

    def sick_here(self, node: str, reason: str, *, shared: bool) -> None:
        """Report that this node is sick: to the command on events at once, and where no other agent learns of it (not `shared`) as `excluded`."""
        if not shared:
            self.excluded(node, reason)
        if not (self._here and not shared):
            self._file.announce(self._clock(), "sick_node", {"start": self._number, "node": node, "reason": reason})

    def saved_from_copies(self, attempt: int, step: int, path: str) -> None:
        """A step was saved from copies in memory, before this attempt: the fault before it has lost fewer steps than its controller knew."""
        with self._lock:
            if not (self._here and self._reports):
                return
            last = self._reports[-1]
            lost = last.incident.steps_lost
            if lost is not None:
                lost = max(0, lost - (step - (step_of_directory(Path(last.incident.goes_on_from)) or 0)))
            self._reports[-1] = replace(last, incident=replace(last.incident, steps_lost=lost, goes_on_from=path))
            self._copied_steps.append(step)
            self._write("copies", {"start": last.start, "step": step, "path": path, "steps_lost": lost})
            what = "it is not known how many steps are" if lost is None else counted(lost, "step")
            self._print(labelled([("saved", f"step {step} from copies in memory: {what} lost")]))

    def watch(self, attempt: AttemptStart, log_dir: Path) -> bool:
        """Show the attempt's table when all ranks are registered; False: not yet."""
        try:
            lines = read_journals(log_dir, attempt.number, attempt.since_unix_s)
        except _UNREADABLE as error:
            log.warning("attempt %d: cannot read the table of shards: %s", attempt.number, error)
            return True
        with self._lock:
            return self._introduce(attempt, log_dir, lines)

    def follow(self, attempt: AttemptStart, log_dir: Path) -> bool:
        """Show the attempt's table, and later each fault from which it has recovered, and its slow ranks. Call it every second or so; returns False: it never has done."""
        if self._followed != attempt.number:
            if self.watch(attempt, log_dir):
                self._followed = attempt.number
        elif (sizes := journal_sizes(log_dir, attempt.number)) != self._sizes:
            self._sizes = sizes
            try:
                lines = read_journals(log_dir, attempt.number, attempt.since_unix_s)
                with self._lock:
                    self._report_recoveries(attempt, lines, log_dir)
                    self._report_slow_ranks(attempt, lines, ended=False)
            except _UNREADABLE as error:
                log.warning("attempt %d: cannot read what has happened: %s", attempt.number, error)
        return False

    def end(self, attempt: AttemptStart, ending: AttemptEnd) -> None:
        """Report an attempt's fault, if it had one, after its workers and controllers on this node have ended."""
        with self._lock:
            if self._here or _known_only_here(attempt, ending):
                self._guarded_end(attempt, ending, introduce=True)
            else:
                self._unreported = (attempt, ending)

    def mirror(self, fields: Mapping[str, Any]) -> None:
        """Write to story.jsonl what this node's mirror process has done, and keep how far it is behind."""
        with self._lock:
            self._mirror = fields
            self._write("mirror", fields)

    def hold(self, attempt: int, cause: str, ranks: Sequence[int], up_to_s: float) -> None:
        """Write to story.jsonl that these ranks of this node have so long to save and exit, and why."""
        if self._here:  # read without the lock, which a hanging disk may hold
            fields = {"start": attempt, "cause": cause, "ranks": list(ranks), "up_to_s": round(up_to_s, 3)}
            self._file.write_in_thread(self._clock(), "hold", fields)

    def held(self, attempt: int, held_s: float, why: str, ranks: Sequence[int]) -> None:
        """Write to story.jsonl that the wait for this node's ranks has ended; `ranks` still run, and are ended because of `why`."""
        if self._here:
            fields = {"start": attempt, "held_s": round(held_s, 3), "why": why, "ranks": list(ranks)}
            self._file.write_in_thread(self._clock(), "held", fields)

    def finish(self, result: str, why: str = "") -> None:
        """Report the end of the job on this node. `why`: the reason, if `result` does not have it. An agent that is not on rank 0's node only
        writes to story.jsonl, and nothing after a success."""
        with self._lock:
            if not self._here:
                if not result.startswith("succeeded"):
                    fields = {"node": socket.gethostname(), "result": result, "why": why, "starts": self._starts}
                    self._write("left", fields)
                return
            now = self._clock()
            if self._down_since_unix_s is not None:
                self._lost_s += now - self._down_since_unix_s
                self._down_since_unix_s = None
            summary = self._sum_up(result, now)
            if summary is None:  # readers that wait for the end must still see it
                self._write("end", {"result": result, "starts": self._first + self._starts, "why": why})
                return
            summary = replace(summary, why=why)
            self._write("end", asdict(summary))
            self._print(summary_lines(summary))

    # --- with the lock held ---

    def _sum_up(self, result: str, now: float) -> Summary | None:
        """Summarize the job; where other agents' lines are malformed, from this agent's reports only. None: that fails too."""
        for others, without in ((self._earlier(), ""), (Earlier(), ", also without the other agents' reports")):
            try:
                return self._summary(result, now, others)
            except _UNREADABLE as error:
                log.warning("cannot summarize the job%s: %s: %s", without, type(error).__name__, error)
        return None

    def _summary(self, result: str, now: float, others: Earlier) -> Summary:
        """Summarize the job from this agent's reports, and from those of other nodes' agents before and in between."""
        faults = sorted([*map(report_fields, self._reports), *others.faults], key=lambda fault: int(fault["start"]))
        known = {*self._reported, *(int(fault["start"]) for fault in others.faults)}
        whole = self._first == 0 or others.begun_unix_s is not None
        begun = min(self._begun_unix_s, others.begun_unix_s or self._begun_unix_s)
        recovered = [*map(recovery_fields, self._recovered), *others.recovered]
        losses = [fault["steps_lost"] for fault in (*faults, *recovered)]
        again = {**others.again, **self._again}
        protected = self._protected or self._first > 0 or any(number not in self._reported for number in known)
        return Summary(
            result=result,
            starts=self._first + self._starts,
            faults=len(faults) + len(recovered),
            recovered=len(recovered),
            excluded=tuple(self._excluded),
            notices=sum(fault["kind"] == NOTICE for fault in faults),
            false_alarms=self._false_alarms,
            saved_steps=tuple(
                sorted(
                    [
                        *(fault["saved"]["step"] for fault in (*faults, *recovered) if fault["saved"] is not None),
                        *self._copied_steps,
                    ]
                )
            ),
            steps_lost=sum(lost or 0 for lost in losses) + sum(again.values()),
            steps_again=sum(again.values()),
            unknown_losses=sum(lost is None for lost in losses),
            lost_s=round(self._lost_s + others.lost_s, 3),
            lasted_s=round(now - begun, 3),
            untold_starts=tuple(number for number in range(self._number + 1) if number not in known),
            lasted_since=0 if whole else self._first,
            ended_in_fault=self._ended_in_fault,
            last=self._last,
            mirror=mirror_text(self._mirror) if self._mirror is not None else "",
            protected=protected,
            time_use=self._time_use(now, others, faults, again) if protected else None,
        )

    def _time_use(
        self, now: float, others: Earlier, faults: Sequence[Mapping[str, Any]], again: Mapping[int, int]
    ) -> TimeUse | None:
        """Return where the job's time went, as far as it is known on this node."""
        losses = {}
        for fault in faults:
            start, lost = int(fault["start"]), fault["steps_lost"]
            kept = step_of_directory(Path(fault["goes_on_from"])) if fault["goes_on_from"] else None
            losses[start] = Loss(steps=lost, kept_step=kept)
        times = [*self._times, *map(read_attempt, others.times)]
        return time_use(times, now, losses=with_repeats(losses, again))

    def _earlier(self) -> Earlier:
        """Read other agents' reports of the attempts that were not reported here; nothing where their file is not on this node."""
        path = self._file.path
        if path is not None and not self._reported.issuperset(range(self._number + 1)):
            try:
                return earlier(read_events(path), self._reported, self._number, self._first_steps)
            except FileNotFoundError:
                pass
            except _UNREADABLE as error:
                log.warning("cannot read the other agents' reports from %s: %s", path, error)
        return Earlier()

    def _guarded_end(self, attempt: AttemptStart, ending: AttemptEnd, *, introduce: bool) -> None:
        try:
            if self._end(attempt, ending, introduce):
                self._reported.add(attempt.number)
        except _UNREADABLE as error:
            log.warning("cannot report the end of attempt %d from %s: %s", attempt.number, ending.log_dir, error)

    def _introduce(self, attempt: AttemptStart, log_dir: Path, lines: Sequence[Line]) -> bool:
        assembled = next((line for line in lines if line["event"] == "assembled"), None)
        if assembled is None or self._introduced == attempt.number:
            return assembled is not None
        self._introduced = attempt.number
        self._write_beside(log_dir)
        if self._down_since_unix_s is not None:
            self._lost_s += max(0.0, float(assembled["unix_s"]) - self._down_since_unix_s)
            self._down_since_unix_s = None
        fields = assembled["fields"]
        pids = {str(line["fields"]["rank"]): line["fields"]["pid"] for line in lines if line["event"] == "registered"}
        standbys = len(fields["standbys"])
        behind = "1 standby" if standbys == 1 else f"{standbys or 'no'} standbys"
        shown = ("world_size", "survives", "standbys", "warnings", "rows")
        self._write("start", {"start": attempt.number, **{name: fields[name] for name in shown}, "pids": pids})
        if report_of(attempt.number, lines, _NOTHING_KNOWN) is not None:  # the fault came between two reads
            self._print([f"attempt {attempt.number} as it was before its fault:"])
        ranks = counted(fields["world_size"], "rank")
        survives = f"the job survives: {fields['survives']}"
        self._print([f"--- attempt {attempt.number}: {ranks}, a controller with {behind}; {survives} ---"])
        if fields["rows"] != self._rows:  # a restart of the same ranks needs no second table
            self._rows = fields["rows"]
            self._show(attempt_table(fields["rows"], pids), soft_wrap=False)
        self._print([f"warning: {text}" for text in fields["warnings"]])
        return True

    def _end(self, attempt: AttemptStart, ending: AttemptEnd, introduce: bool) -> bool:
        """Report an attempt's fault, if it had one; return whether it is known how it ended."""
        log_dir = ending.log_dir
        lines = read_journals(log_dir, attempt.number, attempt.since_unix_s) if log_dir is not None else []
        if log_dir is not None:
            if introduce:  # a short attempt, which ended before the journals were read
                self._introduce(attempt, log_dir, lines)
            self._write_beside(log_dir)
        if introduce and self._introduced != attempt.number:
            self._write_unprotected(attempt, ending)
        self._false_alarms += false_alarms(lines)
        self._report_recoveries(attempt, lines, log_dir)
        if introduce and self._here:  # else another node has reported them
            self._report_slow_ranks(attempt, lines, ended=True)
        account = saved_alone.read(log_dir, attempt.number, attempt.since_unix_s) if log_dir is not None else None
        report = report_of(attempt.number, lines, ending, report_of_save(attempt.number, account) if account else None)
        if ending.first_step is not None:
            self._compare(attempt.number, ending.first_step, ending.skipped)
        self._ended_in_fault, self._last = report is not None, None
        if ending.succeeded and log_dir is not None:
            self._last = last_step.read(log_dir, attempt.number, attempt.since_unix_s)
        unannounced = report is not None and report.is_unannounced(ending)
        known = self._time_of(attempt, lines, log_dir)
        if report is None:
            self._times += [known] if lines else []
            return bool(lines) or ending.elsewhere is not None
        if unannounced and report.incident.saved is None:
            self._ended_in_fault = False
            self._times.append(known)
            ranks = [culprit.rank for culprit in report.incident.culprits]
            self._write("unannounced", {"start": attempt.number, "ranks": ranks})
            log.warning("attempt %d: %s", attempt.number, UNANNOUNCED)
            return True
        if log_dir is not None:
            report = with_stacks(report, lines, log_dir, f"stacks_{attempt.number}.txt")
        began_unix_s = report.began_unix_s or self._clock()
        copied = any(line["event"] == "assembled" and line["fields"].get("copied") for line in lines)
        following = CLOSE_ON_ALL if unannounced else ending.next
        report = replace(report, next=following, began_unix_s=began_unix_s, copied=copied)
        self._reports.append(report)
        self._down_since_unix_s = self._down_since_unix_s or began_unix_s
        known = with_fault(known, began_unix_s, report.incident.took_ms)
        self._times.append(known)
        self._write("fault", {**report_fields(report), "time": attempt_fields(known)})
        self._print(fault_lines(report))
        return True

    def _time_of(self, attempt: AttemptStart, lines: Sequence[Line], log_dir: Path | None) -> AttemptTime:
        """Return where an attempt's time went, without its fault."""
        marks = time_marks.read(log_dir, attempt.number, attempt.since_unix_s) if log_dir is not None else []
        begun = self._begun_unix_s if attempt.number == 0 else attempt.begun_unix_s
        known = without_fault(attempt_time(attempt.number, lines, marks, begun, attempt.world_size))
        return replace(known, last_step=max(known.last_step, self._last.step if self._last is not None else 0))

    def _report_recoveries(self, attempt: AttemptStart, lines: Sequence[Line], log_dir: Path | None) -> None:
        """Report the recoveries of an attempt that were not reported yet."""
        known = sum(each.report.start == attempt.number for each in self._recovered)
        for number, recovery in enumerate(recoveries(attempt.number, lines)[known:], known + 1):
            if log_dir is not None:
                with contextlib.suppress(OSError):  # it is reported without them
                    stacks = f"stacks_{attempt.number}_{number}.txt"
                    recovery = replace(recovery, report=with_stacks(recovery.report, lines, log_dir, stacks))
            self._recovered.append(recovery)
            self._lost_s += (recovery.report.incident.took_ms or {}).get("total", 0.0) / 1e3
            self._write("recovered", recovery_fields(recovery))
            self._print(recovery_lines(recovery))

    def _report_slow_ranks(self, attempt: AttemptStart, lines: Sequence[Line], *, ended: bool) -> None:
        """Report which of an attempt's ranks have become slow, and which are no more, that were not reported yet."""
        for event, fields in slow_rank_events(attempt.number, lines, ended=ended)[self._slow_events :]:
            self._slow_events += 1
            self._write(event, fields)
            self._print(labelled([("slow", slow_rank_text(event, fields))]))

    def _compare(self, attempt: int, first_step: int, skipped: str) -> None:
        """Report an attempt that resumed from an older step than the fault before it, or an earlier job, had kept."""
        known = self._reported.issuperset(range(attempt))
        back = gone_back(self._reports, attempt, first_step, self._first_steps, skipped if known else "")
        self._first_steps.append(attempt)
        if back is None:
            return
        self._again[attempt] = back.steps
        self._write("again", {"start": attempt, **asdict(back)})
        log.warning("attempt %d %s", attempt, back.text(first_step))

    def _print(self, lines: Sequence[str]) -> None:
        if lines:
            self._show("\n".join(lines))

    def _show(self, what: str | Table, *, soft_wrap: bool = True) -> None:
        """Print on stderr, after the same was written to story.jsonl. A lost console loses only what is printed."""
        with suppress(OSError, ValueError):  # ValueError: the stream was closed
            open_console(sys.stderr, soft_wrap=soft_wrap, ends_program=False).print(what, markup=False)

    def _write_unprotected(self, attempt: AttemptStart, ending: AttemptEnd) -> None:
        """Write the line of an attempt whose ranks were never all protected, as far as this node's journals show: its begin was not reported."""
        self._introduced = attempt.number
        pids = {str(rank): pid for rank, pid in ending.pids.items()}
        nothing = {"survives": "", "standbys": [], "warnings": [_NEVER_ASSEMBLED], "rows": []}
        fields = {"start": attempt.number, "world_size": attempt.world_size, **nothing, "pids": pids}
        self._file.write(attempt.begun_unix_s, "start", fields)

    def _write(self, event: str, fields: Mapping[str, Any]) -> None:
        self._file.write(self._clock(), event, fields)

    def _write_beside(self, log_dir: Path) -> None:
        self._protected = True
        self._file.beside(log_dir)


_NOTHING_KNOWN = AttemptEnd(log_dir=None, exits={}, first_exit_unix_s=None, next="", pids={})


def _known_only_here(attempt: AttemptStart, ending: AttemptEnd) -> bool:
    """Return whether a standby on this node led the ranks and its journal is on this node's own disk, where rank 0's agent cannot read it."""
    if ending.log_dir is None:
        return False
    try:
        if (ending.log_dir / f"journal_{attempt.number}.jsonl").exists():
            return False
        return bool(read_journals(ending.log_dir, attempt.number, attempt.since_unix_s))
    except _UNREADABLE:
        return False
