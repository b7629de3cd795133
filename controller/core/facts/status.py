"""The status of a job that operators see, made of the machine's state (PURE)."""

from __future__ import annotations

from collections.abc import Mapping

from ttp.proto.messages import Cause, Heartbeat, Phase
from ttp.proto.status import JobStatus, PublishedCheckpoint, RankStatus

from .membership import Member
from .state import ControllerState, Standby


def job_status(
    state: ControllerState, beats: Mapping[int, Heartbeat], published: PublishedCheckpoint | None, pid: int
) -> JobStatus:
    """`beats`: the last heartbeat of each rank that sent one. O(world)."""
    causes = {rank: cause for cause in (state.fault.causes if state.fault else ()) for rank in cause.ranks}
    return JobStatus(
        job_id=state.settings.job_id,
        term=state.settings.term,
        world_size=state.settings.world_size,
        stage=state.stage.value,
        survives=state.survives,
        ranks=tuple(
            _rank_status(rank, member, beats.get(rank), causes.get(rank))
            for rank, member in enumerate(state.members.table)
        ),
        published=published,
        pid=pid,
        role="standby" if isinstance(state.at, Standby) else "active",
    )


def _rank_status(rank: int, member: Member, beat: Heartbeat | None, cause: Cause | None) -> RankStatus:
    registration = member.registration
    first_step = registration.state_step + 1 if registration is not None else 0
    return RankStatus(
        rank=rank,
        host=registration.host if registration is not None else "",
        pid=registration.pid if registration is not None else 0,
        attached=member.attached,
        phase=beat.phase if beat is not None else Phase.COMPUTE,
        step=beat.step if beat is not None else first_step,
        dead=member.dead is not None,
        cause=member.dead if member.dead is not None else cause,
        finished=member.finished,
    )
