"""I11 by stages: how long a fault, what follows it, and the way out may take in a simulated job."""

from __future__ import annotations

from math import inf

from tests.simulation.controllers import Controller
from tests.simulation.faults import OF_STREAMS
from tests.simulation.job import Job
from tests.simulation.rank import Rank
from tests.simulation.truth import controllers_faulted, verdicts
from ttp.controller.core.facts.events import Journal

LEAVING_S = 1.0
"""From the word that a step is saved, or refused, to the end of every rank that can be reached."""
UNTROUBLED_S = 2.5
"""From the first death to the verdict, where the job had no faults but deaths and exceptions: a lease for a silent host, the end
of the updates, and the work itself. A lease more for each silent host that is lost when the one before has been found."""
SLACK_S = 0.5
MOST_IN_A_ROW = 3
"""Recoveries without a checkpoint, while no step is finished."""
CROSSING_S = 0.1
"""A rank's turn to another controller and the word of its own may cross on the network."""
_OF_ROUTES = (*OF_STREAMS, "slow network", "duplication", "rank receives nothing", "rank's messages do not arrive")
_SUDDEN = (
    "kill", "several kills", "all replicas killed", "host loss", "exception", "peer error", "full disk", "rank's disk",
    "failed fsync", "brief stop", "interpreter held briefly",
)  # fmt: skip
"""Kinds that are not waited for."""


def late(job: Job) -> list[str]:
    """Return what took longer than it may."""
    found = [text for each in job.controllers for text in (*_total(job, each), *_recovers_again_and_again(each))]
    if words := verdicts(job, received=True):
        # A controller to which a rank turned before the word came says it again, after a dump of its own.
        began = [at for at, line in job.journal if line.event == "takeover_began"]
        crossed = any(at <= words[0] + CROSSING_S for at in began)
        found += _left_late(job, words[-1] if crossed else words[0])
    if words := verdicts(job):
        found += _decided_late(job, words[0])
    return found


def _total(job: Job, controller: Controller) -> list[str]:
    """A controller ends a fault within the total timeout; while it stood still itself, no time passes for it."""
    if controller.leaps:
        return []
    limit = job.times.total_timeout_s + sum(ended - began for began, ended in controller.absences) + SLACK_S
    began = inf
    for at, line in [*controller.journal, (job.now, None)]:
        name = "the end" if line is None else line.event
        if name == "freeze_sent":
            began = min(began, at)
        elif name in ("refused", "thawed", "regrouped", "exit_sent") or (line is None and not controller.gone):
            if at - began > limit:
                return [
                    f"I11: c{controller.place}: {at - began:.1f} s from the freeze to {name}, expected {limit:.1f} s at most"
                ]
            began = inf
    return []


def _recovers_again_and_again(controller: Controller) -> list[str]:
    """What fails again and again at one step is saved at last."""
    steps = [line.fields["step"] for _, line in controller.journal if line.event == "regrouped"]
    for place in range(MOST_IN_A_ROW, len(steps)):
        if len(set(steps[place - MOST_IN_A_ROW : place + 1])) == 1:
            return [f"I11: c{controller.place} recovered from step {steps[place]} more than {MOST_IN_A_ROW} times"]
    return []


def _left_late(job: Job, verdict_s: float) -> list[str]:
    """A rank that runs and can be reached leaves at once, without waiting for the end of a controller's patience. Another controller that
    takes over at that moment has to ask first; one that is superseded at that moment by the one that gave the word leaves its ranks to look for it, and it
    may have ended by then."""
    by_s = verdict_s + LEAVING_S
    meanwhile = [line for at, line in job.journal if verdict_s <= at <= by_s]
    if any(line.event == "takeover_began" or _is_superseded(line) for line in meanwhile):
        return []
    if any(_superseded_as_it_ended(job, controller, verdict_s) for controller in job.controllers):
        return []
    if controllers_faulted(job, verdict_s - 2 * job.times.lease_s, by_s) or any(c.dead for c in job.controllers):
        return []
    there = (rank for rank in job.ranks if rank.started_s <= verdict_s and _reachable(job, rank, verdict_s))
    slow = [rank.rank for rank in there if rank.ended_s > by_s]
    return [f"I11: ranks {slow} were there {LEAVING_S:g} s after the word that it is over"] if slow else []


def _superseded_as_it_ended(job: Job, controller: Controller, verdict_s: float) -> bool:
    """True when a controller was ended by another one within a heartbeat of its own word that it is over, and just before this verdict: the word may not have
    reached a rank, which has no controller then that knows it."""
    said_s = max((at for at, line in controller.journal if line.event == "exit_sent"), default=-inf)
    stopped = [at for at, line in controller.journal if _is_superseded(line)]
    return any(0.0 <= at - said_s <= job.times.heartbeat_s and at <= verdict_s <= at + LEAVING_S for at in stopped)


def _is_superseded(line: Journal) -> bool:
    return line.event == "stopped" and str(line.fields["reason"]).startswith("superseded")


def _reachable(job: Job, rank: Rank, verdict_s: float) -> bool:
    """True for a rank that runs, and whose streams had no fault around the verdict."""
    since_s = verdict_s - 2 * job.times.lease_s
    cut = any(
        strike.kind in _OF_ROUTES and strike.at_s >= since_s and (strike.rank == rank.rank or "all" in strike.kind)
        for strike in job.strikes
    )
    slow = rank.route.slowest_s > 0.0 or rank.route.rejects
    leads = max(
        each.term
        for each in job.controllers
        if each.term == 1 or any(line.event == "takeover_began" and at <= verdict_s for at, line in each.journal)
    )
    left = any(
        each.term == rank.state.term and any(_is_superseded(line) and at <= verdict_s for at, line in each.journal)
        for each in job.controllers
    )
    # Its agent ends it, with all of the attempt: only a controller that leads no more knows of this process, if one does.
    unknown = rank.state.vacant and (rank.state.term < leads or left)
    return rank.started and not (
        unknown or cut or slow or rank.boundary.saving or rank.was_stopped or rank.ended_s <= verdict_s
    )


def _decided_late(job: Job, verdict_s: float) -> list[str]:
    """Where nothing held the job up, the word comes soon after the first death."""
    if not job.killed or any(strike.kind not in _SUDDEN for strike in job.strikes):
        return []
    held = job.slow or any(
        r.was_stopped or r.slow_update or r.hang_update_at or r.hang_work or r.late_results for r in job.ranks
    )
    first_s = min(job.killed.values())
    if held or verdict_s < first_s or controllers_faulted(job, 0.0, verdict_s) or any(c.dead for c in job.controllers):
        return []
    took_s, limit_s = verdict_s - first_s, UNTROUBLED_S + max(0.0, unseen_s(job, verdict_s) - job.times.lease_s)
    if all(rank.rank in job.killed or rank.ended_s < verdict_s for rank in job.ranks):  # somebody may come back
        limit_s += job.times.orphan_timeout_s
    if any(line.event == "regroup_failed" for _, line in job.journal):
        limit_s += job.times.in_place_s
    return [f"I11: {took_s:.2f} s from the first death to the word, nothing held it up"] if took_s > limit_s else []


def unseen_s(job: Job, verdict_s: float) -> float:
    """Return for how long some rank was dead whose end is found by its lease alone: no agent saw it."""
    lease_s, total_s, found_s = job.times.lease_s, 0.0, -inf
    for rank, died_s in sorted(job.killed.items(), key=lambda death: death[1]):
        if died_s < verdict_s and not (job.agents and rank in job.seen_to_end):
            total_s += lease_s - max(0.0, found_s - died_s)
            found_s = died_s + lease_s
    return total_s
