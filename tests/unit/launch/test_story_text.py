"""The words of a story and of the summary: frozen, since people search for them."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.launch.journals import story
from ttp.last_step import LastStep
from ttp.launch.fault_story import Culprit, FaultStory, Place, Saved, fault_of
from ttp.launch.story_text import Summary, fault_lines, summary_lines

KILL = FaultStory(
    start=4,
    began_unix_s=100.0,
    kind="exited",
    culprits=(Culprit(rank=2, host="a", pid=71, cause="signal SIGKILL", phase="READY", step=42),),
    survivors=(Place(phase="READY", step=42, ranks=(0, 1)), Place(phase="DONE", step=42, ranks=(3,))),
    saved=Saved(step=42, path="/ckpt/iter_0000042", bytes=3 << 20, ranks=(0, 1, 3)),
    goes_on_from="/ckpt/iter_0000042",
    steps_lost=0,
    took_ms={"seen": 3.2, "frozen": 4.0, "decided": 0.1, "written": 1650.0, "published": 27.0, "total": 1684.3},
    next="restart 1 of 3",
)
SUMMARY = Summary(
    result="succeeded",
    starts=3,
    faults=2,
    notices=0,
    false_alarms=1,
    saved_steps=(42, 90),
    steps_lost=0,
    unknown_losses=0,
    lost_s=31.25,
    lasted_s=301.0,
    ended_in_fault=False,
    last=LastStep(120, 120),
)


def test_a_kill_is_told_in_seven_lines() -> None:
    """Who, cause, where, saved, took, next."""
    assert fault_lines(KILL) == [
        "--- fault in start 4: a process ended ---",
        "who     rank 2 on node a (pid 71)",
        "cause   signal SIGKILL",
        "where   last heartbeat: READY of step 42; the others: ranks 0-1 in READY of step 42; rank 3 in DONE of step 42",
        "saved   step 42 in /ckpt/iter_0000042 (3.0 MiB, written by ranks 0-1, 3); no step lost",
        "took    seen 3 ms, frozen 4 ms, decided 0 ms, written 1,650 ms, published 27 ms; 1,684 ms in all",
        "next    restart 1 of 3, from /ckpt/iter_0000042",
    ]


def test_a_small_checkpoint_has_a_size() -> None:
    """In the unit that fits: `0.0 MiB` says nothing."""
    assert KILL.saved is not None
    (saved,) = (line for line in fault_lines(replace(KILL, saved=replace(KILL.saved, bytes=1536))) if "saved" in line)
    assert "(1.5 KiB, written by" in saved


def test_where_a_rank_was_is_told_with_what_is_certain_and_how_old_its_own_words_are() -> None:
    """A heartbeat comes once a second, and a second may be a hundred steps. The ages of several ranks' are left out."""
    (culprit,) = KILL.culprits
    old = replace(culprit, phase="COMPUTE", step=10, heard_s=0.87, reached=42)

    def where(*culprits: Culprit) -> str:
        lines = fault_lines(replace(KILL, culprits=culprits, survivors=()))
        return next(line for line in lines if line.startswith("where")).removeprefix("where   ")

    assert where(old) == "in READY of step 42 or later (last heartbeat, 0.9 s before: COMPUTE of step 10)"
    assert where(replace(old, reached=0)) == "last heartbeat, 0.9 s before: COMPUTE of step 10"
    assert where(replace(old, reported=True)) == "in COMPUTE of step 10"
    both = where(old, replace(old, rank=3, heard_s=0.2))
    assert both == "in READY of step 42 or later (last heartbeat: COMPUTE of step 10)"


def test_a_hang_is_told_with_where_its_suspect_stood() -> None:
    """The innermost frame first; where all stacks are."""
    (culprit,) = story("hung").culprits
    stood = replace(culprit, stood=("in recv, wire.py:9", "in step, train.py:80"))
    lines = fault_lines(replace(story("hung"), culprits=(stood,), stacks="/log/stacks_0.txt"))
    at = lines.index("stood   rank 1 in recv, wire.py:9")
    assert lines[at + 1] == "            called in step, train.py:80"
    assert lines[at + 2] == "        all stacks, suspects first: /log/stacks_0.txt"
    assert "stood   rank 1: no stacks were found on this node" in fault_lines(story("hung"))


def test_an_exceptions_traceback_ends_under_its_cause() -> None:
    lines = fault_lines(story("raised"))
    cause = lines.index("cause   InjectedFault: rank 1, step 5: fault injected at backward")
    assert lines[cause + 1] == '        File "/srv/ttp/chaos/inject.py", line 166, in commit'
    assert lines[cause + 2].startswith("        raise InjectedFault(")
    assert lines[cause + 3].startswith("where   in COMPUTE of step 5; the others: rank 0")


def test_a_refusal_says_why_nothing_was_saved_and_where_the_job_goes_on() -> None:
    """Different causes are told rank by rank; several nodes one after the other."""
    told = replace(
        story("refused", {0: "signal SIGKILL", 2: "exit code 1"}),
        culprits=(
            Culprit(rank=0, host="a", pid=1, cause="signal SIGKILL"),
            Culprit(rank=2, host="b", pid=3, cause="exit code 1"),
        ),
        next="restart 2 of 3",
    )
    lines = fault_lines(told)
    assert "who     rank 0 on node a (pid 1); rank 2 on node b (pid 3)" in lines
    assert "cause   rank 0: signal SIGKILL; rank 2: exit code 1" in lines
    saved = next(line for line in lines if line.startswith("saved"))
    assert saved.startswith("saved   nothing: no live rank can write at step 8") and saved.endswith("; 2 steps lost")
    assert lines[-1] == "next    restart 2 of 3, from /run/checkpoints/iter_0000006"


def test_a_thousand_culprits_fill_no_screen() -> None:
    """Ranks in runs, the first few processes, one cause."""
    many = tuple(Culprit(rank=rank, host="a", pid=rank + 1, cause="signal SIGKILL") for rank in range(1000))
    lines = fault_lines(replace(KILL, culprits=many))
    assert lines[1] == "who     ranks 0-999 on node a (pids 1, 2, 3, 4, 5, 6, 7, 8, ...)"
    assert lines[2] == "cause   signal SIGKILL" and max(map(len, lines)) < 200


def test_what_follows_is_told_when_it_is_no_restart() -> None:
    assert fault_lines(replace(KILL, next="no restart left (of 3)"))[-1] == "next    no restart left (of 3)"
    assert fault_lines(replace(KILL, goes_on_from=""))[-1].endswith("from the newest valid checkpoint that is found")


def test_the_summary_tells_the_whole_job() -> None:
    assert summary_lines(SUMMARY) == [
        "--- the job has ended ---",
        "result  succeeded",
        "starts  3 in 301.0 s",
        "faults  2 faults, 1 false alarm",
        "saved   steps 42, 90",
        "lost    0 steps; 31.2 s without training",
    ]


def test_the_summary_does_not_hide_what_is_not_known() -> None:
    """A job whose ranks all died never told how far they had come."""
    lines = summary_lines(replace(SUMMARY, unknown_losses=1, steps_lost=3, saved_steps=(), lasted_s=7200.0))
    assert "lost    3 steps, and unknown after 1 fault; 31.2 s without training" in lines
    stopped = summary_lines(replace(SUMMARY, faults=1, notices=1, unknown_losses=1))
    assert "faults  0 faults, 1 notice to leave, 1 false alarm" in stopped
    assert "lost    unknown after 1 notice; 31.2 s without training" in stopped
    assert "starts  3 in 120 min" in lines and not any(line.startswith("saved") for line in lines)
    calm = summary_lines(replace(SUMMARY, starts=1, faults=0, false_alarms=0, saved_steps=(), lost_s=0.0))
    assert calm[2:] == ["starts  1 in 301.0 s", "faults  0 faults", "lost    nothing"]


def test_steps_that_were_trained_again_without_a_fault_are_lost_too() -> None:
    """The newest checkpoint was broken as the job began."""
    calm = replace(SUMMARY, faults=0, false_alarms=0, saved_steps=(), steps_lost=4, steps_again=4, lost_s=0.0)
    lost = "lost    4 steps (4 to train again behind a checkpoint that was broken or not taken)"
    assert summary_lines(calm)[-1] == lost
    both = summary_lines(replace(SUMMARY, steps_lost=7, steps_again=4))
    assert both[-1] == f"{lost.replace('4', '7', 1)}; 31.2 s without training"
    assert summary_lines(replace(calm, steps_lost=4000, steps_again=4000))[-1] == lost.replace("4", "4,000")


def test_the_summary_of_a_job_that_never_began_counts_no_time_without_training() -> None:
    """Its script failed before `ttp.start`: nobody trained, or nobody knows."""
    failed = replace(SUMMARY, unknown_losses=2, false_alarms=0, saved_steps=(), protected=False)
    assert summary_lines(failed)[3:] == ["faults  2 faults", "lost    not protected: no rank has called ttp.start"]
    silent = summary_lines(replace(failed, protected=True))
    assert silent[-1] == "lost    unknown after 2 faults; 31.2 s without training"


def test_a_fault_of_another_node_is_told_in_that_nodes_words() -> None:
    """No rank here is at fault, and what was lost is not known."""
    told = fault_of(3, [], {}, elsewhere="b has failed (rank 2: signal SIGKILL) and starts again")
    assert told is not None
    assert fault_lines(told) == [
        "--- fault in start 3: another node failed ---",
        "who     another node",
        "cause   b has failed (rank 2: signal SIGKILL) and starts again",
        "saved   nothing: no controller on this node led the ranks",
    ]


def test_a_notice_to_leave_is_not_told_as_a_fault() -> None:
    """The summary of a job that was told to end says what befell it, and what it was told."""

    one = replace(SUMMARY, faults=1, notices=1, false_alarms=0)
    assert "faults  0 faults, 1 notice to leave" in summary_lines(one)
    four = replace(SUMMARY, faults=4, notices=3, false_alarms=1)
    assert "faults  1 fault, 3 notices to leave, 1 false alarm" in summary_lines(four)
