"""What a job's time went into: new steps, starts, saves, the stages of faults, steps that were trained again (PURE).

Owns the parts, and the arithmetic: they add up to the whole. Time is counted in rank-seconds, so that an attempt with fewer ranks is short of the
others' time. Only what is known is taken from the steps: what the ranks do between two steps (evaluations, a trainer's own saves) counts as steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ttp.exchange.time_marks import SAVED, STEPPED, Mark
from ttp.inputs import checked
from ttp.launch.report.journals import Line, leading_lines
from ttp.proto.incident import EVENT
from ttp.text.wording import counted

PARTS = ("steps", "start", "saves", "detect", "decide", "dump", "regroup", "restart", "repeated", "false_alarms", "now", "end", "absent", "unknown")  # fmt: skip
"""`start` lasts until the job's first finished step, or until all ranks are registered where no more is known; `restart` from the order to exit, or to
continue, until the next one; `now` is a fault that is handled; `end` follows the last step; `absent` are ranks that an attempt has not, and others have."""
FAULT, IN_PLACE, FALSE_ALARM = "fault", "in place", "false alarm"
_STAGES = {"seen": "detect", "frozen": "decide", "decided": "decide", "regrouped": "regroup", "written": "dump", "published": "dump"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """No rank trains, from a fault's first sign on."""

    kind: str
    """`fault`: it ends the attempt. `in place`, `false alarm`: training continues."""
    began_unix_s: float
    ended_unix_s: float
    """The ranks were ordered to exit, or to continue."""
    took_ms: Mapping[str, float]
    """Of the stages that are known (`ttp.proto.incident.STAGES`)."""
    stepped_unix_s: float | None = None
    """When the next step was finished in the same attempt; None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptTime:
    """One attempt's moments, as far as they are known."""

    number: int
    world_size: int
    begun_unix_s: float
    assembled_unix_s: float | None = None
    """All ranks were registered."""
    stepped_unix_s: float | None = None
    """The first step was finished."""
    first_step: int = 0
    """That step; 0: not known."""
    last_step: int = 0
    """The newest step that is known to be finished."""
    ended_unix_s: float | None = None
    """All ranks had finished training; None: they have not, or it is not known."""
    saves: int = 0
    saves_s: float = 0.0
    """Training waited for so many saves, so long."""
    pauses: tuple[Pause, ...] = ()
    """In order; a `fault` is the last."""

    @property
    def fault(self) -> Pause | None:
        return self.pauses[-1] if self.pauses and self.pauses[-1].kind == FAULT else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What an attempt's fault has cost."""

    steps: int | None
    """Finished steps that the next attempt has to train again; None: not known."""
    kept_step: int | None = None
    """From where the next attempt goes on; None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeUse:
    """Where a job's time went."""

    ranks: int
    """The most that an attempt had."""
    whole_s: float
    rank_s: Mapping[str, float]
    """Rank-seconds of each of PARTS; together `ranks` times `whole_s`."""
    steps_again: int
    """Steps that were trained again, as far as that is known."""
    certain: bool
    """False: steps were trained again whose time, or number, is not known: it is among that of `steps`."""

    @property
    def share(self) -> float:
        """Return the share of the time that was new steps, from 0 to 1; not `certain`: at most so much."""
        whole = self.ranks * self.whole_s
        return min(1.0, self.rank_s["steps"] / whole) if whole > 0 else 0.0

    @property
    def goodput(self) -> float | None:
        """Return the share where it is certain."""
        return self.share if self.certain else None


# --- one attempt, from its journals ---


def attempt_time(
    number: int, lines: Sequence[Line], marks: Sequence[Mark], begun_unix_s: float, world_size: int = 0
) -> AttemptTime:
    """Return an attempt's moments by its journals and rank 0's marks. `world_size`: where the journals have none. Raises KeyError, TypeError,
    ValueError for lines that no controller writes."""
    lines = leading_lines(lines)
    assembled = next((line for line in lines if line["event"] == "assembled"), None)
    whole = assembled or next((line for line in lines if line["event"] == "took_over"), None)
    finished = next((float(line["unix_s"]) for line in lines if line["event"] == "finished"), math.inf)
    stepped = [mark for mark in marks if mark.what == STEPPED]
    saved = [mark for mark in marks if mark.what == SAVED]
    registered = {line["fields"]["rank"] for line in lines if line["event"] == "registered"}
    return AttemptTime(
        number=number,
        world_size=int(assembled["fields"]["world_size"]) if assembled else world_size or len(registered),
        begun_unix_s=begun_unix_s,
        assembled_unix_s=float(whole["unix_s"]) if whole is not None else None,
        stepped_unix_s=stepped[0].unix_s if stepped else None,
        first_step=stepped[0].step if stepped else 0,
        last_step=max([*(step for line in lines for step in finished_steps(line)), *(mark.step for mark in marks)], default=0),
        ended_unix_s=finished if finished < math.inf else None,
        saves=len(saved),
        saves_s=round(sum(mark.took_s for mark in saved), 3),
        pauses=tuple(_pauses([line for line in lines if line["unix_s"] <= finished], stepped)),
    )  # fmt: skip


def finished_steps(line: Line) -> list[int]:
    """Return the steps that a journal's line proves to be finished."""
    fields = line["fields"]
    if line["event"] == "frozen":
        return [*map(int, fields["state_steps"]), *map(int, fields["records"])]
    return [int(fields["step"])] if line["event"] in ("decided", "published", "regrouped") else []


def _pauses(lines: Sequence[Line], stepped: Sequence[Mark]) -> Iterable[Pause]:
    """Yield the pauses up to a fault that ends the attempt. A freeze that nothing ends is none yet."""
    frozen: float | None = None
    for line in lines:
        unix_s = float(line["unix_s"])
        if line["event"] == "freeze_sent":
            frozen = unix_s if frozen is None else frozen
        elif line["event"] == "thawed" and frozen is not None:
            yield Pause(kind=FALSE_ALARM, began_unix_s=frozen, ended_unix_s=unix_s, took_ms={})
            frozen = None
        elif line["event"] == EVENT:
            frozen = None
            took_ms = _milliseconds(line["fields"]["took_ms"])
            in_place = bool(line["fields"].get("in_place"))
            yield Pause(
                kind=IN_PLACE if in_place else FAULT,
                began_unix_s=unix_s - took_ms.pop("total", 0.0) / 1e3,
                ended_unix_s=unix_s,
                took_ms=took_ms,
                stepped_unix_s=next((mark.unix_s for mark in stepped if mark.unix_s > unix_s), None)
                if in_place
                else None,
            )
            if not in_place:
                return


def mean_step_s(attempt: AttemptTime) -> float | None:
    """Return how long a step took on average between the attempt's first and last one, without saves and what faults took; None: not known."""
    last = attempt.fault.began_unix_s if attempt.fault is not None else attempt.ended_unix_s
    if attempt.stepped_unix_s is None or last is None or attempt.last_step <= attempt.first_step:
        return None
    paused_s = sum(
        (pause.stepped_unix_s or pause.ended_unix_s) - pause.began_unix_s
        for pause in attempt.pauses
        if pause.kind != FAULT
    )
    steps_s = last - attempt.stepped_unix_s - paused_s - attempt.saves_s
    return steps_s / (attempt.last_step - attempt.first_step)


def _milliseconds(took_ms: Mapping[str, Any] | None) -> dict[str, float]:
    """Return an incident's times. Raises TypeError, ValueError for others."""
    return {stage: checked.number(ms, f"took_ms.{stage}") for stage, ms in (took_ms or {}).items()}


def with_fault(attempt: AttemptTime, began_unix_s: float, took_ms: Mapping[str, float] | None) -> AttemptTime:
    """Return the attempt with the fault that ended it as its agent knows it."""
    stages = _milliseconds(took_ms)
    ended = began_unix_s + stages.pop("total", 0.0) / 1e3
    pauses = [pause for pause in without_fault(attempt).pauses if pause.began_unix_s < began_unix_s]
    fault = Pause(kind=FAULT, began_unix_s=began_unix_s, ended_unix_s=ended, took_ms=stages)
    return replace(attempt, pauses=(*pauses, fault))


def without_fault(attempt: AttemptTime) -> AttemptTime:
    """Return the attempt as it is when what its controller took for a fault was none."""
    return replace(attempt, pauses=tuple(pause for pause in attempt.pauses if pause.kind != FAULT))


def with_repeats(losses: Mapping[int, Loss], again: Mapping[int, int]) -> dict[int, Loss]:
    """Add the steps that attempts have repeated though the fault before had kept them. `again`: by the attempt that repeated them."""
    found = dict(losses)
    for attempt, steps in again.items():
        known = found.get(attempt - 1, Loss(steps=0))
        found[attempt - 1] = Loss(steps=None if known.steps is None else known.steps + steps)
    return found


def attempt_fields(attempt: AttemptTime) -> dict[str, Any]:
    """Return it as the key `time` of a `fault` line of `story.jsonl`."""
    fields = asdict(attempt)
    return {"start": fields.pop("number"), **fields}


def read_attempt(line: Mapping[str, Any]) -> AttemptTime:
    """Return the attempt of a `fault` line's `time`. Raises KeyError, TypeError, ValueError."""
    numbers = {
        name: None if line[name] is None else float(line[name])
        for name in ("assembled_unix_s", "stepped_unix_s", "ended_unix_s")
    }
    pauses = [
        Pause(
            kind=str(each["kind"]),
            began_unix_s=float(each["began_unix_s"]),
            ended_unix_s=float(each["ended_unix_s"]),
            took_ms={str(stage): float(took) for stage, took in dict(each["took_ms"]).items()},
            stepped_unix_s=None if each["stepped_unix_s"] is None else float(each["stepped_unix_s"]),
        )
        for each in line["pauses"]
    ]
    return AttemptTime(
        number=int(line["start"]),
        world_size=int(line["world_size"]),
        begun_unix_s=float(line["begun_unix_s"]),
        first_step=int(line["first_step"]),
        last_step=int(line["last_step"]),
        saves=int(line["saves"]),
        saves_s=float(line["saves_s"]),
        pauses=tuple(pauses),
        **numbers,
    )


# --- the job ---


def time_use(
    attempts: Sequence[AttemptTime],
    until_unix_s: float,
    *,
    losses: Mapping[int, Loss] | None = None,
    step_s: float | None = None,
    fault_s: float = 0.0,
    over: bool = True,
) -> TimeUse | None:
    """Return where the time went from the first attempt's beginning until now.

    `losses`: by the attempt whose fault cost them. `step_s`: a step's time, where it is known. `fault_s`: how long a fault has lasted that is handled
    now. `over`: the job has ended. None: the job's beginning is not known.
    """
    attempts = sorted(attempts, key=lambda attempt: attempt.number)
    if not attempts or attempts[0].number != 0 or until_unix_s <= attempts[0].begun_unix_s:
        return None
    ranks = max(1, *(attempt.world_size for attempt in attempts))
    clock = _Clock(attempts[0].begun_unix_s, until_unix_s, ranks)
    trained: dict[int, float] = {}
    for attempt, following in zip(attempts, [*attempts[1:], None], strict=True):
        before = clock.rank_s["steps"]
        _spend(clock, attempt, following, fault_s if following is None else 0.0, over)
        steps_s = clock.rank_s["steps"] - before
        saves_s = min(steps_s, attempt.saves_s * (attempt.world_size or ranks))
        clock.move("steps", "saves", saves_s)
        trained[attempt.number] = steps_s - saves_s
    losses = losses or {}
    step_s = step_s or _step_time(attempts, trained, losses, ranks)
    again, certain = 0, True
    for attempt, following in itertools.pairwise(attempts):
        loss = losses.get(attempt.number)
        if loss is None or loss.steps == 0:
            continue
        again += loss.steps or 0
        if loss.steps is None or step_s is None:
            certain = False
            continue
        more = loss.steps - (following.stepped_unix_s is not None)  # the first one's time is `restart`
        clock.move("steps", "repeated", min(trained[following.number], more * step_s * (following.world_size or ranks)))
    return TimeUse(
        ranks=ranks,
        whole_s=until_unix_s - attempts[0].begun_unix_s,
        rank_s=clock.rank_s,
        steps_again=again,
        certain=certain,
    )


class _Clock:
    """Gives every moment to one part, in order; a moment that lies before the last one ends nothing."""

    def __init__(self, begun: float, until: float, ranks: int) -> None:
        self.rank_s = dict.fromkeys(PARTS, 0.0)
        self.now, self.until, self._ranks = begun, until, ranks

    def spend(self, part: str, to: float, world_size: int = 0) -> None:
        """Give the time until `to` to a part, of ranks that `world_size` has not to `absent`. 0: all."""
        to = min(max(to, self.now), self.until)
        lasted, present = to - self.now, world_size or self._ranks
        self.rank_s[part] += lasted * present
        self.rank_s["absent"] += lasted * (self._ranks - present)
        self.now = to

    def move(self, source: str, target: str, rank_s: float) -> None:
        self.rank_s[source] -= rank_s
        self.rank_s[target] += rank_s


def _spend(clock: _Clock, attempt: AttemptTime, following: AttemptTime | None, fault_s: float, over: bool) -> None:
    """Give an attempt's time to the parts, up to the next attempt's beginning."""
    size = attempt.world_size
    waiting = "restart" if attempt.number else "start"
    ready = attempt.stepped_unix_s or attempt.assembled_unix_s or math.inf
    end = following.begun_unix_s if following is not None else math.inf
    if following is not None and following.number != attempt.number + 1:  # what came between is not known
        end = min(end, _last_moment(attempt))

    def train(to: float) -> None:
        clock.spend(waiting, min(to, ready), size)
        clock.spend("steps", to, size)

    for pause in attempt.pauses:
        train(pause.began_unix_s)
        if pause.kind == FALSE_ALARM:
            clock.spend("false_alarms", pause.ended_unix_s, size)
            continue
        for stage, took_ms in pause.took_ms.items():
            clock.spend(_STAGES.get(stage, "decide"), min(clock.now + took_ms / 1e3, pause.ended_unix_s), size)
        clock.spend("decide", pause.ended_unix_s, size)
        if pause.kind == IN_PLACE and ready < pause.ended_unix_s:
            waiting, ready = "restart", pause.stepped_unix_s or pause.ended_unix_s
    if attempt.fault is not None:
        clock.spend("end" if following is None and over else "restart", end, size)
    elif attempt.ended_unix_s is not None:
        train(attempt.ended_unix_s)
        clock.spend("end", end, size)
    else:
        train(min(end, clock.until - fault_s))
        clock.spend("now", end, size)
    if following is not None:
        clock.spend("unknown", following.begun_unix_s)


def _last_moment(attempt: AttemptTime) -> float:
    known = (attempt.begun_unix_s, attempt.assembled_unix_s, attempt.stepped_unix_s, attempt.ended_unix_s)
    return max(*(each for each in known if each is not None), *(pause.ended_unix_s for pause in attempt.pauses), 0.0)


def _step_time(
    attempts: Sequence[AttemptTime], trained: Mapping[int, float], losses: Mapping[int, Loss], ranks: int
) -> float | None:
    """Return a step's time by the attempt with the most steps of which both ends are known; None: there is none."""
    longest, found = 0, None
    for attempt in attempts:
        loss = losses.get(attempt.number - 1)
        before = (
            attempt.first_step if attempt.stepped_unix_s is not None else loss.kept_step if loss is not None else None
        )
        if before is not None and attempt.last_step - before > longest:
            longest = attempt.last_step - before
            found = trained[attempt.number] / (attempt.world_size or ranks) / longest
    return found


# --- for people and programs ---


def read_use(fields: Mapping[str, Any]) -> TimeUse:
    """Return the value of the key `time_use` of an `end` line. Raises KeyError, TypeError, ValueError."""
    return TimeUse(
        ranks=checked.integer(fields["ranks"], "time_use.ranks", 1),
        whole_s=checked.number(fields["whole_s"], "time_use.whole_s", 0.001),
        rank_s={part: float(fields["rank_s"][part]) for part in PARTS},
        steps_again=int(fields["steps_again"]),
        certain=bool(fields["certain"]),
    )


_LABELS = {
    "start": "start", "saves": "saves", "detect": "detecting faults", "decide": "freezing and deciding", "dump": "emergency checkpoints",
    "regroup": "regrouping", "restart": "restarts until the next step", "repeated": "steps trained again", "false_alarms": "false alarms",
    "now": "the fault that is handled now", "end": "ending", "absent": "ranks that were missing", "unknown": "not known on this node",
}  # fmt: skip


def use_text(use: TimeUse) -> str:
    """`97.1 % of 6 min x 4 ranks were new steps; start 1.2 % (4.3 s), saves 0.9 % (3.2 s)`: the parts in their order, seconds of all ranks."""
    whole = use.ranks * use.whole_s
    most = "" if use.certain else "at most "
    parts = [
        f"{_LABELS[part]} {100 * rank_s / whole:.1f} % ({_seconds(rank_s / use.ranks)})"
        for part, rank_s in use.rank_s.items()
        if part != "steps" and rank_s / use.ranks >= 0.0005
    ]
    head = (
        f"{most}{100 * use.share:.1f} % of {_seconds(use.whole_s)} x {counted(use.ranks, 'rank')} went into new steps"
    )
    return "; ".join([head, ", ".join(parts)]) if parts else head


def _seconds(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.3f} s"
    return f"{seconds / 60:.0f} min" if seconds < 36_000 else f"{seconds / 3600:.1f} h"
