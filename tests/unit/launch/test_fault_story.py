"""A start's fault out of real journals: who, where, why, what was saved, how long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.unit.launch.journals import JOURNALS, journal, story
from ttp.launch.chronicle import Start, read_start
from ttp.launch.fault_story import Culprit, Line, Place, Saved, false_alarms, fault_of, trace_end
from ttp.launch.story import Recorded


def line(unix_s: float, event: str, controller: int = 0, **fields: object) -> Line:
    return {"unix_s": unix_s, "event": event, "fields": fields, "controller": controller}


def test_a_killed_rank_is_told_with_its_process_and_its_last_heartbeat() -> None:
    """The survivors that leave afterwards are no culprits, nor are the peers whose collective failed."""
    told = story("killed")
    assert told.kind == "exited"
    process = Culprit(rank=2, host="vm", pid=22698, cause="signal SIGKILL")
    assert told.culprits == (replace(process, phase="COMPUTE", step=1, reached=7),)
    assert told.survivors == (Place(phase="DONE", step=7, ranks=(3,)), Place(phase="COMPUTE", step=8, ranks=(0, 1)))
    assert told.saved == Saved(step=7, path="/run/checkpoints/iter_0000007", bytes=569970, ranks=(0, 1, 3))
    assert told.steps_lost == 0 and told.goes_on_from == told.saved.path and not told.not_saved
    assert told.took_over == 0


def killed(**changed: object) -> Culprit:
    """Return the dead rank of the killed job, with some of the journal's fields changed."""
    lines = [{**one, "fields": {**one["fields"], **_of(one, changed)}} for one in journal("killed")]
    told = fault_of(0, lines, {})
    assert told is not None
    return told.culprits[0]


def _of(one: Line, changed: dict[str, object]) -> dict[str, object]:
    owner = {"phase": "death_seen", "step": "death_seen", "heard_s": "death_seen"}
    return {name: value for name, value in changed.items() if owner.get(name, "frozen") == one["event"]}


def test_how_far_a_dead_rank_was_for_certain_follows_from_the_others_records() -> None:
    """Whoever has a step's commit record proves that every rank was READY of it. A single record may be that of a checkpoint which
    the dead rank had not loaded; one that is local proves nothing; and what the last heartbeat said may be more."""
    assert killed(records=[6, 7]).reached == 7
    assert killed(records=[7]).reached == 0
    assert killed(records=[6, 7], backup_steps=[6, 6, 6]).reached == 0
    assert killed(phase="COMPUTE", step=8).reached == 0 and killed(phase="COMPUTE", step=7).reached == 7
    assert killed(phase="READY", step=7).reached == 0
    assert killed(heard_s=0.75).heard_s == 0.75


def test_the_parts_add_up_to_the_whole_but_for_the_leave() -> None:
    """Each stage begins where the one before it ended; what the launcher saw first counts."""
    first_sign = next(one["unix_s"] for one in journal("killed") if one["event"] == "death_seen")
    told = fault_of(0, journal("killed"), {2: "signal SIGKILL"}, first_exit_unix_s=first_sign - 0.5)
    assert told is not None and told.took_ms is not None
    assert list(told.took_ms) == ["seen", "frozen", "decided", "written", "published", "total"]
    assert 500 <= told.took_ms["seen"] < 501
    assert abs(sum(told.took_ms.values()) - 2 * told.took_ms["total"]) < 1.0


def test_the_launchers_words_for_a_death_are_the_better_ones() -> None:
    """It knows of kills for want of memory, and may know a status that no controller lived to hear."""
    assert story("killed", {2: "signal SIGKILL, out of memory (x)"}).culprits[0].cause.endswith("out of memory (x)")
    refused = story("refused", {0: "signal SIGKILL", 2: "signal SIGSEGV"})
    assert [culprit.cause for culprit in refused.culprits] == ["signal SIGKILL", "signal SIGSEGV"]


def test_an_exception_is_told_with_the_end_of_its_traceback() -> None:
    """The rank lives on as a holder: its own report says where it was."""
    (culprit,) = story("raised").culprits
    assert culprit.rank == 1 and culprit.cause == "InjectedFault: rank 1, step 5: fault injected at backward"
    assert culprit.trace[0] == 'File "/srv/ttp/chaos/inject.py", line 166, in commit'
    assert culprit.trace[-1].endswith(culprit.cause) and len(culprit.trace) == 3
    assert (culprit.phase, culprit.step, culprit.reported) == ("COMPUTE", 5, True)
    assert trace_end("") == ()


def test_a_refusal_says_why_and_what_it_costs() -> None:
    """Nothing was saved: every step after the periodic checkpoint is lost."""
    told = story("refused")
    assert told.saved is None and told.not_saved.startswith("no live rank can write at step 8: shard 0 of 2")
    assert told.goes_on_from == "/run/checkpoints/iter_0000006" and told.steps_lost == 2
    assert told.took_ms is not None and list(told.took_ms) == ["seen", "frozen", "total"]


def test_a_false_alarm_before_a_hang_is_no_part_of_its_story() -> None:
    """The journal has a suspicion that was taken back, then a standstill that ended, then the hang."""
    told = story("hung")
    assert false_alarms(journal("hung")) == 1
    assert told.kind == "hung" and [culprit.rank for culprit in told.culprits] == [1]
    assert "rank 1 in COMPUTE of step 200" in told.culprits[0].cause
    assert told.took_ms is not None and told.took_ms["total"] < 100


def test_a_notice_is_told_as_one() -> None:
    """SIGTERM to one rank: the step in flight was finished."""
    told = story("told_to_leave")
    assert told.kind == "preempted" and told.culprits[0].cause == "SIGTERM; step 420 is finished"
    assert told.saved is not None and told.saved.step == 420


def test_a_takeover_is_told_from_the_journal_of_the_standby_that_led() -> None:
    """The first controller died before it could decide; the standby's lines from before it led do not count."""
    lines = read_start(JOURNALS / "taken_over", Start(number=1, begun_unix_s=0.0))
    told = fault_of(1, lines, {})
    assert told is not None and told.took_over == 1
    assert [(c.rank, c.pid, c.cause) for c in told.culprits] == [(1, 28445, "signal SIGKILL")]
    assert told.saved is not None and told.saved.bytes == 166374 + 134670 + 269006
    assert told.saved.ranks == (0, 2, 3)


def test_an_idle_standbys_lines_are_left_out() -> None:
    """It hears of the deaths after the job is over, and would make culprits of the survivors."""
    idle = [line(0.0, "death_seen", 1, rank=0, kind="exited", text="exiting")]
    assert fault_of(0, [*idle, *journal("killed")], {}) == story("killed")
    assert fault_of(0, idle, {}) is None


def test_a_start_without_a_fault_has_no_story() -> None:
    """Nor has one whose only freeze was a false alarm."""
    calm = [line(1.0, "assembled"), line(9.0, "rank_finished", rank=0), line(9.0, "finished", ranks=1)]
    assert fault_of(0, calm, {}) is None
    alarm = [line(2.0, "suspect", rank=0, why="x"), line(2.0, "freeze_sent"), line(3.0, "thawed")]
    assert fault_of(0, [*calm, *alarm], {}) is None


def test_workers_that_no_controller_led_are_told_by_how_they_ended() -> None:
    """A script that fails before its session."""
    told = fault_of(3, [], {1: "exit code 1"}, 50.0)
    assert told is not None and told.kind == "unled" and told.began_unix_s == 50.0
    assert told.culprits == (Culprit(rank=1, cause="exit code 1"),)
    assert told.not_saved == "no controller on this node led the ranks" and told.steps_lost is None


def test_a_journal_that_ends_in_the_middle_of_a_fault_says_so() -> None:
    """Nobody decided, or a standby on another node did."""
    lines = journal("killed")
    cut = lines[: next(number for number, one in enumerate(lines) if one["event"] == "decided")]
    told = fault_of(0, cut, {2: "signal SIGKILL"})
    assert told is not None and told.not_saved == "not known on this node: its journal ends before a decision"


def test_a_suspicion_that_nobody_lived_to_confirm_is_what_the_launcher_saw() -> None:
    """The only rank was killed: its stream broke, and its controller was ended before the lease was over."""
    lines = journal("killed")
    first = next(number for number, one in enumerate(lines) if one["event"] == "assembled")
    at_s = float(lines[-1]["unix_s"])
    cause: dict[str, Any] = {"kind": "silent", "culprits": [2], "text": "its stream broke"}
    signs = [
        line(at_s, "suspect", rank=2, why=cause["text"]),
        line(at_s, "freeze_sent", freeze_id=1, ranks=[], **cause),
    ]
    told = fault_of(0, [*lines[: first + 1], *signs], {2: "signal SIGKILL"}, one_node=True)
    assert told is not None and told.kind == "exited" and told.culprits[0].cause == "signal SIGKILL"
    assert told.culprits[0].pid == 22698 and told.not_saved == "the controllers ended before a decision"
    silent = fault_of(0, [*lines[: first + 1], *signs], {})
    assert silent is not None and silent.kind == "silent" and silent.culprits[0].cause == "its stream broke"


def test_a_takeover_is_the_first_sign_of_the_fault_that_it_meets() -> None:
    """The controller died with its node: the new one's wait for the ranks of that node is a part of what the fault took."""
    lost = {"kind": "silent", "culprits": [0], "text": "it did not come"}
    lines = [
        line(10.0, "takeover_began", 1, term=101, rank=1, earlier=["a:1"]),
        line(10.1, "registered", 1, rank=1, host="b", pid=7),
        line(12.0, "death_seen", 1, rank=0, kind="silent", text="it did not come"),
        line(12.0, "took_over", 1, term=101, ranks=[1], absent=[0], survives="", warnings=[]),
        line(12.1, "freeze_sent", 1, freeze_id=1, ranks=[1], **lost),
        line(12.5, "exit_sent", 1, code=75, reason="the data are gone", ranks=[1]),
    ]
    told = fault_of(0, lines, {})
    assert told is not None and told.began_unix_s == 10.0 and told.kind == "silent"
    assert told.took_ms == {"seen": 2100.0, "total": 2500.0}
    calm = [lines[0], lines[3], line(12.1, "freeze_sent", 1, **lost), line(12.2, "thawed", 1)]
    assert fault_of(0, calm, {}) is None
    later = [*calm, line(90.0, "suspect", 1, rank=1, why="x"), line(91.0, "freeze_sent", 1, **lost)]
    told = fault_of(0, later, {})
    assert told is not None and told.began_unix_s == 90.0


def test_a_controller_lost_before_the_job_had_assembled_is_told() -> None:
    """All are sent away by the one that took over: nothing but the controller was lost."""
    lines = [
        line(10.0, "takeover_began", 1, term=101, rank=1, earlier=["a:1"]),
        line(11.0, "took_over", 1, term=101, ranks=[0, 1], absent=[], survives="", warnings=[]),
        line(11.0, "exit_sent", 1, code=75, reason="the controller was lost before the job had assembled", ranks=[0]),
    ]
    told = fault_of(0, lines, {})
    assert told is not None and told.kind == "controller_lost" and "before the job had assembled" in told.not_saved


def test_a_survivor_that_is_told_to_leave_in_the_middle_of_a_fault_is_no_culprit() -> None:
    """The launcher got SIGTERM while it held the survivors: the fault stays the kill, and the notice is nobody's."""
    lines = journal("killed")
    sent = next(number for number, one in enumerate(lines) if one["event"] == "write_sent")
    notice: dict[str, Any] = {
        "rank": 0,
        "kind": "preempted",
        "text": "SIGTERM; no step is in flight here",
        "detail": "",
    }
    at_s = float(lines[sent]["unix_s"])
    told = fault_of(0, [*lines[: sent + 1], line(at_s, "fault_reported", **notice), *lines[sent + 1 :]], {})
    whole = fault_of(0, lines, {})
    assert told is not None and told == whole


def test_a_rank_that_dies_after_the_notice_is_told_with_those_that_had_it() -> None:
    """The fault began as a notice: both are what happened."""
    lines = journal("told_to_leave")
    place = next(number for number, one in enumerate(lines) if one["event"] == "fault_reported")
    at_s = float(lines[place]["unix_s"])
    fields: dict[str, Any] = {
        "kind": "exited",
        "text": "signal SIGKILL",
        "host": "vm",
        "pid": 7,
        "phase": "READY",
        "step": 420,
    }
    told = fault_of(0, [*lines[: place + 1], line(at_s, "death_seen", rank=0, **fields), *lines[place + 1 :]], {})
    assert (
        told is not None
        and {1: "SIGTERM; step 420 is finished", 0: "signal SIGKILL"}.items()
        <= {culprit.rank: culprit.cause for culprit in told.culprits}.items()
    )


def test_an_exception_that_the_controller_was_not_told_is_named_all_the_same() -> None:
    """It was raised outside of train: the stream broke, and the launcher has read the worker's error file."""
    lines = journal("killed")
    first = next(number for number, one in enumerate(lines) if one["event"] == "assembled")
    at_s = float(lines[-1]["unix_s"])
    signs = [
        line(at_s, "suspect", rank=2, why="its stream broke"),
        line(at_s, "freeze_sent", freeze_id=1, ranks=[], kind="silent", culprits=[2], text="its stream broke"),
        line(at_s, "death_seen", rank=2, kind="exited", text="exiting"),
    ]
    trace = (
        'Traceback:\n  File "train.py", line 8\n    session.resume()\nttp.errors.CheckpointMismatch: of another model'
    )
    raised = {2: Recorded("CheckpointMismatch: of another model\nsecond line", trace)}
    told = fault_of(0, [*lines[: first + 1], *signs], {2: "exit code 1"}, raised=raised, one_node=True)
    assert told is not None and told.kind == "exception"
    assert told.culprits[0].cause == "exit code 1: CheckpointMismatch: of another model"
    assert told.culprits[0].trace[-1] == "ttp.errors.CheckpointMismatch: of another model"
    killed_too = fault_of(0, [*lines[: first + 1], *signs], {2: "signal SIGKILL"})
    assert killed_too is not None and killed_too.kind == "silent"
    unled = fault_of(0, [], {2: "exit code 1"}, raised=raised)
    assert unled is not None and unled.culprits[0].cause == "exit code 1: CheckpointMismatch: of another model"
    raised[0] = Recorded("RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.7]:4711", "")
    both = fault_of(0, [], {0: "exit code 1", 2: "exit code 1"}, raised=raised)
    assert both is not None and [culprit.rank for culprit in both.culprits] == [2, 0], (
        "what is quoted is the cause, not what came of it"
    )


def test_what_befell_a_rank_is_not_unsaid_by_how_it_ended() -> None:
    """An exception, a notice or a hang, and then somebody's SIGKILL in the middle of the dump."""
    begins: tuple[tuple[Line, str], ...] = (
        (line(1.0, "fault_reported", rank=0, kind="exception", text="ValueError: boom", detail=""), "ValueError: boom"),
        (line(1.0, "fault_reported", rank=0, kind="preempted", text="SIGTERM", detail=""), "SIGTERM"),
        (line(1.0, "hung", ranks=[0], text="no step for 60 s"), "no step for 60 s"),
    )
    frozen = line(1.1, "freeze_sent", kind="x", culprits=[0], text="x", ranks=[0, 1])
    for first, known in begins:
        for text, wanted in (("exiting", known), ("signal SIGKILL", f"{known}; then signal SIGKILL")):
            death = line(2.0, "death_seen", rank=0, kind="exited", text=text)
            told = fault_of(0, [first, frozen, death, line(3.0, "refused", reason="x")], {})
            assert told is not None and [culprit.cause for culprit in told.culprits] == [wanted]


def test_a_controller_that_wakes_up_after_the_ranks_have_finished_tells_of_no_fault() -> None:
    """It was stopped, a standby has led them to the end, and it takes them for dead."""
    lines = [
        line(1.0, "assembled"),
        line(5.0, "takeover_began", 1),
        line(5.1, "took_over", 1),
        line(9.0, "finished", 1, ranks=2),
        line(12.0, "death_seen", rank=0, kind="exited", text="exit code 0"),
        line(12.1, "refused", reason="all ranks are dead"),
    ]
    assert fault_of(0, lines, {}) is None and fault_of(0, [*lines[:3], *lines[4:]], {}) is not None
    late = fault_of(0, lines, {1: "exit code 1"})
    assert late is not None and late.kind == "unled" and late.not_saved == "the journal tells of no fault"
