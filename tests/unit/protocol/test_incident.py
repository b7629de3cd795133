"""The report of a fault: one event when it ends, with who, where, why, what was saved and how long it took."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.protocol.bench import ControllerBench, report
from tests.unit.protocol.test_controller_members import killed
from tests.unit.protocol.test_takeover import coming, frozen, standby
from ttp.proto.incident import Culprit, Incident, RankPlace, Saved, incident_fields, read_incident, trace_end
from ttp.proto.messages import Cause, CauseKind, FaultReport, Heartbeat, Phase, Published, WorkerExit

TRACE = (
    'Traceback:\n  File "a.py", line 1\n    outer()\n  File "b.py", line 2\n    inner()\n    ^^^^^^^\nValueError: boom'
)
PEER = "connection closed by peer"


def raised(rank: int, text: str = "ValueError: boom", kind: CauseKind = CauseKind.EXCEPTION) -> FaultReport:
    return FaultReport(rank, Cause(kind, (rank,), text), TRACE if kind is CauseKind.EXCEPTION else "")


def ended(job: ControllerBench) -> Incident:
    """Return the only incident, as a launcher reads it."""
    (fields,) = job.logged("incident")
    return read_incident(fields)


def test_a_checkpoint_that_is_newer_than_the_one_that_is_published_is_what_the_job_goes_on_from() -> None:
    """A publisher had renamed it for an earlier controller, and its rank can write no more."""
    job = ControllerBench()
    job.say(killed(3))
    found = save(job, (0, 1, 2), checkpoint="/a/iter_0000008")
    assert found.saved is not None and (found.saved.step, found.goes_on_from) == (6, "/a/iter_0000008")


def save(job: ControllerBench, ranks: tuple[int, ...], step: int = 7, **changed: Any) -> Incident:
    """Let these ranks report and save the step before."""
    for rank in ranks:
        job.say(report(rank, job.state.freeze_id, Phase.COMPUTE, step, **changed), after=0.05)
    job.all_write(job.orders())
    rank, order = job.publish_order()
    job.say(Published(rank, order.freeze_id, step - 1, f"/a/iter_000000{step - 1}"), after=0.02)
    return ended(job)


def test_a_killed_rank_is_reported_with_its_process_its_last_heartbeat_and_how_far_it_was_for_certain() -> None:
    """The others' records prove that all were READY of step 6. The parts add up to the whole."""
    job = ControllerBench()
    job.say(Heartbeat(3, Phase.COMPUTE, 2))
    job.say(killed(3), after=0.75)
    incident = save(job, (0, 1, 2), records=(5, 6))
    place: dict[str, Any] = {"phase": "COMPUTE", "step": 2, "heard_s": 0.75, "reached": 6}
    dead = Culprit(rank=3, host="host3", pid=103, kind="exited", cause="signal SIGKILL", age_s=0.17, **place)
    path = "/a/iter_0000006"
    assert incident == Incident(
        kind="exited",
        culprits=(dead,),
        survivors=(RankPlace(phase="COMPUTE", step=7, ranks=(0, 1, 2)),),
        saved=Saved(step=6, path=path, bytes=30, ranks=(0, 1, 2)),
        goes_on_from=path,
        steps_lost=0,
        took_ms={"seen": 0.0, "frozen": 150.0, "decided": 0.0, "written": 0.0, "published": 20.0, "total": 170.0},
    )
    assert job.journal[-2].event == "exit_sent" and job.journal[-1].event == "incident"


@pytest.mark.parametrize("changed", [{"records": (6,)}, {"records": (5, 6), "backup_step": 5}, {"records": (4, 5)}])
def test_where_nothing_proves_more_a_rank_was_where_its_last_heartbeat_said(changed: dict[str, Any]) -> None:
    """A single record may be a checkpoint's, a local one proves nothing, and the heartbeat may say more."""
    job = ControllerBench()
    job.say(Heartbeat(3, Phase.COMPUTE, 6), killed(3))
    (dead,) = save(job, (0, 1, 2), **changed).culprits
    assert dead.reached == 0


def test_how_a_rank_ended_is_its_cause_once_that_is_known() -> None:
    """`exiting` is what an agent sees first. A rank's own exception is not hidden by its end."""
    job = ControllerBench()
    job.say(WorkerExit(3, 103, "exiting", 0.0), raised(0), WorkerExit(3, 103, "signal SIGKILL", 0.0), killed(0))
    incident = save(job, (1, 2))
    causes = {each.rank: (each.kind, each.cause) for each in incident.culprits}
    assert causes == {3: ("exited", "signal SIGKILL"), 0: ("exception", "ValueError: boom; then signal SIGKILL")}
    assert incident.culprits[1].trace == ('File "b.py", line 2', "inner()", "ValueError: boom") and trace_end("") == ()


def test_a_rank_that_raised_is_reported_where_it_is_and_survivors_are_the_others() -> None:
    job = ControllerBench()
    job.say(raised(1))
    incident = save(job, (0, 1, 2, 3))
    (culprit,) = incident.culprits
    assert incident.kind == "exception" and (culprit.phase, culprit.step, culprit.reported) == ("COMPUTE", 7, True)
    assert incident.survivors == (RankPlace(phase="COMPUTE", step=7, ranks=(0, 2, 3)),)


def test_a_failed_collective_names_no_rank_where_another_cause_is_known() -> None:
    """Nor does a preemption notice in the middle of another fault: an agent was signalled to end, and signals its ranks."""
    job = ControllerBench()
    job.say(raised(0, PEER, CauseKind.PEER_ERROR), killed(3), raised(1, "SIGTERM", CauseKind.PREEMPTED))
    incident = save(job, (0, 1, 2))
    assert (incident.kind, [each.rank for each in incident.culprits]) == ("exited", [3])
    alone = ControllerBench(total_timeout_s=2.0)
    alone.say(raised(0, PEER, CauseKind.PEER_ERROR))
    alone.wait(2.5)
    assert (ended(alone).kind, [each.cause for each in ended(alone).culprits]) == ("peer_error", [PEER])


def test_a_rank_that_dies_after_a_notice_is_reported_with_those_that_had_it() -> None:
    job = ControllerBench()
    job.say(raised(1, "SIGTERM", CauseKind.PREEMPTED), killed(0))
    incident = save(job, (1, 2, 3))
    assert incident.kind == "preempted"
    assert {each.rank: each.cause for each in incident.culprits} == {1: "SIGTERM", 0: "signal SIGKILL"}


def test_a_refusal_says_why_and_what_it_costs() -> None:
    """Both holders of a shard are dead: the steps since the newest checkpoint that a rank knows are lost."""
    job = ControllerBench()
    job.say(killed(0), killed(2))
    for rank in (1, 3):
        job.say(report(rank, 1, Phase.COMPUTE, 9, records=(7, 8), checkpoint="/a/iter_0000006"))
    incident = ended(job)
    assert incident.saved is None and incident.not_saved.startswith("no live rank can write at step 8: shard 0")
    assert (incident.goes_on_from, incident.steps_lost) == ("/a/iter_0000006", 2)
    assert incident.took_ms is not None and list(incident.took_ms) == ["seen", "frozen", "total"]


def test_a_false_alarm_is_not_reported_and_does_not_belong_to_the_next_fault() -> None:
    job = ControllerBench()
    job.close(1)
    job.say(replace(coming(1), controllers=()))
    job.all_report(7)
    assert job.logged("thawed") and not job.logged("incident")
    job.say(killed(3), after=50.0)
    found = save(job, (0, 1, 2))
    assert found.culprits[0].age_s < 1.0 and found.took_ms is not None and found.took_ms["total"] < 1000.0


def test_a_fault_before_the_job_has_assembled_is_reported() -> None:
    job = ControllerBench(assembled=False)
    job.say(coming(0), killed(1))
    incident = ended(job)
    assert (incident.kind, incident.culprits[0].rank, incident.steps_lost) == ("exited", 1, None)
    assert "died before the job had assembled" in incident.not_saved


def test_a_job_that_never_assembles_without_any_sign_has_no_incident() -> None:
    job = ControllerBench(assembled=False, register_timeout_s=2.0)
    job.say(coming(0))
    job.wait(2.5, senders=())
    assert job.logged("exit_sent") and not job.logged("incident")
    job = ControllerBench(assembled=False, register_timeout_s=2.0)
    job.say(coming(0))
    job.close(0)
    job.wait(2.5, senders=())
    assert ended(job).kind == "unknown" and ended(job).not_saved.startswith("only 1 of 4 ranks registered in time")


def test_a_suspicion_while_ranks_registered_does_not_belong_to_a_later_fault() -> None:
    job = ControllerBench(assembled=False)
    job.say(coming(0))
    job.close(0)
    for rank in range(4):
        job.say(replace(coming(rank), controllers=()))
    job.say(killed(3), after=50.0)
    took = save(job, (0, 1, 2)).took_ms
    assert took is not None and took["seen"] == 0.0


def test_a_fault_whose_end_no_rank_lived_to_see_is_reported_as_a_suspicion() -> None:
    """All streams broke: the controller ends by itself."""
    job = ControllerBench(orphan_timeout_s=2.0, lease_s=30.0)
    job.close(0, 1, 2, 3)
    job.wait(2.5, senders=())
    incident = ended(job)
    assert incident.suspected and (incident.kind, incident.culprits[0].cause) == ("silent", "its stream broke")
    assert incident.not_saved == "no rank was attached for 2 s" and not job.logged("exit_sent")


def test_a_takeover_is_the_first_sign_of_the_fault_that_it_meets() -> None:
    """The wait for the ranks of a lost node is a part of what the fault took."""
    job = standby()
    for rank in range(3):
        job.say(coming(rank))
    job.wait(3.1, senders=range(3))
    incident = save(job, (0, 1, 2))
    assert (incident.took_over, incident.kind) == (1, "silent") and incident.took_ms is not None
    assert incident.took_ms["seen"] == 3000.0 and incident.culprits[0].cause.startswith("it did not come")


def test_a_rank_that_does_not_answer_a_new_controller_is_the_culprit() -> None:
    job = frozen()
    job.all_report(7, ranks=(0, 1, 2))
    job.wait(10.5)
    job.all_write(job.orders())
    assert job.state.notes.signs[-1].rank == 3 and job.state.notes.signs[-1].kind is CauseKind.SILENT


def test_what_is_written_is_what_is_read() -> None:
    incident = Incident(kind="hung", culprits=(Culprit(rank=1, trace=("a", "b")),), took_ms={"seen": 1.0})
    assert read_incident(incident_fields(incident)) == incident
    with pytest.raises(KeyError):
        read_incident({})
