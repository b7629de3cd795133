"""An attempt's fault, as it is reported: the controller's incident, and what only the launcher knows."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.launch.journals import JOURNALS, NOTHING, journal, reported, unended
from ttp.launch.report.exit_status import Recorded
from ttp.launch.report.incident import AtOnce, Report, false_alarms, report_of
from ttp.launch.report.journals import Line, leading_lines, read_journals
from ttp.proto.incident import Culprit, Incident, incident_fields

KILL: dict[str, Any] = {"exits": {2: "signal SIGKILL"}}
TRACE = 'Traceback:\n  File "train.py", line 8\n    session.resume()\nttp.errors.CheckpointMismatch: of another model'
RAISED = Recorded("CheckpointMismatch: of another model\nsecond line", TRACE)
PEER = Recorded("RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.7]:4711", "")


def line(unix_s: float, event: str, controller: int = 0, **fields: object) -> Line:
    return {"unix_s": unix_s, "event": event, "fields": fields, "controller": controller}


def ended(unix_s: float, controller: int = 0, **known: Any) -> Line:
    incident = Incident(**{"kind": "exited", "took_ms": {"seen": 0.0, "total": 1000.0}, **known})
    return {**line(unix_s, "incident", controller), "fields": incident_fields(incident)}


def causes(report: Report) -> dict[int, str]:
    return {each.rank: each.cause for each in report.incident.culprits}


def test_what_the_controller_reported_is_reported() -> None:
    report = reported(journal("killed"))
    at = next(one for one in journal("killed") if one["event"] == "incident")
    assert incident_fields(report.incident).keys() == at["fields"].keys()
    assert report.incident.saved is not None and report.incident.saved.ranks == (0, 1, 3)
    assert at["unix_s"] - report.began_unix_s == pytest.approx(0.0964)


def test_what_the_launcher_saw_first_is_when_the_fault_began() -> None:
    began = reported(journal("killed")).began_unix_s
    report = reported(journal("killed"), **KILL, first_exit_unix_s=began - 0.5)
    assert report.began_unix_s == began - 0.5 and report.incident.took_ms is not None
    assert (report.incident.took_ms["seen"], report.incident.took_ms["total"]) == (500.0, 596.4)
    elsewhere = reported(journal("killed"), exits={0: "exit code 1"}, first_exit_unix_s=began - 0.5)
    assert elsewhere.began_unix_s == began, "that end came of the fault"


BOOM = Culprit(rank=2, kind="exception", cause="ValueError: boom", trace=("ValueError: boom",))
EXITED = Culprit(rank=2, kind="exited", cause="exiting")
CAUSES = [
    (replace(EXITED, cause="signal SIGKILL"), "signal SIGKILL, out of memory (x)", None, "signal SIGKILL, out of memory (x)"),
    (EXITED, "signal SIGSEGV", None, "signal SIGSEGV"),
    (EXITED, "", None, "exited"),
    (EXITED, "exit code 1", RAISED, "exit code 1: CheckpointMismatch: of another model"),
    (BOOM, "exit code 1", None, "ValueError: boom"),
    (BOOM, "exit code 1", RAISED, "ValueError: boom"),
]  # fmt: skip


@pytest.mark.parametrize(("culprit", "own", "raised", "cause"), CAUSES)
def test_how_a_worker_here_ended_completes_what_the_controller_knows(
    culprit: Culprit, own: str, raised: Recorded | None, cause: str
) -> None:
    """It knows of out-of-memory kills, of a status that no controller received, and of exceptions outside of train."""
    exits, recorded = {2: own} if own else {}, {2: raised} if raised else {}
    lines = [line(1.0, "registered", rank=2, host="a", pid=72), ended(5.0, culprits=(culprit,))]
    report = reported(lines, exits=exits, raised=recorded)
    (culprit,) = report.incident.culprits
    assert (culprit.cause, culprit.host, culprit.pid) == (cause, "a", 72)
    assert report.incident.kind == ("exception" if raised else "exited")
    if raised and culprit is EXITED:
        assert culprit.trace[-1] == "ttp.errors.CheckpointMismatch: of another model"


def test_a_death_that_was_named_after_the_incident_has_its_name() -> None:
    """Of a rank on another node."""
    lines = [ended(5.0, culprits=(EXITED,)), line(5.1, "death_named", rank=2, text="signal SIGKILL")]
    assert causes(reported(lines)) == {2: "signal SIGKILL"}


def test_a_rank_that_was_only_suspected_ended_as_its_launcher_saw() -> None:
    """The only rank was killed: its stream broke, and its controller was ended before the lease was over."""
    silent = Culprit(rank=2, kind="silent", cause="its stream broke")
    for lines in (
        [ended(5.0, kind="silent", suspected=True, culprits=(silent,))],
        [line(5.0, "suspect", rank=2), line(5.0, "freeze_sent", kind="silent", culprits=[2], text="its stream broke")],
    ):
        report = reported(lines, **KILL)
        assert (report.incident.kind, causes(report)) == ("exited", {2: "signal SIGKILL"})
        alone = reported(lines)
        assert (alone.incident.kind, causes(alone)) == ("silent", {2: "its stream broke"})


def test_a_fault_that_no_controller_lived_to_end_is_reported_by_its_first_signs() -> None:
    report = reported(unended("killed"), **KILL)
    assert report.incident.kind == "exited" and causes(report) == {2: "signal SIGKILL"}
    (dead,) = report.incident.culprits
    assert (dead.host, dead.pid, dead.phase, dead.step) == ("vm", 22698, "COMPUTE", 1)
    assert report.incident.not_saved == "the controllers ended before a decision" and report.incident.saved is None
    elsewhere = reported(unended("killed"), one_node=False)
    assert elsewhere.incident.not_saved == "not known on this node: its journal ends before a decision"
    left = reported(unended("killed"), left_saved=True)
    assert left.incident.not_saved.startswith("not known on this node: ranks exited for a restart"), (
        "its journal is lost"
    )
    raised = reported(unended("raised"))
    assert raised.incident.kind == "exception" and len(raised.incident.culprits[0].trace) == 3
    hung = reported(unended("hung"))
    assert hung.incident.kind == "hung" and list(causes(hung)) == [1], "without the false alarm before it"
    assert false_alarms(journal("hung")) == 1


def test_a_takeover_is_reported_by_the_standby_that_led() -> None:
    """The fault began where the first controller saw it; a standby's lines from before it led do not count."""
    lines = read_journals(JOURNALS / "taken_over", 1, 0.0)
    report = reported(lines, 1)
    (culprit,) = report.incident.culprits
    assert (culprit.rank, culprit.pid, culprit.cause, report.incident.took_over) == (1, 28445, "signal SIGKILL", 1)
    first = next(each["unix_s"] for each in lines if each["event"] == "death_seen")
    assert report.began_unix_s == pytest.approx(first, abs=1e-3)
    idle = line(0.0, "death_seen", 1, rank=0, kind="exited", text="exiting")
    assert reported([idle, *journal("killed")]) == reported(journal("killed"))
    assert leading_lines([idle]) == [] and report_of(0, [idle], NOTHING) is None


@pytest.mark.parametrize(("hosts", "leads"), [(("b",), False), (("b", "a"), True), ((), True)])
def test_a_standby_behind_a_broken_network_leads_nothing_that_counts(hosts: tuple[str, ...], leads: bool) -> None:
    """Another node has the place of the only one whose processes have come to it. What it has saved is not what the job goes on from."""
    lines: list[Line] = []

    def write(controller: int, event: str, **fields: object) -> None:
        lines.append({"unix_s": float(len(lines)), "controller": controller, "event": event, "fields": fields})

    write(0, "take_places_sent", host="c", lost="b", ranks=[2, 3], freeze_id=1)
    write(1, "takeover_began")
    for rank, host in enumerate(hosts):
        write(1, "registered", rank=rank, host=host, pid=5)
    write(1, "published", step=25)
    write(0, "exit_sent", code=75)
    found = [each["event"] for each in leading_lines(lines) if each["event"] in ("published", "exit_sent")]
    assert found == ["published"] * leads + ["exit_sent"]


@pytest.mark.parametrize("later", [True, False])
def test_a_controller_whose_ranks_have_gone_to_a_later_one_reports_nothing(later: bool) -> None:
    """It was stopped, and continues when the others are through: that it has no rank is not how the job has ended."""
    lines = [line(0.0, "freeze_sent")]
    if later:
        lines += [line(1.0, "took_over", 1, ranks=[0, 1]), line(2.0, "published", 1, step=25)]
    why = "no rank was attached for 15 s"
    lines += [line(3.0, "refused", reason=why), line(3.1, "incident", not_saved=why)]
    found = [each["event"] for each in leading_lines(lines)]
    assert found == ["freeze_sent", *(("took_over", "published") if later else ("refused", "incident"))]


CALM = [line(1.0, "assembled"), line(9.0, "finished", ranks=1)]
ALARM = [
    line(2.0, "suspect", rank=0),
    line(2.0, "freeze_sent", kind="silent", culprits=[0], text="x"),
    line(3.0, "thawed"),
]
LATE = [line(12.0, "death_seen", rank=0, kind="exited", text="exit code 0"), line(12.1, "refused"), ended(12.1)]


@pytest.mark.parametrize(
    "lines", [CALM, [CALM[0], *ALARM], [*CALM, *LATE], [ended(1.5), *ALARM], [], [line(5.0, "exit_sent"), *LATE[:1]]]
)
def test_an_attempt_without_a_fault_has_no_report(lines: list[Line]) -> None:
    """Nor has one whose only freeze was a false alarm, or that has finished: a controller that was stopped meanwhile, and goes on, takes the
    ranks for dead, as does one that was cut off before a standby thawed them."""
    assert report_of(0, lines, NOTHING) is None
    late = report_of(0, lines, replace(NOTHING, exits={1: "exit code 1"}))
    assert late is not None and late.incident.kind == "unled"


def test_of_two_controllers_the_one_that_saved_ended_the_fault() -> None:
    """The other one was cut off, and refused."""
    saved = incident_fields(reported(journal("killed")).incident)
    other = {**line(6.0, "incident"), "fields": saved}
    for lines in ([ended(5.0, not_saved="x"), other], [other, ended(7.0, not_saved="x")]):
        assert reported(lines).incident.saved is not None


def test_workers_that_no_controller_led_are_reported_by_how_they_ended() -> None:
    """A script that fails before its session: what others quote is what came of it, and no cause."""
    report = reported([], 3, exits={1: "exit code 1"}, first_exit_unix_s=50.0, pids={1: 71})
    assert (report.incident.kind, report.began_unix_s) == ("unled", 50.0)
    assert report.incident.culprits == (Culprit(rank=1, pid=71, cause="exit code 1"),)
    assert (
        report.incident.not_saved == "no controller on this node led the ranks" and report.incident.steps_lost is None
    )
    both = reported([], exits={0: "exit code 1", 2: "exit code 1"}, raised={0: PEER, 2: RAISED})
    assert list(causes(both)) == [2, 0] and both.incident.culprits[0].trace
    assert reported([], exits={0: "exit code 1"}, left_saved=True).incident.not_saved.startswith(
        "not known on this node: ranks"
    )
    assert reported([line(1.0, "assembled")], exits={0: "x"}).incident.not_saved == "the journal has no fault"
    elsewhere = reported([], elsewhere="b has failed")
    assert (elsewhere.incident.kind, elsewhere.elsewhere) == ("elsewhere", "b has failed")


# --- signals to the launcher ---

AT_ONCE = AtOnce(frozenset({0, 1}), 20.0)
BEGUN = [line(1.0, "registered", rank=rank, host="a", pid=70 + rank) for rank in (0, 1)]
NOTICES = [line(10.0 + r, "fault_reported", rank=r, kind="preempted", text="SIGTERM", detail="") for r in (0, 1)]
NOTED = tuple(Culprit(rank=r, kind="preempted", cause="SIGTERM; then signal SIGKILL", age_s=10.7 - r) for r in (0, 1))
DIED = Culprit(rank=1, kind="exited", cause="signal SIGKILL", age_s=0.6)
AFTER = [
    line(20.1, "death_seen", rank=1, text="signal SIGKILL", kind="exited"),
    line(20.3, "fault_reported", rank=0, kind="exception", text="RuntimeError: gloo", detail=""),
    line(20.4, "freeze_sent", kind="exited", culprits=[1], text="signal SIGKILL"),
    line(20.6, "suspect", rank=0, kind="silent", text="no heartbeat for 3 s"),
    line(20.7, "exit_sent", reason="all ranks are dead"),
    ended(20.7, culprits=(DIED,), not_saved="all ranks are dead", steps_lost=3),
    ended(20.7, kind="preempted", culprits=NOTED, not_saved="all ranks are dead", took_ms={"seen": 0.0, "total": 10700.0}),
]  # fmt: skip


def parts(lines: list[Line]) -> list[list[Line]]:
    return [list(some) for count in range(len(lines) + 1) for some in itertools.combinations(lines, count)]


def test_what_a_second_signal_ends_is_reported_alike_whatever_is_noticed_of_it() -> None:
    """Any part of what the controller writes while its ranks are killed, and any part of the notices before: one incident."""
    culprit = set()
    for notices, after in itertools.product(parts(NOTICES), parts(AFTER)):
        report = reported([*BEGUN, *notices, *after], drained_by="SIGINT", at_once=AT_ONCE)
        incident = replace(report.incident, took_ms=None)
        culprit.add((incident.kind, incident.steps_lost, incident.not_saved, incident.culprits, incident.survivors))
    ((kind, lost, why, culprits, survivors),) = culprit
    assert (kind, lost, why, survivors) == ("preempted", None, "a second signal killed the ranks before", ())
    assert [(one.rank, one.host, one.pid) for one in culprits] == [(0, "a", 70), (1, "a", 71)]
    assert culprits[0].cause == "ttprun received SIGINT, and killed the ranks (SIGKILL) at a second signal"


def test_a_fault_before_the_second_signal_stays_one_and_what_was_saved_counts() -> None:
    """Somebody may have pressed Ctrl-C for it."""
    hung = [
        line(15.0, "hung", ranks=[1], text="a hang"),
        line(15.1, "freeze_sent", kind="hung", culprits=[1], text="a hang"),
    ]
    hang = Culprit(rank=1, kind="hung", cause="a hang", age_s=5.7)
    took = {"seen": 0.0, "total": 5700.0}
    for end in ([], [ended(20.7, kind="hung", culprits=(hang, replace(DIED, rank=0)), not_saved="x", took_ms=took)]):
        report = reported([*BEGUN, *hung, *end], drained_by="SIGINT", at_once=AT_ONCE)
        assert (report.incident.kind, causes(report)) == ("hung", {1: "a hang"})
    known = reported(journal("killed")).incident
    saved = ended(20.7, kind="preempted", culprits=NOTED, saved=known.saved, steps_lost=0)
    report = reported([*BEGUN, saved], drained_by="SIGINT", at_once=AT_ONCE)
    assert report.incident.saved == known.saved and (report.incident.not_saved, report.incident.steps_lost) == ("", 0)


def test_ranks_that_their_launcher_sent_sigterm_report_why() -> None:
    """They know of SIGTERM only; a fault that came before the signal keeps its cause."""
    noticed = Culprit(rank=0, kind="preempted", cause="SIGTERM; step 6 is finished")
    report = reported([ended(5.0, kind="preempted", culprits=(noticed,))], drained_by="SIGINT")
    assert causes(report) == {0: "ttprun received SIGINT and sent SIGTERM to the ranks; step 6 is finished"}
    died = ended(5.0, culprits=(replace(noticed, kind="exited", cause="signal SIGTERM"),))
    assert causes(reported([died], drained_by="SIGINT")) == {0: "signal SIGTERM"}
