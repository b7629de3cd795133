"""What is so in a simulated job, whatever a controller believes: who is sound, what they hold, which step they can reach.

Everything here comes from what was done to the job and from the ranks' gates; never from a controller's own word.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from ttp.proto.messages import Phase, StateReport

if TYPE_CHECKING:
    from tests.simulation.job import Job
    from tests.simulation.rank import Rank


LATE_CLOSING_S = 0.3
"""A rank whose update ended after it had said that its gate is not closed says so again within 0.2 s, and that is under way."""


@dataclass(frozen=True)
class Snapshot:
    """The gates of all living ranks at the moment of a verdict (`decided`, `refused`)."""

    verdict: str
    at_s: float
    reports: tuple[StateReport, ...]
    apart: bool = False
    """The controller has taken over behind a broken network, and an earlier one leads the others: neither speaks for all ranks."""

    @classmethod
    def of(cls, job: Job, verdict: str, apart: bool) -> Snapshot:
        ranks = [rank for rank in job.ranks if rank.alive and rank.started]
        if (
            job.training.local_copy
        ):  # a step that not all have is not waited for: a rank that ended it just now has not reported yet
            ranks = [rank for rank in ranks if rank.closed_late_s < job.now - LATE_CLOSING_S]
        whole = max((int(str(line["freeze_id"])) for line in events(job, "regrouped")), default=0)
        # one in another's place holds nothing before all have regrouped
        return cls(
            verdict,
            job.now,
            tuple(_at_the_end_of_its_update(rank, verdict) for rank in ranks if rank.began_in <= whole),
            apart,
        )

    def reaching(self, step: int, sound: Collection[int]) -> frozenset[int]:
        """Return the sound ranks that have a step, or were READY for it while a sound rank has its record."""
        mine = [report for report in self.reports if report.rank in sound and report.closed and not report.torn]
        reported = any(record.step == step for report in mine for record in report.records)
        return frozenset(
            report.rank
            for report in mine
            if step in (report.state_step, report.backup_step)
            or (reported and report.phase is Phase.READY and report.step == step == report.state_step + 1)
        )

    def newest(self, job: Job, sound: Collection[int]) -> int:
        """Return the newest step that sound ranks cover whom one of the directories serves; 0: none."""
        steps = {step for r in self.reports for step in (r.backup_step, r.state_step, r.state_step + 1)}
        return max(
            (step for step in steps if step > 0 and self._fits_somewhere(job, self.reaching(step, sound))), default=0
        )

    def _fits_somewhere(self, job: Job, ranks: Collection[int]) -> bool:
        """True when some directory takes what these ranks have of every shard."""
        return any(
            covers(job, [rank for rank in ranks if job.disk.serves(rank, job.root_of(rank, name))])
            for name in job.roots
        )


def _at_the_end_of_its_update(rank: Rank, verdict: str) -> StateReport:
    """Return what a rank will report at a refusal: none comes while an update progresses whose end would cover a step."""
    report = rank.report()
    if verdict == "refused" and rank.updating and not report.torn:
        return replace(report, closed=True, state_step=report.step)
    return report


def covers(job: Job, ranks: Collection[int]) -> bool:
    """True when these ranks hold every shard."""
    return all(not set(holders).isdisjoint(ranks) for holders in job.training.layout.holders)


def sound(job: Job, until_s: float = inf) -> frozenset[int]:
    """Return the ranks that nothing happened to up to then: neither killed, nor kept from answering for longer than a rank
    may be silent (until they are back), nor with a clock that leapt, nor with an update or an order that cannot end, nor with an altered replica."""
    altered = {rank for rank, _ in job.comparing.altered}
    there = (rank for rank in job.ranks if not rank.began_in or rank.started_s <= until_s)
    unhurt = (rank.rank for rank in there if job.killed.get(rank.rank, inf) >= until_s and _unhurt(rank, until_s))
    return frozenset(unhurt).difference(altered)


def _unhurt(rank: Rank, until_s: float) -> bool:
    silent = rank.was_stopped and rank.back_s >= until_s
    return not (silent or rank.gate.torn or rank.hang_update_at or rank.break_roll or rank.hang_work)


def controllers_faulted(job: Job, from_s: float, to_s: float) -> bool:
    """True when between these moments a controller was away, or its clock leapt, or was behind after a leap back: what it does then may come late, and
    its messages stay out until its clock has caught up."""
    return any(
        began_s <= to_s and ended_s >= from_s
        for controller in job.controllers
        for began_s, ended_s in (*controller.absences, *controller.leaps)
    )


def events(job: Job, name: str) -> list[dict[str, object]]:
    """Return the fields of all journal lines of one kind, whichever controller wrote them."""
    return [dict(line.fields) for _, line in job.journal if line.event == name]


def of_last_fault(job: Job, name: str) -> list[dict[str, object]]:
    """Return the fields of each such journal line since ranks have last regrouped: a step may be published before that. A controller that was
    away until after another had taken over may write such a line too, and no rank obeys it: it does not count (seed 30019)."""
    since, newest = 0, 0
    lines = [line for _, line in job.journal]
    for place, line in enumerate(lines):
        if line.event == "freeze_sent":
            newest = max(newest, int(str(line.fields["freeze_id"])))
        elif line.event == "regrouped" and int(str(line.fields["freeze_id"])) >= newest:
            since = place + 1
    return [dict(line.fields) for line in lines[since:] if line.event == name]


def verdicts(job: Job, received: bool = False) -> list[float]:
    """Return when a controller reported that the job is over; a step that is published before the ranks regroup is none, unless they fail to. Nor
    is the verdict of one on a lost node's side, where the others have regrouped since. `received`: without that of one to which no rank
    was attached, where the job has finished under another."""
    finished_s = max((at for at, line in job.journal if line.event == "finished"), default=-inf)
    found, opened_s = [], 0.0
    for controller in job.controllers:
        names = ["", *(line.event for _, line in controller.journal), ""]
        for (at, line), before, after in zip(controller.journal, names, names[2:], strict=False):
            final = line.event == "published" and after not in ("regroup_sent", "take_places_sent")
            alone = line.event == "refused" and str(line.fields["reason"]).startswith("no rank was attached")
            if received and alone and at < finished_s:
                continue
            if final or line.event == "refused" or (line.event == "exit_sent" and before == "regroup_failed"):
                found.append(at)
            elif line.event == "regrouped" and line.fields["freeze_id"] == job.in_place.opened:
                opened_s = at
    return sorted(at for at in found if at > opened_s)
