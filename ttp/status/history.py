"""What a job's files know: its attempts, its faults, and how it ended.

Owns the reading of journals and of the launchers' report together. Asks no controller.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from ttp.exchange import last_step, time_marks
from ttp.inputs import checked
from ttp.launch.report.journals import Line, read_journals
from ttp.launch.report.merge import ReportLine, of_this_job
from ttp.launch.report.story_file import REPORT_NAME, read_events
from ttp.launch.report.time_use import (
    AttemptTime,
    Loss,
    TimeUse,
    attempt_time,
    read_attempt,
    read_use,
    with_fault,
    with_repeats,
    without_fault,
)
from ttp.proto.incident import EVENT, STAGES, read_incident
from ttp.status.answer import End, FaultRow, HolderRow
from ttp.status.find_job import journals
from ttp.status.remembered import Remembered, state_of

FALSE_ALARM, IN_PLACE = "false alarm", "in place"
RESTARTED = "restarted"
"""A fault's last stage: from the order to exit, or to continue, until the next finished step."""
_SAME_S = 0.01
"""A fault's row has its times in milliseconds."""
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What a file that is missing, cut off or altered may raise."""
_LATEST = 2.5e11
"""The end of the year 9891: no time is later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastAttempt:
    """One attempt, by its journals here."""

    number: int
    begun_unix_s: float
    """When its first rank came."""
    last_unix_s: float
    """Of its newest line."""
    assembled_unix_s: float | None
    world_size: int
    survives: str
    standbys: tuple[str, ...]
    last_step: int
    """The newest step that is known to be finished; 0: none is."""
    directories: tuple[str, ...]
    """Where checkpoints were written or published."""
    processes: Mapping[int, tuple[str, int]]
    """(host, pid) of each rank that came."""
    faults: tuple[FaultRow, ...]
    """In order of time."""
    holders: tuple[HolderRow, ...]
    finished: bool
    """All ranks have finished training."""
    time: AttemptTime
    """Where its time went."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """One job, by its files."""

    attempts: tuple[PastAttempt, ...] = ()
    faults: tuple[FaultRow, ...] = ()
    """In order of time, with what the launchers have added."""
    end: End | None = None
    next: str = ""
    """What follows the newest fault, by the launchers' report; empty: another attempt runs, or it is not known."""
    notes: tuple[str, ...] = ()
    times: tuple[AttemptTime, ...] = ()
    """Where the attempts' time went: those of journals here, and those that their launchers have reported."""
    losses: Mapping[int, Loss] = field(default_factory=dict)
    """Attempt -> what its fault has cost."""
    use: TimeUse | None = None
    """What the launcher has summed up at the job's end."""
    excluded: tuple[str, ...] = ()
    """Nodes whose health checks failed, each with the reason."""

    @property
    def last_step(self) -> int | None:
        """The newest step that is known to be finished; None: none is."""
        ended = self.end.last_step if self.end is not None and self.end.last_step is not None else 0
        return max((ended, *(attempt.last_step for attempt in self.attempts))) or None

    @property
    def steps_lost(self) -> int:
        """Finished steps that were trained again, or have to be, as far as it is known: those that faults have cost, and those that an attempt has
        repeated though they were kept."""
        kept = sum(fault.steps_lost or 0 for fault in self.faults if fault.outcome == IN_PLACE)
        return kept + sum(loss.steps or 0 for loss in self.losses.values())


def read(log_dir: Path) -> History:
    """Return what the files of a folder know. What cannot be read is left out, with a note."""
    attempts: list[PastAttempt] = []
    notes: list[str] = []
    try:
        files = list(journals(log_dir))
    except OSError as error:
        return History(notes=(f"cannot read {log_dir}: {error.strerror or error}",))
    for number in sorted({attempt for _, attempt, _ in files}):
        try:
            own = [path for path, attempt, _ in files if attempt == number]
            marks = time_marks.path_of(log_dir, number)
            state = state_of([*own, *([marks] if marks.exists() else [])])
            found = _attempts.get((log_dir, number), state, partial(_attempt, log_dir, number))
        except _UNREADABLE as error:
            text = f"the journal of attempt {number} in {log_dir} {_fault_of(error)}: it is passed over"
            notes.append(text)
            continue
        attempts += [found] if found is not None else []
    path = log_dir / REPORT_NAME
    try:
        return _shown(_together(log_dir, attempts, read_report(path), notes))
    except _UNREADABLE as error:
        advice = "" if isinstance(error, OSError) else ". Move the file away"
        text = f"{path} {_fault_of(error)}: it is passed over, and the journals beside it are read alone{advice}"
        return _together(log_dir, attempts, [], [*notes, text])


def _fault_of(error: Exception) -> str:
    """Say what a file is: one that this user may not read is not broken."""
    return f"{'cannot be read' if isinstance(error, OSError) else 'is broken'} ({_briefly(error)})"


def _shown(history: History) -> History:
    """Return it. Raises ValueError where it has a number that cannot be shown. Of the attempts that is known."""
    for part in ("faults", "end", "times", "losses", "use"):
        _check_numbers(getattr(history, part), part)
    return history


def _check_numbers(value: object, path: str) -> None:
    """Raise ValueError for a number that is not finite, or greater than any time and any step is."""
    if isinstance(value, float):
        checked.number(value, path, -_LATEST, _LATEST)
    elif type(value) is int:
        checked.integer(value, path, -checked.INT64_MAX)
    elif isinstance(value, Mapping):
        for name, each in value.items():
            _check_numbers(each, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            _check_numbers(each, f"{path}[{number}]")
    elif dataclasses.is_dataclass(value):
        for each in dataclasses.fields(value):
            _check_numbers(getattr(value, each.name), f"{path}.{each.name}")


def _briefly(error: BaseException) -> str:
    text = f"the key {error} is missing" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:200]


def read_report(path: Path) -> list[ReportLine]:
    """Return a launchers' report's lines, without those that were cut off; none where there is no file. Raises OSError, and ValueError for
    a file that is something else."""
    try:
        return [*read_events(path)]
    except FileNotFoundError:
        return []


# --- journals ---


_attempts: Remembered[tuple[Path, int], PastAttempt | None] = Remembered(1024)
"""By folder and number. One has half a MiB at 2,000 ranks."""


def _attempt(log_dir: Path, number: int) -> PastAttempt | None:
    """Read an attempt's journals; None: nothing is in them so far."""
    lines = read_journals(log_dir, number, 0.0)
    if not lines:
        return None
    registered = [line["fields"] for line in lines if line["event"] == "registered"]
    assembled = next((line for line in lines if line["event"] in ("assembled", "took_over")), None)
    whole: Mapping[str, Any] = next((line["fields"] for line in lines if line["event"] == "assembled"), {})
    begun_unix_s = float(lines[0]["unix_s"])
    times = attempt_time(number, lines, time_marks.read(log_dir, number, 0.0), begun_unix_s)
    directories = [line["fields"]["directory"] for line in lines if line["event"] == "write_sent"]
    directories += [str(Path(line["fields"]["path"]).parent) for line in lines if line["event"] == "published"]
    found = PastAttempt(
        number=number,
        begun_unix_s=begun_unix_s,
        last_unix_s=float(lines[-1]["unix_s"]),
        assembled_unix_s=float(assembled["unix_s"]) if assembled is not None else None,
        world_size=int(whole.get("world_size", len({fields["rank"] for fields in registered}))),
        survives=str(whole.get("survives", "")),
        standbys=tuple(map(str, whole.get("standbys", ()))),
        last_step=times.last_step,
        directories=tuple(dict.fromkeys(directories)),
        processes={int(fields["rank"]): (str(fields["host"]), int(fields["pid"])) for fields in registered},
        faults=tuple(_faults(number, lines)),
        holders=tuple(_holder(row) for row in whole.get("rows", ())),
        finished=any(line["event"] == "finished" for line in lines),
        time=times,
    )
    _check_numbers(found, "attempt")
    return found


def _holder(row: Mapping[str, Any]) -> HolderRow:
    shards, also_on = ([str(each) for each in row[name]] for name in ("shards", "also_on"))
    return HolderRow(str(row["ranks"]), str(row["host"]), shards, also_on)


def _faults(number: int, lines: Sequence[Line]) -> Iterator[FaultRow]:
    """Yield what a journal has of faults, false alarms among them, in order."""
    frozen: Line | None = None
    finished = False
    for line in lines:
        fields, unix_s = line["fields"], float(line["unix_s"])
        finished = finished or line["event"] == "finished"
        if line["event"] == "freeze_sent":
            frozen = frozen or line
        elif line["event"] == "thawed" and frozen is not None:
            began, first = float(frozen["unix_s"]), frozen["fields"]
            yield FaultRow(
                attempt=number, unix_s=began, kind=FALSE_ALARM, ranks=[int(rank) for rank in first["culprits"]], cause=str(first["text"]), outcome=FALSE_ALARM,
                detail="", step=None, steps_lost=0, took_s=round(unix_s - began, 3),
            )  # fmt: skip
            frozen = None
        elif (
            line["event"] == EVENT and not finished
        ):  # a controller that is stopped while its ranks leave declares them dead
            frozen = None
            yield _of_journal(number, unix_s, fields)


def _of_journal(number: int, unix_s: float, fields: Mapping[str, Any]) -> FaultRow:
    incident = read_incident(fields)
    took_s = round((incident.took_ms or {}).get("total", 0.0) / 1e3, 3)
    named = {
        "took_ms": incident.took_ms,
        "culprits": [{"rank": each.rank, "cause": each.cause} for each in incident.culprits],
        "saved": fields["saved"],
        "not_saved": incident.not_saved,
        "kind": incident.kind,
        "steps_lost": incident.steps_lost,
    }
    row = _row(number, unix_s - took_s, took_s, named)
    detail = row.detail if incident.saved is not None else ""
    return replace(row, outcome=IN_PLACE, detail=detail) if incident.in_place else row


def _row(number: int, began_unix_s: float, took_s: float | None, fields: Mapping[str, Any]) -> FaultRow:
    """Return a fault, by an incident's fields or those of a `fault` line."""
    saved, culprits = fields["saved"], fields["culprits"]
    return FaultRow(
        attempt=number,
        unix_s=began_unix_s,
        kind=str(fields["kind"]),
        ranks=[int(each["rank"]) for each in culprits],
        cause=next((str(each["cause"]) for each in culprits if each["cause"]), str(fields.get("elsewhere", ""))),
        outcome="saved" if saved is not None else "not saved",
        detail=str(saved["path"]) if saved is not None else str(fields["not_saved"]),
        step=int(saved["step"]) if saved is not None else None,
        steps_lost=_optional_int(fields["steps_lost"]),
        took_s=took_s,
        stages_s={
            stage: round(fields["took_ms"][stage] / 1e3, 3) for stage in STAGES if stage in (fields["took_ms"] or ())
        },
    )


# --- with the launchers' report ---


def _together(log_dir: Path, attempts: Sequence[PastAttempt], lines: Sequence[ReportLine], notes: list[str]) -> History:
    """Of an attempt's end the launchers know more than its controller; of what the job has survived without one, less."""
    reports = [place for place, line in enumerate(lines) if line["event"] in ("start", "fault")]
    last, begun_unix_s = (attempts[-1].number, attempts[-1].begun_unix_s) if attempts else (0, -inf)
    if reports:
        newest = lines[reports[-1]]
        if int(newest["start"]) > last and float(newest["unix_s"]) >= begun_unix_s:
            last = int(newest["start"])  # of the newest attempts another node may have the journals
    job = of_this_job(lines[: reports[-1] + 1] if reports else [], last)
    if job and attempts and attempts[0].number == 0 and float(job[-1]["unix_s"]) < attempts[0].begun_unix_s:
        job = []  # an earlier job's, of which this one's lines are still to come
    since = lines[lines.index(job[0]) :] if job else [] if attempts else lines
    copied = {int(line["start"]): line["steps_lost"] for line in since if line["event"] == "copies"}
    reported = {int(line["start"]): _of_report(line, copied) for line in job if line["event"] == "fault"}
    over = {int(line["start"]) for line in since if line["event"] == "unannounced"}
    end = next((line for line in reversed(since) if line["event"] in ("end", "start", "fault")), None)
    ended = end if end is not None and end["event"] == "end" else None
    over |= {last} if ended is not None else set()
    faults = [
        fault
        for attempt in attempts
        for fault in attempt.faults
        if fault.outcome in (FALSE_ALARM, IN_PLACE) or attempt.number not in {*reported, *over}
    ]
    faults = sorted([*faults, *reported.values()], key=lambda fault: fault.unix_s)
    ends = {int(line["start"]): line for line in job if line["event"] == "fault"}
    again = {int(line["start"]): int(line["steps"]) for line in since if line["event"] == "again"}
    sick = [f"{line['node']}: {line['reason']}" for line in since if line["event"] == "sick_node"]
    following = str(job[-1]["next"]) if job and job[-1]["event"] == "fault" else ""
    times = _times(attempts, ends, over, ended)
    return History(
        attempts=tuple(attempts),
        faults=tuple(_with_restart(fault, times) for fault in faults),
        end=_end(log_dir, attempts, ended, faults),
        next=following,
        notes=tuple(notes),
        times=times,
        losses=_losses(faults, again),
        use=read_use(ended["time_use"]) if ended is not None and ended.get("time_use") else None,
        excluded=tuple(dict.fromkeys(sick)),
    )


def _times(
    attempts: Sequence[PastAttempt],
    ends: Mapping[int, ReportLine],
    over: Collection[int],
    end: ReportLine | None,
) -> tuple[AttemptTime, ...]:
    """Return the attempts' times, as their launchers have reported them where they have."""
    found = {}
    for attempt in attempts:
        known, number = attempt.time, attempt.number
        if number in ends:
            known = with_fault(
                known, float(ends[number]["began_unix_s"]) or float(ends[number]["unix_s"]), ends[number]["took_ms"]
            )
        found[number] = without_fault(known) if number in over and number not in ends else known
    found |= {number: read_attempt(line["time"]) for number, line in ends.items() if "time" in line}
    last = max(found, default=-1)
    if end is not None and end.get("last") and last in found:
        found[last] = replace(found[last], last_step=max(found[last].last_step, int(end["last"]["step"])))
    return tuple(found[number] for number in sorted(found))


def _with_restart(fault: FaultRow, times: Sequence[AttemptTime]) -> FaultRow:
    """Return the fault with its last stage, where its end and the next finished step are known and no other fault came between them."""
    if fault.took_s is None or fault.outcome == FALSE_ALARM:
        return fault
    ended_unix_s = fault.unix_s + fault.took_s
    if fault.outcome == IN_PLACE:
        own = [pause for time in times if time.number == fault.attempt for pause in time.pauses]
        place = next((i for i, pause in enumerate(own) if abs(pause.ended_unix_s - ended_unix_s) < _SAME_S), None)
        stepped = own[place].stepped_unix_s if place is not None else None
        later = own[place + 1].began_unix_s if place is not None and place + 1 < len(own) else inf
    else:
        following = next((time for time in times if time.number == fault.attempt + 1), None)
        stepped = following.stepped_unix_s if following is not None else None
        later = following.pauses[0].began_unix_s if following is not None and following.pauses else inf
    if stepped is None or not ended_unix_s <= stepped <= later:
        return fault
    return replace(fault, stages_s={**fault.stages_s, RESTARTED: round(stepped - ended_unix_s, 3)})


def _losses(faults: Sequence[FaultRow], again: Mapping[int, int]) -> dict[int, Loss]:
    found = {
        fault.attempt: Loss(steps=fault.steps_lost, kept_step=fault.step)
        for fault in faults
        if fault.outcome not in (FALSE_ALARM, IN_PLACE)
    }
    return with_repeats(found, again)


def _of_report(line: ReportLine, copied: Mapping[int, Any]) -> FaultRow:
    number, took_ms = int(line["start"]), line["took_ms"]
    fields = {**line, "steps_lost": copied.get(number, line["steps_lost"])}
    began = float(line["began_unix_s"]) or float(line["unix_s"])
    return _row(number, began, round(took_ms["total"] / 1e3, 3) if took_ms else None, fields)


def _end(
    log_dir: Path, attempts: Sequence[PastAttempt], line: ReportLine | None, faults: Sequence[FaultRow]
) -> End | None:
    """Return how the job ended: by the launcher's last line, or by a journal whose ranks have all finished, where there is no launcher."""
    newest = attempts[-1] if attempts else None
    if line is None:
        if newest is None or not newest.finished:
            return None
        known = last_step.read(log_dir, newest.number, 0.0)
        step, saved = (known.step, known.saved_step) if known is not None else (None, None)
        return End(newest.last_unix_s, "all ranks have finished", "", step, saved, None)
    last = line.get("last")
    step = int(last["step"]) if last else max((attempt.last_step for attempt in attempts), default=0) or None
    saved = last["saved_step"] if last else next((each.step for each in reversed(faults) if each.step), None)
    lost = line.get("steps_lost") if not line.get("unknown_losses") else None
    why = str(line["why"])
    return End(float(line["unix_s"]), str(line["result"]), why, step, _optional_int(saved), _optional_int(lost))


def _optional_int(value: Any) -> int | None:
    return None if value is None else int(value)
