"""What the launcher adds to a start's story from what it knows itself."""

from __future__ import annotations

from dataclasses import replace

from ttp.launch.fault_story import Culprit, FaultStory, Saved
from ttp.launch.hindsight import GoneBack, gone_back, left_unannounced, told_by


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
