"""Faults that are not plain death, in real processes: a job that hangs, is only slow, holds Python's lock, gets a preemption notice,
loses writers and publishers in the middle of a dump, or has a full disk. Each comes back, and equals a baseline job."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.conftest import SMALL, STEPS, RunJob, run_to_end
from tests.chaos.test_kills import assert_equal, published_steps
from ttp.chaos.observed.training_job import TrainingJob, read_jsonl

LONG = 440
"""Steps of a job in which the controller has time to learn the length of a step, more than once."""
ITERS = f"--training_config.training_iters={LONG}"
SMALL_TIMES = {"TTP_HEARTBEAT_S": "0.1", "TTP_LEASE_S": "3", "TTP_HANG_FLOOR_S": "3"}
HANG_START_S = "25"
"""Longer than any attempt of such a small job on a loaded machine."""
GRACE_S = 10.0
"""What an operator gives a job between SIGTERM and SIGKILL."""


def start(output: Path, ranks: int, faults: str = "", iters: int = LONG, **environ: str) -> TrainingJob:
    overrides = (*SMALL, f"--training_config.training_iters={iters}")
    environ = {**SMALL_TIMES, "TTP_FAULTS": faults, **environ}
    return TrainingJob(output, ranks=ranks, overrides=overrides, environ=environ, launcher=("--max-restarts", "6"))


def story(job: TrainingJob, number: int, event: str) -> list[dict[str, Any]]:
    """Return the lines of one kind in the journal of the job's `number`-th attempt."""
    return [line for line in job.journals()[number] if line["event"] == event]


def finish(job: TrainingJob, status: int = 0) -> None:
    got = job.wait(280)
    assert got == status, f"status {got}, expected {status}\n{job.console_tail(80)}"


@pytest.mark.long
def test_a_hang_in_the_first_steps_is_found(tmp_path: Path) -> None:
    """Before the job's pace is known, the limit for the start finds it; the steps done so far are saved."""
    faults = "hang:rank=1,step=4,point=backward"
    with start(tmp_path / "faulted", 2, faults, iters=8, TTP_HANG_START_S=HANG_START_S) as job:
        finish(job)
        (hung,) = story(job, 0, "hung")
        assert hung["ranks"] == [1] and "in COMPUTE of step 4" in hung["text"], hung
        assert published_steps(job) == [3]
        assert_the_hang_is_reported(job)


@pytest.mark.long
def test_a_rank_that_holds_its_interpreter_for_longer_than_a_lease_costs_nothing(tmp_path: Path) -> None:
    """As a compiler does on busy cores. Its agent sees the process running: no gate closes, no restart is spent."""
    faults = "gil:rank=1,step=4,point=backward,for=6;gil:rank=0,step=12,point=updating,for=6"
    with start(tmp_path / "faulted", 2, faults, iters=16, TTP_HANG_FLOOR_S="60") as job:
        finish(job)
        reported = [line["event"] for line in job.journals()[0]]
        assert len(job.journals()) == 1 and reported[-1] == "finished", reported
        assert not {"suspect", "freeze_sent", "death_seen"} & set(reported), reported


def assert_the_hang_is_reported(job: TrainingJob) -> None:
    """The launcher's table, the incident report with the frames of the suspect, the summary; and the same for machines."""
    console = job.console_tail(10_000)
    log_dir = job.output_dir / "log"
    expected = (
        "--- attempt 0: 2 ranks, a controller with 1 standby; the job survives: any 1 of 2 ranks ---",
        "--- fault in attempt 0: a hang ---",
        f"who     rank 1 on node {os.uname().nodename} (pid ",
        "where   in COMPUTE of step 4; the others: rank 0 in ",
        "stood   rank 1 in ",
        "called in commit, ",
        f"all stacks, suspects first: {log_dir}/stacks_0.txt",
        "saved   step 3 in ",
        "took    seen ",
        f"next    restart 1 of 6, from {job.output_dir}/checkpoints/iter_0000003",
        "--- the job has ended ---\nresult  succeeded\nran     2 attempts in ",
        "faults  1 fault\nsaved   step 3\nlost    0 steps; ",
    )
    found = [console.find(text) for text in expected]
    assert -1 not in found and found == sorted(found), list(zip(expected, found, strict=True))
    assert (log_dir / "stacks_0.txt").read_text().startswith("=== rank 1 (suspect) ===")
    lines = [line for line in read_jsonl(log_dir / "story.jsonl") if line["event"] not in ("hold", "held")]
    start, fault, again, end = lines
    assert [line["event"] for line in lines] == ["start", "fault", "start", "end"]
    assert start["pids"]["1"] == fault["culprits"][0]["pid"] and start["rows"] == again["rows"]
    assert fault["saved"]["step"] == 3 and fault["kind"] == "hung" and end["saved_steps"] == [3]


@pytest.mark.long
def test_what_only_stands_still_is_distinguished_from_what_is_slow(tmp_path: Path, whole_job: RunJob) -> None:
    """Stopped within its lease and a long step: no fault. Hung in COMPUTE: it is a holder. Hung in an update: it is none.
    Holding Python's lock for good: silent, and killed by the launcher. With a preemption notice: the step is finished first."""
    faults = (
        "slow:rank=0,step=150,point=backward,for=2",
        "hang:rank=1,step=200,point=backward",
        "hang:rank=0,step=400,point=updating,round=1",
        "gil:rank=1,step=410,point=backward,round=2",
        "term:rank=1,step=420,point=backward,round=3",
    )
    with start(tmp_path / "faulted", 2, ";".join(faults)) as job:
        job.wait_for_step(20)
        job.kill(1, signal.SIGSTOP)
        job.wait_for(lambda: bool(story(job, 0, "suspect")), "suspicion", 30)
        job.kill(1, signal.SIGCONT)
        finish(job)
    assert job.leftovers() == []
    assert len(job.journals()) == 5, job.console_tail(80)
    reported = [line["event"] for line in job.journals()[0]]
    assert "suspect" in reported[: reported.index("thawed")]
    reported = reported[reported.index("thawed") :]
    assert reported.index("stalled") < reported.index("moving_again") < reported.index("hung")
    assert story(job, 0, "hung")[0]["ranks"] == [1]
    assert story(job, 0, "decided")[0]["able"] == [0, 1]
    assert story(job, 1, "hung")[0]["ranks"] == [0]
    assert story(job, 1, "frozen")[0]["not_closed"] == [0] and story(job, 1, "decided")[0]["able"] == [1]
    assert {line["kind"] for line in story(job, 2, "death_seen")[:1]} == {"silent"}
    assert {line["kind"] for line in story(job, 3, "fault_reported")} == {"preempted"}
    steps = published_steps(job)
    assert steps[0] == 199 and steps[1] in (399, 400) and steps[2] == 409 and steps[3] == 420
    assert_equal(job, whole_job(2, ITERS))
    stacks = [(job.output_dir / "log" / f"rank_{rank}" / "stacks.log").read_text() for rank in (0, 1)]
    assert "rank 1 in COMPUTE of step 200" in stacks[0] and "in finish" in stacks[0]
    assert "rank 0 in UPDATING of step 400" in stacks[1] and "in commit" in stacks[1]
    console = job.console_tail(10_000)
    assert re.search(r"controller: freeze: .*hung: no rank has progressed for", console)
    assert "rank 1: exited on a preemption notice (exit code 76)" in console
    assert "killed rank 1 (silent): these ranks have nothing more to save" in console


@pytest.mark.long
def test_signals_to_the_launcher_save_and_a_new_launcher_goes_on(tmp_path: Path, whole_job: RunJob) -> None:
    """SIGTERM: the step in flight is finished and saved. Ctrl-C while a step cannot be finished: the one before is saved,
    long before the SIGKILL that an operator sends after a grace period."""
    output = tmp_path / "faulted"
    with start(output, 2) as job:
        job.wait_for_step(60)
        job.process.send_signal(signal.SIGTERM)
        finish(job, status=1)
    assert job.leftovers() == []
    console = job.console_tail(10_000)
    assert "ranks 0-1: exited on a preemption notice (exit code 76)" in console and "restarting" not in console
    assert "cause   ttprun received SIGTERM and sent SIGTERM to the ranks; step " in console
    assert "faults  0 faults, 1 preemption notice\n" in console and "Traceback" not in console
    (first,) = published_steps(job)
    assert first >= job.last_step() and "is finished" in story(job, 0, "fault_reported")[0]["text"]

    with start(output, 2, f"hang:rank=1,step={first + 100},point=backward", TTP_BOUNDARY_S="1") as job:
        job.wait_for_step(first + 99)
        began = time.monotonic()
        job.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.process.wait(GRACE_S)
        for pid in (job.process.pid, *job.pids().values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert job.wait() == 1 and time.monotonic() - began < GRACE_S
    assert job.leftovers() == []
    assert published_steps(job)[-1] == first + 99

    with start(output, 2) as job:
        finish(job)
    resumes = [int(line["from_step"]) for line in job.metrics() if line.get("event") == "resume"]
    assert resumes == [first, first + 99]
    assert_equal(job, whole_job(2, ITERS))


@pytest.mark.long
def test_a_dump_outlives_its_writers_and_publishers(tmp_path: Path, whole_job: RunJob) -> None:
    """Three deaths a dump: a writer before its file is durable and a publisher that has claimed the staging directory; then a publisher
    right before the rename that makes the checkpoint visible, and one after it, before the tracker."""
    faults = (
        "kill:rank=1,step=6,point=backward",
        "kill:rank=0,step=5,point=write,call=1",
        "kill:rank=2,step=5,point=publish,call=unlink.0",
        "kill:rank=3,step=12,point=backward,round=1",
        "kill:rank=0,step=11,point=publish,call=iter_0000011.0,round=1",
        "kill:rank=1,step=11,point=publish,call=latest_checkpointed_iteration.txt.0,round=1",
    )
    job = run_to_end(tmp_path / "faulted", 4, faults=";".join(faults))
    assert published_steps(job) == [5, 11]
    first, second = ([line["rank"] for line in story(job, number, "publish_sent")] for number in (0, 1))
    assert first == [2, 3] and second == [0, 1, 2], job.console_tail(80)
    assert [line["ranks"] for line in story(job, 0, "write_moved")] == [[2]]
    assert_equal(job, whole_job(4))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path | None]:
    """A file system that takes a probe but no checkpoint; None where this process may not mount one."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True, check=False
    )
    yield place if done.returncode == 0 else None
    if done.returncode == 0:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.long
def test_a_full_disk_falls_through_to_the_next_directory_and_then_refuses(
    tmp_path: Path, whole_job: RunJob, small_disk: Path | None
) -> None:
    """The first directory has no room (for real where a mount is allowed, else the system call fails so). When the second
    one fails as well, the dump is refused with both reasons, and the older checkpoint is untouched and used.

    With two ranks nothing is gathered, so the one that is killed may be the only one that had the newest record.
    """
    places = (small_disk or tmp_path / "first", tmp_path / "second")
    faults = ["kill:rank=1,step=6,point=backward", "kill:rank=1,step=12,point=backward,round=1"]
    faults += [f"eio:rank=0,step={step},point=write,call=2,round=1" for step in (10, 11)]
    if small_disk is None:
        faults += [f"enospc:rank=0,step={step},point=write,times=1" for step in (4, 5)]
    save_dirs = f"--training_config.save_dirs=[{places[0]},{places[1]}]"
    job = run_to_end(tmp_path / "faulted", 2, save_dirs, faults=";".join(faults))
    (saved,) = published_steps(job)
    assert saved in (4, 5)
    assert "No space left on device" in story(job, 0, "write_failed")[0]["error"]
    assert {line["directory"] for line in story(job, 0, "write_sent")} == {str(place) for place in places}
    reason = story(job, 1, "refused")[0]["reason"]
    assert "none of 2 directories could be written" in reason and str(places[0]) in reason and str(places[1]) in reason
    assert [int(line["from_step"]) for line in job.metrics() if line.get("event") == "resume"] == [saved, saved]
    found = sorted(path.name for place in places for path in place.glob("iter_*"))
    assert found == [f"iter_{saved:07d}", f"iter_{STEPS:07d}"], "the gasp and the last step, and nothing else"
    assert_equal(job, whole_job(2))
