"""A job in a crash loop backs off, and then stops; one with a non-retryable failure stops at once."""

from __future__ import annotations

import pytest

from ttp.launch.attempts.crash_loop import LONGEST_WAIT_S, CrashLoop, CrashLoopVerdict, refusal
from ttp.launch.report.exit_status import Recorded
from ttp.launch.watch.processes import Lost


def judge(
    starts: CrashLoop, new_step: bool | None = False, lasted_s: float = 1.0, protected: bool = False
) -> CrashLoopVerdict:
    """Judge an attempt, by default one that failed at once."""
    return starts.ended(new_step=new_step, lasted_s=lasted_s, protected=protected)


def test_the_third_attempt_in_a_row_without_a_step_ends_the_job() -> None:
    """After waits of one and two seconds, with the reason and the flag."""
    starts = CrashLoop(3)
    first, second, third = (judge(starts) for _ in range(3))
    assert (first.stop, first.wait_s) == (False, 1.0) and first.text.startswith("this attempt failed before")
    assert (second.stop, second.wait_s) == (False, 2.0) and second.text.startswith("2 attempts in a row failed before")
    assert third.stop and "3 attempts in a row" in third.text and "--ttp-futile-starts 3" in third.text


def test_a_step_begins_the_count_anew() -> None:
    """One committed step between two deaths is progress."""
    starts = CrashLoop(2)
    assert not judge(starts).stop
    assert judge(starts, new_step=True) == CrashLoopVerdict(False, 0.0, "")
    assert not judge(starts).stop
    assert judge(starts).stop


def test_what_cannot_be_known_is_not_held_against_a_job() -> None:
    """The store went with its node; or a script without a session ran for a while."""
    starts = CrashLoop(1)
    assert not judge(starts, new_step=None).text
    assert not judge(starts, lasted_s=61.0).text
    assert judge(starts, lasted_s=61.0, protected=True).stop


def test_zero_never_stops_and_waits_are_bounded() -> None:
    """The number of restarts alone ends such a job."""
    starts = CrashLoop(0)
    verdicts = [judge(starts) for _ in range(20)]
    assert not any(verdict.stop for verdict in verdicts)
    assert [verdict.wait_s for verdict in verdicts[:6]] == [1, 2, 4, 8, 16, 30] and verdicts[
        -1
    ].wait_s == LONGEST_WAIT_S


# --- failures that stay as they are ---

MISMATCH = Recorded("CheckpointMismatch: other model", "...\nttp.errors.CheckpointMismatch: other model\n")
PEER = Recorded("RuntimeError: Connection closed by peer [127.0.0.1]", "...")
OWN = Recorded("ValueError: boom", "...\nValueError: boom")
SAYS = "CheckpointMismatch is not retryable: correct its cause first"


@pytest.mark.parametrize(
    ("statuses", "raised", "said"),
    [
        ({0: 2, 1: 75}, {}, "exit code 2 means an invalid command line or configuration"),
        ({0: 1, 1: 1}, {0: MISMATCH, 1: MISMATCH}, SAYS),
        ({0: 1, 1: 75}, {0: MISMATCH}, SAYS),
        ({0: 1, 1: 1}, {0: PEER, 1: MISMATCH}, SAYS),
        ({0: 1, 1: 1}, {0: OWN, 1: MISMATCH}, ""),
        ({0: 1, 1: -9}, {0: MISMATCH}, ""),
        ({0: 1, 1: 1}, {0: MISMATCH}, ""),
        ({0: 2, 1: 3}, {}, ""),
        ({0: 75}, {}, ""),
        ({0: 1}, {0: OWN}, ""),
    ],
)
def test_a_restart_is_useless_when_some_refuse_and_none_fails_by_itself(
    statuses: dict[int, int], raised: dict[int, Recorded], said: str
) -> None:
    """A rank whose collective failed has only lost a peer."""
    assert refusal(statuses, raised) == said


def test_an_error_of_the_same_name_is_another_librarys() -> None:
    """So is one of ttp's that the next attempt may not raise."""
    theirs = Recorded("ConfigError: no such key", "...\nsomelib.errors.ConfigError: no such key")
    fault = Recorded("ControllerError: its port is taken", "...\nttp.errors.ControllerError: its port is taken")
    assert refusal({0: 1}, {0: theirs}) == refusal({0: 1}, {0: fault}) == ""


def test_a_directory_that_cannot_be_written_is_final_at_the_jobs_first_start() -> None:
    """Later its disk may have failed, and may come back."""
    error = Recorded("NotWritable: /d: read-only", "...\nttp.errors.NotWritable: /d: read-only\n")
    statuses: dict[int, int | Lost | None] = {0: 1, 1: 1}
    assert (
        refusal(statuses, {0: error, 1: error}, first_start=True)
        == "NotWritable is not retryable: correct its cause first"
    )
    assert refusal(statuses, {0: error, 1: error}) == ""


def test_a_checkpoint_error_may_be_a_disks() -> None:
    """It may go better next time: a file system that was away, a file that a node could not take."""
    error = Recorded("CheckpointError: no space left", "...\nttp.errors.CheckpointError: no space left\n")
    assert refusal({0: 1}, {0: error}) == ""


def test_no_restart_follows_where_replicas_differ_however_many_steps_were_made() -> None:
    """A person says where the job goes on; the other ranks exit on the controller's order, or fail behind it."""
    differ = Recorded("ReplicasDiffer: step 30: ...", "...\nttp.errors.ReplicasDiffer: step 30: ...\n")
    said = "ReplicasDiffer ends the job: choose where it resumes"
    for others in ({1: 75}, {1: -9}):
        statuses: dict[int, int | Lost | None] = {0: 1, **others}
        assert refusal(statuses, {0: differ}, new_step=True) == refusal(statuses, {0: differ}) == said
    wrong = Recorded("WrongReplica: step 30: ...", "...\nttp.errors.WrongReplica: step 30: ...\n")
    assert refusal({0: 1, 1: 75}, {0: wrong}) == "", "the next attempt has the others' state"
    assert refusal({0: 1, 1: 75}, {0: MISMATCH}, new_step=True) == ""
