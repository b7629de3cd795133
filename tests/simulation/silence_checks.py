"""I7 and I11 for silent ranks: one whose process runs is not taken for dead too early, and none too late."""

from __future__ import annotations

from math import inf

from tests.simulation.job import Job
from tests.simulation.rank import Rank
from tests.simulation.truth import controllers_faulted
from ttp.controller.core.facts.membership import VOUCHED_START_FACTOR
from ttp.controller.core.facts.pace import ENOUGH
from ttp.controller.core.facts.state import EXIT_WAIT_S

SLACK_S = 0.4
"""Two heartbeats: of the last message, and of the last vouch."""
ATTACHED_S = 1.0
"""Agents have come to the first controller by then, and have vouched for their ranks."""


def wrongly_dead_or_alive(job: Job) -> list[str]:
    """Return which ranks were taken for dead although their agents saw them run, or for alive although none did, and which nodes for lost although
    their agents were there."""
    return _taken_for_dead(job) + _found_late(job) + _left_early(job) + _left_late(job)


def _vouched_s(job: Job, rank: Rank) -> float:
    """How long this rank may be silent while its agent vouches for it."""
    factor = VOUCHED_START_FACTOR if job.training.steps < ENOUGH or rank.gate.state_step < ENOUGH else 1.0
    return job.times.vouched_lease_s * factor


def _taken_for_dead(job: Job) -> list[str]:
    """I7: an interpreter that is held for less than a vouched lease costs no rank its life, where nothing else keeps it silent."""
    found = []
    fault_s = min((at for at, line in job.journal if line.event in ("death_seen", "fault_reported")), default=inf)
    for at, line in job.journal:
        if line.event != "death_seen" or line.fields["kind"] != "silent":
            continue
        if fault_s < at and str(line.fields["text"]).startswith("it did not come"):
            continue  # a takeover in a fault waits for none: those that came need a decision
        rank = job.ranks[int(str(line.fields["rank"]))]
        held = [(began, ended) for held, began, ended in job.holds_of_interpreters if held == rank.rank]
        for began, ended in held:
            runs = began <= at <= min(ended, began + job.times.vouched_lease_s - SLACK_S)
            if runs and _seen_to_run(job, rank, began, at):
                found.append(
                    f"I7: rank {rank.rank} was taken for dead at {at:.3f} s; its interpreter was held from {began:.3f} s"
                )
    return found


def _seen_to_run(job: Job, rank: Rank, began_s: float, at_s: float) -> bool:
    """True when the agent had every chance to vouch for a rank, and nothing but the hold kept the rank silent."""
    launcher = job.launchers.get(rank.node)
    if launcher is None or launcher.lost or began_s < ATTACHED_S or rank.rank in job.killed:
        return False
    if rank.started_s > began_s:  # its welcome was lost: it was silent before
        return False
    since_s = began_s - 2 * job.times.lease_s
    others = any(
        s.kind != "interpreter held" and since_s <= s.at_s <= at_s and s.rank == rank.rank for s in job.strikes
    )
    return not others and not _led_badly(job, since_s, at_s)


def _found_late(job: Job) -> list[str]:
    """I11: a lost host and a stopped process are found within the ordinary lease, an interpreter that is held for good within the vouched
    one. A lease more where most ranks are silent, once."""
    found = []
    for rank in job.ranks:
        began = rank.still_s if rank.stopped_for_good else job.killed.get(rank.rank, inf)
        if began == inf or not rank.started or rank.rank in job.seen_to_end:
            continue
        longest_s = _vouched_s(job, rank) if rank.held_for_good else job.times.lease_s
        by = began + longest_s + job.times.lease_s + SLACK_S
        if _over_by(job, by) or _disturbed(job, rank, began, by):
            continue
        if not any(
            line.event == "death_seen" and line.fields["rank"] == rank.rank and at <= by for at, line in job.journal
        ):
            found.append(
                f"I11: rank {rank.rank} was silent from {began:.3f} s on, and no controller declared it dead by {by:.3f} s"
            )
    return found


def _left_early(job: Job) -> list[str]:
    """I11: a controller that has ordered all to exit is there for the agent of a silent rank, which asks whether it may kill it, as long as it waits
    for streams, unless that node is lost."""
    found = []
    for controller in job.controllers:
        sent_s = max((at for at, line in controller.journal if line.event == "exit_sent"), default=inf)
        if sent_s == inf or not sent_s <= controller.over_s < sent_s + EXIT_WAIT_S or job.now < controller.over_s:
            continue
        if _led_badly(job, 0.0, controller.over_s) or any(
            s.kind not in ("stop", "interpreter held") for s in job.strikes
        ):
            continue  # the agents' messages may not come
        for rank, member in enumerate(controller.state.members.table):
            agent = job.launchers.get(job.nodes[rank])
            if member.attached and agent is not None and not agent.lost:
                found.append(
                    f"I11: the controller ended {controller.over_s - sent_s:.3f} s after its order to exit, and did not wait for rank {rank}"
                )
    return found


def _left_late(job: Job) -> list[str]:
    """I11: a controller that has ordered all to exit waits for no node that was lost with its agent a lease before."""
    found = []
    for controller in job.controllers:
        sent_s = max((at for at, line in controller.journal if line.event == "exit_sent"), default=inf)
        members, since_s = controller.state.members, sent_s - job.times.lease_s
        attached = [
            rank
            for rank, member in enumerate(members.table)
            if member.attached and member.dead is not None and member.named_at > -inf
        ]
        if not sent_s + EXIT_WAIT_S <= controller.over_s < inf or len(attached) < members.attached or not attached:
            continue
        if members.alive:
            continue  # one without a stream has not received that it is to exit
        naming = [agent for agent in job.launchers.values() if not agent.processes.keys().isdisjoint(attached)]
        lost = bool(naming) and all(agent.lost for agent in naming)  # one whose node was given up names its ranks too
        if (
            lost
            and all(job.killed.get(rank, inf) <= since_s for rank in attached)
            and not _led_badly(job, 0.0, controller.over_s)
        ):
            found.append(f"I11: the controller waited {controller.over_s - sent_s:.3f} s for the lost ranks {attached}")
    return found


def _over_by(job: Job, at_s: float) -> bool:
    over = ("published", "refused", "exit_sent", "finished")
    return job.now < at_s or any(line.event in over and at <= at_s for at, line in job.journal)


def _disturbed(job: Job, rank: Rank, began_s: float, by_s: float) -> bool:
    """True when other things went wrong about then that keep a controller from judging: hardly any rank's messages arrive, or it is not there."""
    assembled = min((at for at, line in job.journal if line.event == "assembled"), default=inf)
    since_s = began_s - 2 * job.times.lease_s
    others = [
        s for s in job.strikes if since_s <= s.at_s <= by_s and s.kind not in ("host loss", "stop", "interpreter held")
    ]
    senders = [  # a rank that is not welcomed sends no heartbeats
        other for other in job.ranks if other.ended_s >= by_s and not other.was_stopped and other.started_s <= began_s
    ]
    return began_s < assembled or bool(others) or not senders or _led_badly(job, since_s, by_s)


def _led_badly(job: Job, from_s: float, to_s: float) -> bool:
    return controllers_faulted(job, from_s, to_s) or any(controller.dead for controller in job.controllers)
