"""One fault of a run with all that came of it: what was done, when each stage was reached, what became of the job.

Pure functions over a run's record. An incident begins with its first firing and ends where the job progresses again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from math import inf

from ttp.chaos.observed.recorder import Key, Line, Record, ReportedStep, Resumed
from ttp.chaos.verdict.recoveries import in_place_line, why_not
from ttp.chaos.verdict.timeline import known_to_the_dead_alone

STAGES = ("seen", "frozen", "decided", "written", "published", "regrouped", "resumed", "first_new_step")
STAGE_WORDS = {
    "seen": "seen by the controller",
    "frozen": "all survivors frozen",
    "decided": "step decided",
    "regrouped": "all ranks have regrouped",
    "written": "shards written",
    "published": "checkpoint published",
    "resumed": "loaded by the next attempt",
    "first_new_step": "first new step",
}
_SIGNS = ("death_seen", "fault_reported", "hung", "suspect", "takeover_began", "freeze_sent")
UNSAVED = "unsaved"
"""The job started again with neither a checkpoint nor a refusal."""
ENDED = "ended"
"""The job ended, and was not over."""
OVERDUE = "overdue"
"""Nothing was settled within the deadline."""
NOT_REACHED = "not reached"
"""The fault did not happen: the job was over before, or never came to its place."""


@dataclass(frozen=True, slots=True)
class Firing:
    """One thing that was done."""

    kind: str
    whom: str
    """`rank 2 (pid 71)`, `controller 0 (pid 80)`."""
    unix_s: float
    point: str
    step: int
    """Where the rank was; 0: not known."""
    key: Key
    ranks: tuple[int, ...] = ()
    """The ranks that may die of it, or be cut off."""


@dataclass(slots=True)
class FaultOutcome:
    """A fault of the schedule, those of its `then`, and what became of them. Filled while it lasts."""

    number: int
    run: int
    text: str
    label: str
    expected: tuple[str, ...]
    planned: int = 1
    """How many injections were meant; a writer's or a publisher's may not come, where another rank wrote or published."""
    firings: list[Firing] = field(default_factory=list)
    outcome: str = ""
    stages_ms: dict[str, float] = field(default_factory=dict)
    """Milliseconds since the first firing, for each of STAGES that was reached."""
    committed: int = 0
    """The newest step that any rank of its attempt had finished before the first firing."""
    unproven: int = 0
    """1: the last of these steps was known to ranks that were hit only, and no survivor had its commit record."""
    saved_step: int | None = None
    resumed_step: int | None = None
    lost: int | None = None
    """Finished steps that had to be trained again; None: not known yet."""
    refused: str = ""
    kept_step: int | None = None
    """The step after which training continued in place."""
    in_place_due: bool = False
    """It is to end in place if the replicas of the rank that was hit cover what it held."""
    not_in_place: str = ""
    """Why it did not, by the controller's journal."""
    opened_unix_s: float = inf
    """When the gates of the same attempt opened again, for good; infinite: they did not."""
    over_unix_s: float = 0.0
    problems: list[str] = field(default_factory=list)
    """What was against the protocol, `I9: ...` each."""

    @property
    def fired(self) -> bool:
        return bool(self.firings)

    @property
    def drawn_text(self) -> str:
        """`text`, with the rank that chance chose."""
        return named(self.text, self.firings[0].whom) if self.firings else self.text

    @property
    def began_unix_s(self) -> float:
        return self.firings[0].unix_s if self.firings else 0.0

    @property
    def last_unix_s(self) -> float:
        return max((firing.unix_s for firing in self.firings), default=0.0)

    @property
    def happened(self) -> bool:
        return self.fired and self.outcome != NOT_REACHED

    @property
    def complete(self) -> bool:
        """All injections that were meant have happened."""
        return self.happened and len(self.firings) >= self.planned

    @property
    def as_expected(self) -> bool:
        return self.outcome in self.expected


def of_ended_job(status: int, record: Record) -> str:
    """Return what became of a fault in whose course the job ended: one that came when all ranks had finished was not reached."""
    return NOT_REACHED if status == 0 and record.lines(0.0, "finished") else ENDED


def named(text: str, whom: str) -> str:
    """Put whom the first injection has hit into the fault's text."""
    return text.replace("rank random", whom.split(" (")[0], 1)


def settle(incident: FaultOutcome, record: Record, how: str) -> None:
    """Fill in what became of an incident that is over. `how`: NOT_REACHED, OVERDUE, ENDED, `relaunched`, or empty."""
    if how == NOT_REACHED or not incident.fired:
        incident.outcome = NOT_REACHED
        return
    began = incident.began_unix_s
    lines = [line for line in record.lines(began) if not incident.over_unix_s or line["unix_s"] <= incident.over_unix_s]
    incident.committed = record.finished_in(incident.firings[0].key, began)
    frozen = [line for line in lines if line["event"] == "frozen"]
    resumed = _resumes(record, incident)
    published = [line for line in lines if line["event"] == "published"]
    refused = [line for line in lines if line["event"] == "refused"]
    in_place = in_place_line(lines)
    incident.opened_unix_s = float(in_place["unix_s"]) if in_place is not None else inf
    incident.not_in_place = why_not(lines) if published or refused else ""
    incident.saved_step = max(
        (int(line["step"]) for line in published), default=None
    )  # two, where a network was parted
    if incident.saved_step is not None:
        incident.unproven = _unproven(incident, record, frozen, incident.saved_step)
    incident.refused = str(refused[-1]["reason"]) if refused and not published else ""
    restarted = any(key > incident.firings[0].key for _, key, _, _ in record.hellos)
    if restarted and how != OVERDUE:
        incident.resumed_step = resumed[-1].step if resumed else 0
        incident.lost = max(0, incident.committed - incident.resumed_step)
    elif how == "" and in_place is not None:
        incident.kept_step = kept = int(in_place["step"])
        incident.unproven = _unproven(incident, record, frozen, kept)
        incident.lost = max(0, incident.committed - incident.unproven - kept)
    elif how == "":
        incident.lost = 0
    skipped_before = _checkpoints(text for one in record.resumes if one.unix_s < began for text in one.skipped)
    incident.outcome = how or _outcome(incident, resumed, restarted, skipped_before)
    incident.stages_ms = stages(lines, record, incident, resumed)


def _unproven(incident: FaultOutcome, record: Record, frozen: Sequence[Line], kept: int) -> int:
    """Return 1 where a step after the kept one was finished by ranks alone that were hit, and no survivor had its commit record. What ranks
    reported to the harness counts, not the journal alone; a rank is one step ahead of what another one can prove at most."""
    key, began = incident.firings[0].key, incident.began_unix_s
    knew = {one.rank for one in record.steps if one.key == key and one.step > kept and one.unix_s <= began}
    hit = {rank for firing in incident.firings for rank in firing.ranks}
    return int(bool(knew) and knew <= hit and known_to_the_dead_alone(frozen, kept))


def _resumes(record: Record, incident: FaultOutcome) -> list[Resumed]:
    """Return what the attempts after the fault resumed from, in order of time."""
    first = incident.firings[0].key
    return [one for one in record.resumes if one.key > first and one.unix_s >= incident.began_unix_s]


def _checkpoints(skipped: Iterable[str]) -> set[str]:
    """Return the names of checkpoints that were passed over; the reason may be another one each time, as the ranks share the looking."""
    return {name for text in skipped for name in re.findall(r"iter_\d{7}", text) or [text]}


def _outcome(incident: FaultOutcome, resumed: Sequence[Resumed], restarted: bool, skipped_before: Set[str]) -> str:
    """skipped_before: names of what an earlier fault broke; it stays there, and is skipped until the job has come past it."""
    if not restarted:
        return "unharmed" if incident.kept_step is None else "in_place"
    if resumed and _checkpoints(resumed[-1].skipped) - skipped_before:
        return "fell_back"
    if incident.saved_step is not None:
        return "saved"
    return "refused" if incident.refused else UNSAVED


def stages(
    lines: Sequence[Line], record: Record, incident: FaultOutcome, resumed: Sequence[Resumed]
) -> dict[str, float]:
    """Return when each stage was reached, in milliseconds since the first firing."""
    began, last = incident.began_unix_s, incident.firings[-1].key

    def first(*events: str) -> list[float]:
        return [float(line["unix_s"]) for line in lines if line["event"] in events]

    new = [
        reported.unix_s
        for reported in record.steps
        if not reported.recovered
        and reported.unix_s > incident.last_unix_s
        and (reported.key > last or incident.outcome == "unharmed" or _after_kept(incident, lines, reported))
    ]
    moments = {
        "seen": min(first(*_SIGNS), default=None),
        "frozen": min(first("frozen"), default=None),
        "decided": min(first("decided"), default=None),
        "regrouped": max(first("regrouped"), default=None),
        "written": max(first("written"), default=None),  # every writer reports; the stage is over with the last
        "published": max(first("published"), default=None),
        "resumed": max((one.unix_s for one in resumed), default=None),
        "first_new_step": min(new, default=None),
    }
    return {stage: (moment - began) * 1e3 for stage, moment in moments.items() if moment is not None}


def _after_kept(incident: FaultOutcome, lines: Sequence[Line], reported: ReportedStep) -> bool:
    """Say whether a step came after the gates had opened in place: one that was under way at the fault does not count."""
    opened = in_place_line(lines)
    if incident.outcome != "in_place" or opened is None:
        return False
    return reported.unix_s > float(opened["unix_s"]) and reported.step > int(opened["step"])
