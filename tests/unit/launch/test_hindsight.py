"""What the launcher adds to a start's story from what it knows itself."""

from __future__ import annotations

import itertools
from dataclasses import replace

from ttp.launch.fault_story import Culprit, FaultStory, Saved, fault_of
from ttp.launch.hindsight import (
    AtOnce,
    GoneBack,
    ended_at_once,
    gone_back,
    left_unannounced,
    told_by,
    until_second_signal,
)


def test_only_ranks_here_that_ended_are_taken_for_unannounced() -> None:
    """All workers here have succeeded, and the controller took some for dead."""
    quiet = FaultStory(start=0, began_unix_s=1.0, kind="exited", culprits=(Culprit(rank=0), Culprit(rank=1)))
    pids = {0: 70, 1: 71}
    assert left_unannounced(quiet, pids) and left_unannounced(replace(quiet, kind="silent"), pids)
    for fault in (
        replace(quiet, kind="hung"),
        replace(quiet, elsewhere="node b has failed"),
        replace(quiet, culprits=()),
        replace(quiet, culprits=(Culprit(rank=0), Culprit(rank=2))),
    ):
        assert not left_unannounced(fault, pids)


def test_ranks_that_their_launcher_told_to_leave_say_why() -> None:
    """They know of SIGTERM only; a fault that came before the signal keeps its cause."""
    told = FaultStory(
        start=0, began_unix_s=1.0, kind="preempted", culprits=(Culprit(rank=0, cause="SIGTERM; step 6 is finished"),)
    )
    (culprit,) = told_by(told, "SIGINT").culprits
    assert culprit.cause == "ttprun got SIGINT, and told the ranks to leave (SIGTERM); step 6 is finished"
    died = replace(told, kind="exited", culprits=(Culprit(rank=0, cause="signal SIGTERM"),))
    assert told_by(died, "SIGINT") == died


def test_ranks_that_a_second_signal_ended_are_told_as_the_users_interrupt() -> None:
    """Whether they had said that they were leaving or not; a rank that died by itself keeps its cause, and so does the fault."""
    killed = Culprit(rank=0, cause="signal SIGKILL")
    died = FaultStory(start=0, began_unix_s=1.0, kind="exited", culprits=(killed,), not_saved="all ranks are dead")
    leaving = replace(died, kind="preempted", culprits=(replace(killed, cause="SIGTERM; then signal SIGKILL"),))
    for story in (died, leaving):
        told = told_by(story, "SIGINT", {0, 1})
        assert told.kind == "preempted" and told.not_saved == "a second signal left no time for it"
        assert told.culprits[0].cause == "ttprun got SIGINT, and ended the ranks at once (SIGKILL) at a second signal"
    saved = Saved(step=7, path="/iter_0000007", bytes=1, ranks=(2,))
    assert told_by(replace(died, saved=saved, not_saved=""), "SIGINT", {0}).not_saved == "", (
        "another node's ranks saved it"
    )
    assert told_by(died, "SIGINT", {1}) == died
    silent = replace(died, kind="silent")
    assert told_by(silent, "SIGINT", {0}) == silent, "it was before: somebody may have pressed Ctrl-C for it"


def test_a_start_that_went_back_is_known_over_starts_that_never_got_on() -> None:
    """Start 0 has left step 7 whole; start 1 saved nothing and knows of no checkpoint; start 2 begins anew."""
    kept = FaultStory(start=0, began_unix_s=1.0, kind="exited", culprits=(), goes_on_from="/ckpt/iter_0000007")
    nothing = FaultStory(start=1, began_unix_s=2.0, kind="exited", culprits=(), not_saved="all ranks are dead")
    assert gone_back([kept, nothing], 2, 1, [0]) == GoneBack(first_step=1, kept_step=7, steps=7)
    assert gone_back([kept, nothing], 2, 8, [0]) is None and gone_back([], 2, 1, []) is None
    assert gone_back([kept, nothing], 2, 1, [0, 1]) is None, "start 1 has got on from somewhere, and may have lost that"
    assert gone_back([nothing], 2, 1, [0]) is None, "not known"


def test_a_job_that_begins_behind_a_broken_checkpoint_goes_back() -> None:
    """An earlier job had come to step 12. Until the job has come past it, its later starts skip it as well: that is told once."""
    broken = "/ckpt/iter_0000012"
    back = GoneBack(first_step=9, kept_step=12, steps=4, skipped=broken)
    assert gone_back([], 0, 9, [], broken) == back
    assert back.text(9).startswith(f"went on with step 9, as {broken} was skipped: 4 steps to train again")
    nothing = FaultStory(start=0, began_unix_s=1.0, kind="exited", culprits=(), goes_on_from="/ckpt/iter_0000008")
    assert gone_back([nothing], 1, 9, [], broken) == back, "start 0 ended before its first step"
    saved = Saved(step=10, path="/ckpt/iter_0000010", bytes=1, ranks=(0,))
    assert gone_back([replace(nothing, saved=saved)], 1, 11, [0], broken) is None, "start 0 had told it"
    assert gone_back([replace(nothing, saved=saved)], 1, 9, [0], "/ckpt/iter_0000010") == GoneBack(
        first_step=9, kept_step=10, steps=2, skipped="/ckpt/iter_0000010"
    )
    assert gone_back([], 0, 9, [], "/a directory that cannot be read") is None


def line(unix_s: float, event: str, **fields: object) -> dict[str, object]:
    return {"unix_s": unix_s, "event": event, "fields": fields, "controller": 0}


BEGUN = [line(1.0, "registered", rank=rank, host="a", pid=70 + rank) for rank in (0, 1)]
NOTICES = [line(10.0 + r, "fault_reported", rank=r, kind="preempted", text="SIGTERM", detail="") for r in (0, 1)]
AFTER = [
    line(20.1, "death_seen", rank=1, text="signal SIGKILL", kind="exited"),
    line(20.2, "fault_reported", rank=0, kind="peer_error", text="Connection closed by peer", detail=""),
    line(20.3, "fault_reported", rank=0, kind="exception", text="RuntimeError: gloo", detail=""),
    line(20.4, "freeze_sent", kind="exited", culprits=[1], text="signal SIGKILL"),
    line(20.5, "frozen", ranks=[0], phases=["READY"], steps=[5], records=[3, 4], backup_steps=[]),
    line(20.6, "suspect", rank=0, kind="silent", text="nothing was heard for 3 s"),
    line(20.7, "refused", reason="all ranks are dead", goes_on_from="", kind="exited"),
    line(20.8, "exit_sent", reason="all ranks are dead"),
]


def test_what_a_second_signal_ends_is_told_alike_whatever_is_noticed_of_it() -> None:
    """Any part of what the controller writes while its ranks are killed, and any part of the notices before: one incident."""
    at_once = AtOnce(frozenset({0, 1}), 20.0)
    told = set()
    for notices, after in itertools.product(parts(NOTICES), parts(AFTER)):
        lines = until_second_signal([*BEGUN, *notices, *after], at_once)
        story = ended_at_once(0, fault_of(0, lines, {}), lines, at_once)
        said = told_by(story, "SIGINT", at_once.ranks)
        told.add(replace(said, began_unix_s=0.0))
    (only,) = told
    assert (only.kind, only.steps_lost, only.not_saved) == ("preempted", None, "a second signal left no time for it")
    assert [(one.rank, one.host, one.pid) for one in only.culprits] == [(0, "a", 70), (1, "a", 71)]


def test_a_fault_before_the_second_signal_stays_one_and_what_was_saved_counts() -> None:
    at_once = AtOnce(frozenset({0, 1}), 20.0)
    hung = line(15.0, "hung", ranks=[1], text="a hang", kind="hung")
    freeze = line(15.1, "freeze_sent", kind="hung", culprits=[1], text="a hang")
    lines = until_second_signal([*BEGUN, hung, freeze, *AFTER], at_once)
    story = ended_at_once(0, fault_of(0, lines, {}), lines, at_once)
    assert story.kind == "hung" and [one.rank for one in story.culprits] == [1]
    saved = [
        line(15.2, "frozen", ranks=[0], phases=["READY"], steps=[5], records=[3, 4], backup_steps=[]),
        line(20.1, "published", step=4, path="/d/iter_0000004"),
    ]
    lines = until_second_signal([*BEGUN, hung, freeze, *saved], at_once)
    story = ended_at_once(0, fault_of(0, lines, {}), lines, at_once)
    assert story.saved is not None and (story.saved.step, story.steps_lost) == (4, 0)


def parts(lines: list[dict[str, object]]) -> list[list[dict[str, object]]]:
    return [list(some) for count in range(len(lines) + 1) for some in itertools.combinations(lines, count)]
