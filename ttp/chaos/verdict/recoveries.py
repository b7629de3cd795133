"""How a job came back from a fault: in place, the others keeping their processes, or by a checkpoint and a restart.

Pure functions over journals, metrics and process numbers.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf

from ttp.chaos.verdict.timeline import Line, known_to_the_dead_alone

IN_PLACE = "in place"
BY_CHECKPOINT = "by checkpoint"
REFUSED = "refused"
"""No checkpoint of the step was possible: the job restarted from an older one, or from step 1."""
STAGES = ("seen", "frozen", "decided", "written", "published", "came", "regrouped", "new step")
"""In the order in which they are reached; a recovery has those of its kind only."""
_EVENTS = {
    "death_seen": "seen",
    "frozen": "frozen",
    "decided": "decided",
    "replacement_came": "came",
    "regrouped": "regrouped",
    "written": "written",
    "published": "published",
}
_LAST_COUNTS = ("came", "regrouped", "written")
"""Each rank reports, or several faults follow each other: the stage is over with the last one."""
REASON_LENGTH = 120
UNKNOWN = "no reason in the journal"

Identity = tuple[int, int]
"""Of a process: its number, and when it began."""


@dataclass(frozen=True, slots=True)
class FaultEnding:
    """One fault, which may be several kills."""

    how: str
    step: int | None
    """The step that training continued from; None: it was refused."""
    why: str
    """Why it was not in place; empty: it was."""
    replaced: tuple[int, ...]
    """Ranks whose processes the controller ordered replaced."""
    stages_ms: Mapping[str, float]
    """Milliseconds from the (first) kill, of those of STAGES that were reached."""
    alone: bool = False
    """No survivor had the record of a step after `step`: what the dead rank wrote of one does not count."""
    freezes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EndedFault:
    """Kills, what is known of the job right before the first, and how it came back."""

    ranks: tuple[int, ...]
    pids: tuple[int, ...]
    unix_s: tuple[float, ...]
    after_step: int
    """The newest step in the metrics at the first kill."""
    before: Mapping[int, Identity]
    """Every rank's process before, and after."""
    after: Mapping[int, Identity]
    ending: FaultEnding

    @property
    def lost(self) -> int | None:
        """Steps that had been committed and were trained again; None: the fault was refused, its cost is not known here."""
        if self.ending.step is None:
            return None
        lost = max(0, self.after_step - self.ending.step)
        return 0 if lost == 1 and self.ending.alone and 0 in self.ranks else lost

    def problems(self) -> list[str]:
        """Return what is not as it should be, seen from outside."""
        wrong = []
        if self.ending.how == REFUSED:
            wrong.append(f"refused: {self.ending.why}")
        if self.lost:
            wrong.append(f"{self.lost} committed steps were lost")
        if self.ending.how == IN_PLACE:
            wrong += misplaced(self.before, self.after, self.ranks)
        return wrong


def misplaced(before: Mapping[int, Identity], after: Mapping[int, Identity], lost: Collection[int]) -> list[str]:
    """Compare the processes before a fault and after a recovery in place: exactly the lost ranks have other ones, and none is missing."""
    wrong = []
    for rank in sorted({*before, *after}):
        was, now = before.get(rank), after.get(rank)
        if now is None:
            wrong.append(f"rank {rank} has no process")
        elif rank in lost and was == now:
            wrong.append(f"rank {rank} was lost and has the process that it had, {now[0]}")
        elif rank not in lost and was != now:
            wrong.append(f"rank {rank} was not lost, and has process {now[0]} in place of {was[0] if was else 'none'}")
    return wrong


def ending_of(
    journal: Sequence[Line], metrics: Sequence[Line], killed_unix_s: float, until_unix_s: float = inf
) -> FaultEnding | None:
    """Return how the job came back from what happened at `killed_unix_s`; None: it has not made a new step yet.

    `journal`: the lines of the attempt that was hit, in order of time; those after `until_unix_s` are another fault's.
    """
    lines = [line for line in journal if killed_unix_s <= float(line["unix_s"]) < until_unix_s]
    written = next((line for line in reversed(lines) if line["event"] in ("published", "refused")), None)
    ended = in_place_line(lines) or written
    if ended is None or _open(lines, ended):
        return None
    step = int(ended["step"]) if ended["event"] != "refused" else None
    new = _new_step(metrics, killed_unix_s, float(ended["unix_s"]), step)
    if new is None:
        return None
    how = {"published": BY_CHECKPOINT, "refused": REFUSED}.get(str(ended["event"]), IN_PLACE)
    orders = [line for line in lines if line["event"] == "regroup_sent"]
    return FaultEnding(
        how,
        step,
        "" if how == IN_PLACE else why_not(lines),
        tuple(sorted({int(rank) for line in orders for rank in line["replaced"]})),
        _stages(lines, killed_unix_s, new),
        step is not None and known_to_the_dead_alone(lines, step),
        tuple(int(line["freeze_id"]) for line in lines if line["event"] == "freeze_sent"),
    )


def in_place_line(lines: Sequence[Line]) -> Line | None:
    """Return the line with which a fault ended in place, with the step that was kept; None: it did not. A controller that took over opens
    the gates of ranks that have all regrouped by its thaw (docs/proof.md, L17); a thaw after that is of a false alarm. What a stopped controller finds
    when it continues opens nothing."""
    order: Line | None = None
    ended: Line | None = None
    for line in lines:
        match line["event"]:
            case "regroup_sent":
                order, ended = line, None
            case "regrouped" if ended is None and order is not None and line.get("freeze_id") == order.get("freeze_id"):
                ended = line
            case "thawed" if order is not None and ended is None:
                ended = {**line, "step": order["step"]}
            case "published" | "refused":
                order = ended = None
    return ended


def why_not(lines: Sequence[Line]) -> str:
    """Return why a fault's lines end with a checkpoint: what the controller noted last."""
    reasons = [str(line["reason"]) for line in lines if line["event"] in ("not_in_place", "regroup_failed", "refused")]
    return reasons[-1] if reasons else UNKNOWN


def _open(lines: Sequence[Line], ended: Line) -> bool:
    """Say whether a freeze began after what looks like the end, and was not found to be a false alarm."""
    later = [line["event"] for line in lines if line["unix_s"] > ended["unix_s"]]
    return "freeze_sent" in later and "thawed" not in later


def _new_step(metrics: Sequence[Line], killed_s: float, ended_s: float, step: int | None) -> float | None:
    """Return when the step after the one that is kept was done; where none was kept, the first step after the end of the fault."""
    for line in metrics:
        if "loss" not in line or line.get("recovered") or float(line["unix_s"]) <= max(killed_s, ended_s):
            continue
        if step is None or int(line["step"]) == step + 1:
            return float(line["unix_s"])
    return None


def _stages(lines: Sequence[Line], killed_s: float, new_step_s: float) -> dict[str, float]:
    reached: dict[str, float] = {}
    for line in lines:
        stage = _EVENTS.get(str(line["event"]))
        if stage is not None and (stage not in reached or stage in _LAST_COUNTS):
            reached[stage] = float(line["unix_s"])
    reached["new step"] = new_step_s
    return {stage: 1e3 * (reached[stage] - killed_s) for stage in STAGES if stage in reached}


@dataclass(frozen=True, slots=True)
class RecoveryLimits:
    """What faults of one kill must keep to, however they ended; None: no limit."""

    median_s: float | None = None
    """From the kill to the new step."""
    p99_s: float | None = None
    in_place: float | None = None
    """The least share that ends in place."""


@dataclass(slots=True)
class FaultTally:
    """Many faults, summed up."""

    faults: list[EndedFault] = field(default_factory=list)

    def times_ms(self, how: str) -> list[float]:
        """Return the times from the kill to the new step, sorted, of faults of one kill that ended so."""
        return sorted(
            one.ending.stages_ms["new step"] for one in self.faults if one.ending.how == how and len(one.ranks) == 1
        )

    def count(self, how: str) -> int:
        return sum(one.ending.how == how for one in self.faults)

    def kept(self, limits: RecoveryLimits) -> list[tuple[str, bool]]:
        """Return each limit that there is, with what was measured, and whether it was kept. Without a fault of one kill none is."""
        single = [one.ending for one in self.faults if len(one.ranks) == 1]
        times_s = sorted(one.stages_ms["new step"] / 1e3 for one in single) or [inf]
        found = []
        for name, took_s, limit_s in (
            ("median", statistics.median(times_s), limits.median_s),
            ("p99", quantile(times_s, 0.99), limits.p99_s),
        ):
            if limit_s is not None:
                text = f"kill to new step, {name} of {len(single)} single kills: {took_s:.3f} s, limit {limit_s:g} s"
                found.append((text, took_s <= limit_s))
        if limits.in_place is not None:
            count = sum(one.how == IN_PLACE for one in single)
            text = f"in place: {count} of {len(single)} single kills, limit {limits.in_place:.1%}"
            found.append((text, bool(single) and count >= limits.in_place * len(single)))
        return found

    def reasons(self) -> dict[str, int]:
        """Return how often each reason led to a checkpoint, the most frequent first; which rank or address it names does not count."""
        counts: dict[str, int] = {}
        for fault in self.faults:
            if fault.ending.how != IN_PLACE:
                reason = re.sub(r"\d+", "N", fault.ending.why)[:REASON_LENGTH]
                counts[reason] = counts.get(reason, 0) + 1
        return dict(sorted(counts.items(), key=lambda item: -item[1]))


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value below or at which this share of the sorted values is (the nearest rank)."""
    return ordered[max(0, ceil(share * len(ordered)) - 1)]
