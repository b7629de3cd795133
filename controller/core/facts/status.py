"""The status of a job that operators see, made of the machine's state (PURE).

Owns what is shown and how much of it: the answer is one message, which has a limit (`transport.MAX_MESSAGE_BYTES`), whatever the ranks are called
and died of. Decides nothing: no other module of the core reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from ttp.proto.messages import Cause, Heartbeat, Phase
from ttp.proto.status import (
    CoverageStatus,
    FaultStatus,
    JobStatus,
    PaceStatus,
    PublishedCheckpoint,
    RankStatus,
    StragglerStatus,
)

from .coverage import among, fatal_hosts, fatal_ranks
from .membership import Member
from .pace import step_times
from .state import ControllerState, Standby

MOST_NAMED = 64
"""Ranks, nodes and causes of a list that is shown in part."""
MOST_CAUSE = 200
"""Characters of what happened to one rank: the ranks of a node that is lost have the same long text each."""
MOST_HOST = 100


@dataclass(frozen=True, slots=True)
class Reported:
    """What ranks have reported that no machine keeps, by rank."""

    beats: Mapping[int, Heartbeat]
    """The last heartbeat of each rank that sent one."""
    step_times_s: Mapping[int, float] = field(default_factory=dict)
    """The newest step's time of each that sent one."""
    shares_s: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """Its own time of a step, and its wait for others, of each that sent them."""
    stragglers: tuple[StragglerStatus, ...] = ()
    loss: float | None = None


def job_status(
    state: ControllerState, seen: Reported, published: PublishedCheckpoint | None, pid: int, now: float
) -> JobStatus:
    """O(world)."""
    settings, table = state.settings, state.members.table
    causes = {rank: cause for cause in (state.fault.causes if state.fault else ()) for rank in cause.ranks}
    first = next((member.registration for member in table if member.registration is not None), None)
    return JobStatus(
        job_id=settings.job_id,
        term=settings.term,
        world_size=settings.world_size,
        stage=state.stage.value,
        survives=state.survives,
        ranks=tuple(_rank_status(rank, member, seen, causes.get(rank), now) for rank, member in enumerate(table)),
        published=published,
        pid=pid,
        role="standby" if isinstance(state.at, Standby) else "active",
        place=settings.standby,
        address=settings.address,
        standbys=state.standbys[:MOST_NAMED],
        save_dirs=first.save_dirs[:MOST_NAMED] if first is not None else (),
        heartbeat_s=settings.heartbeat_s,
        lease_s=settings.lease_s,
        pace=_pace(state, now),
        coverage=_coverage(state),
        fault=_fault(state, now),
        recoveries=state.recoveries.count,
        stragglers=tuple(replace(each, host=each.host[:MOST_HOST]) for each in seen.stragglers),
        loss=seen.loss,
    )


def _rank_status(rank: int, member: Member, seen: Reported, cause: Cause | None, now: float) -> RankStatus:
    registration, beat = member.registration, seen.beats.get(rank)
    own_s, waited_s = seen.shares_s.get(rank, (None, None))
    first_step = registration.state_step + 1 if registration is not None else 0
    cause = member.dead if member.dead is not None else cause
    return RankStatus(
        rank=rank,
        host=registration.host[:MOST_HOST] if registration is not None else "",
        pid=registration.pid if registration is not None else 0,
        attached=member.attached,
        phase=beat.phase if beat is not None else Phase.COMPUTE,
        step=beat.step if beat is not None else first_step,
        dead=member.dead is not None,
        cause=Cause(cause.kind, (rank,), cause.text[:MOST_CAUSE]) if cause is not None else None,
        finished=member.finished,
        silent_s=_age(member.received_at, now),
        step_s=seen.step_times_s.get(rank),
        suspect=member.suspect and member.dead is None,
        waiting=beat is not None and beat.waiting,
        paused=beat is not None and beat.paused,
        own_s=own_s,
        waited_s=waited_s,
    )


def _pace(state: ControllerState, now: float) -> PaceStatus:
    pace = state.pace
    median, slow = step_times(pace) if pace.durations else (None, None)
    limit_s = pace.limit_s if pace.limit_s < inf else None
    return PaceStatus(pace.steps, pace.front, median, slow, _age(pace.moved_at, now), limit_s)


def _age(moment: float, now: float) -> float | None:
    return max(0.0, now - moment) if abs(moment) < inf else None


def _coverage(state: ControllerState) -> CoverageStatus:
    """A rank that has not answered an order in this fault holds nothing any more."""
    if not state.coverage.groups:
        return CoverageStatus()
    stuck = state.fault.stuck if state.fault is not None else frozenset()
    living = {rank for rank, member in enumerate(state.members.table) if member.dead is None and rank not in stuck}
    held = among(state.coverage, living)
    counts = [len(group.holders) for group in held.groups]
    ranks = fatal_ranks(held)
    nodes = fatal_hosts(held) if len(set(held.hosts)) > 1 else ()
    return CoverageStatus(
        groups=len(counts),
        least=min(counts),
        uncovered=counts.count(0),
        fatal_ranks=ranks[:MOST_NAMED],
        fatal_rank_count=len(ranks),
        fatal_nodes=_cut(nodes[:MOST_NAMED], MOST_HOST),
        fatal_node_count=len(nodes),
        copies=held.copied,
    )


def _fault(state: ControllerState, now: float) -> FaultStatus | None:
    fault = state.fault
    if fault is None:
        return None
    causes = (fault.causes or ((fault.unproven,) if fault.unproven is not None else ()))[:MOST_NAMED]
    shown = tuple(Cause(cause.kind, cause.ranks[:MOST_NAMED], cause.text[:MOST_CAUSE]) for cause in causes)
    return FaultStatus(max(0.0, now - fault.began), shown)


def _cut(texts: Iterable[str], most: int) -> tuple[str, ...]:
    return tuple(text[:most] for text in texts)
