"""A rank dies and the others keep running: one new process, nothing written, the losses and weights of a job without a fault. What cannot be done in
place ends in a checkpoint and a restart, and costs no step either."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.chaos.conftest import RunJob, run_to_end
from tests.chaos.test_axes import overrides
from tests.chaos.test_kills import assert_equal
from tests.unit.trainer.layouts import Axes
from ttp.chaos.observed.training_job import Observed, TrainingJob

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="watches /proc")

ON = {"TTP_IN_PLACE": "True", "TTP_IN_PLACE_S": "30"}  # a loaded machine
TIED = "--model_config.untie_embeddings_and_output_weights=false"
LAYOUTS = (
    (Axes(data=3), 1, "record"),
    (Axes(data=2, tensor=2, sequence=True), 3, "backward"),
    (Axes(data=2, pipeline=2), 2, "backward"),
    (Axes(data=2, pipeline=2), 0, "ready"),
    (Axes(data=2, pipeline=2, virtual=2), 1, "gathering"),
    (Axes(data=4, experts=4, expert=2), 1, "backward"),
    (Axes(data=2, tensor=2, pipeline=2), 5, "record"),
)
POINTS = ("backward", "ready", "record", "updating", "done", "gathering")


def console(job: TrainingJob) -> str:
    return (job.output_dir / "console.log").read_text(errors="replace")


def recovered(job: TrainingJob, times: int = 1, followed: bool = True) -> None:
    """Demand that all of the job's faults ended in place: in one attempt, with no other checkpoints than the job asks for. `followed`: by a new step."""
    text = console(job)
    why = re.sub(r"train: Epoch.*\n", "", text)[-3000:]
    assert len(re.findall("training continues after step", text)) == times, why
    assert len(job.starts()) == 1
    events = [line["event"] for journal in job.journals() for line in journal]
    assert events.count("regrouped") == times and "write_sent" not in events
    end = json.loads((job.output_dir / "log" / "story.jsonl").read_text().splitlines()[-1])
    parts = end["time_use"]["rank_s"]
    assert sum(parts.values()) == pytest.approx(end["time_use"]["ranks"] * end["time_use"]["whole_s"])
    assert parts["regroup"] > 0.0 and parts["dump"] == 0.0
    assert (parts["restart"] > 0.0) == followed, "until the next finished step"


def checkpoints(job: Observed) -> list[str]:
    return sorted(path.name for path in (job.output_dir / "checkpoints").iterdir() if path.is_dir())


def test_a_killed_rank_is_replaced_and_the_job_saves_as_before(tmp_path: Path, whole_job: RunJob) -> None:
    """Rank 0, which has started the controller; what each rank counts by itself, as the saves that were made, is the same on all afterwards."""
    saving = "--training_config.save_interval=4"
    whole = whole_job(2, saving)
    job = run_to_end(tmp_path / "job", 2, saving, faults="kill:rank=0,step=9,point=record", environ=ON)
    recovered(job)
    assert_equal(job, whole)
    assert checkpoints(job) == checkpoints(whole)
    pids = {
        line["pid"]
        for journal in job.journals()
        for line in journal
        if line["event"] == "registered" and line["rank"] == 1
    }
    assert len(pids) == 1, "the survivor's process"


@pytest.mark.long
def test_training_that_raises_keeps_its_process(tmp_path: Path, whole_job: RunJob) -> None:
    job = run_to_end(tmp_path / "job", 2, faults="raise:rank=1,step=9,point=backward", environ=ON)
    recovered(job)
    assert_equal(job, whole_job(2))
    assert "started process" not in console(job)


@pytest.mark.long
def test_a_new_process_that_dies_leaves_the_checkpoint_and_a_restart(tmp_path: Path, whole_job: RunJob) -> None:
    faults = "kill:rank=1,step=9,point=ready;kill:rank=1,point=protected,again=1"
    job = run_to_end(tmp_path / "job", 2, faults=faults, environ=ON)
    assert_equal(job, whole_job(2))
    assert len(job.starts()) == 2 and "training continues after step" not in console(job)
    assert "no step lost" in console(job)


@pytest.mark.parametrize(("step", "victim"), [(24, 1), pytest.param(8, 0, marks=pytest.mark.long)])
def test_a_save_in_which_a_rank_dies_is_made_again(tmp_path: Path, whole_job: RunJob, step: int, victim: int) -> None:
    """That of the last step too: else the job would end well, and nothing would be on disk. Nothing remains of the first."""
    saving = "--training_config.save_interval=4"
    faults = f"kill:rank={victim},step={step},point=write,call=1"
    job = run_to_end(tmp_path / "job", 2, saving, faults=faults, environ=ON)
    recovered(job, followed=step < 24)
    assert_equal(job, whole_job(2, saving))
    assert checkpoints(job) == checkpoints(whole_job(2, saving))


@pytest.mark.long
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(("ranks", "victim"), [(2, 1), (3, 0), (4, 2)])
def test_a_death_at_every_point_of_a_step(
    tmp_path: Path, whole_job: RunJob, ranks: int, victim: int, point: str
) -> None:
    job = run_to_end(tmp_path / "job", ranks, faults=f"kill:rank={victim},step=9,point={point}", environ=ON)
    recovered(job)
    assert_equal(job, whole_job(ranks))


@pytest.mark.long
@pytest.mark.parametrize(("axes", "victim", "point"), LAYOUTS, ids=str)
def test_every_layout_gives_the_baselines_bits(tmp_path: Path, axes: Axes, victim: int, point: str) -> None:
    given = (*overrides(axes), *([TIED] if axes.pipeline > 1 else []))
    whole = run_to_end(tmp_path / "whole", axes.ranks, *given)
    faults = f"kill:rank={victim},step=5,point={point}"
    job = run_to_end(tmp_path / "job", axes.ranks, *given, faults=faults, environ=ON)
    recovered(job)
    assert_equal(job, whole)


@pytest.mark.long
@pytest.mark.parametrize("action", ["segv", "abort", "exit", "raise"])
def test_however_a_process_ends(tmp_path: Path, whole_job: RunJob, action: str) -> None:
    job = run_to_end(tmp_path / "job", 2, faults=f"{action}:rank=1,step=9,point=updating", environ=ON)
    recovered(job)
    assert_equal(job, whole_job(2))


@pytest.mark.parametrize(
    ("action", "point", "victim"),
    [
        ("stop", "backward", 1),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("stop", "ready", 0), ("stop", "updating", 1), ("stop", "gathering", 1), ("gil", "ready", 1), ("gil", "record", 0), ("gil", "done", 1),
            )
        ),
    ],
)  # fmt: skip
def test_a_process_that_stands_still_is_ended_once_the_step_is_on_disk(
    tmp_path: Path, whole_job: RunJob, action: str, point: str, victim: int
) -> None:
    """It is stopped, or a thread of it holds the interpreter: the survivor keeps its process."""
    job = run_to_end(tmp_path / "job", 2, faults=f"{action}:rank={victim},step=9,point={point}", environ=ON)
    assert_equal(job, whole_job(2))
    events = [line["event"] for journal in job.journals() for line in journal]
    assert len(job.starts()) == 1 and events.index("published") < events.index("regroup_sent") < events.index(
        "regrouped"
    )
    processes = [
        (line["rank"], line["pid"])
        for journal in job.journals()
        for line in journal
        if line["event"] in ("registered", "replacement_came")
    ]
    assert len({pid for rank, pid in processes if rank == victim}) == 2
    assert len({pid for rank, pid in processes if rank != victim}) == 1
    stacks = job.output_dir / "log" / "stacks_0_1.txt"
    assert stacks.exists() == (action == "gil"), "a stopped process handles no signal"
    if action == "gil":
        assert f"=== rank {victim} (suspect) ===" in stacks.read_text()
        assert f"stood   rank {victim} in _hold_the_gil" in job.console_tail(80) and str(stacks) in job.console_tail(80)


@pytest.mark.long
def test_two_ranks_of_different_shards_at_once_and_a_third_later(tmp_path: Path, whole_job: RunJob) -> None:
    faults = "kill:rank=0,step=9,point=backward;kill:rank=1,step=9,point=backward;kill:rank=3,step=15,point=done"
    job = run_to_end(tmp_path / "job", 4, faults=faults, environ=ON)
    assert_equal(job, whole_job(4))
    assert len(job.starts()) == 1


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_rank_0_and_its_controller_at_once(tmp_path: Path, whole_job: RunJob, ranks: int) -> None:
    """The standby takes over, and has another process started in rank 0's place: one agent has all ranks, so that none trains on elsewhere."""

    def kill_both(job: TrainingJob) -> None:
        job.wait_for_step(20)
        for pid in (job.controller_pids()[0], job.pids()[0]):
            os.kill(pid, signal.SIGKILL)

    more = "--training_config.training_iters=200"  # the job must not be over before
    job = run_to_end(tmp_path / "job", ranks, more, environ=ON, meanwhile=kill_both)
    lines = job.journal(0)
    assert [line["controller"] for line in lines if line["event"] == "took_over"] == [1]
    recovered(job)
    assert_equal(job, whole_job(ranks, more))


@pytest.mark.long
@pytest.mark.parametrize(
    "faults",
    [
        "kill:rank=1,step=9,point=backward;stop:rank=1,point=protected,again=1",
        "kill:rank=1,step=9,point=backward;kill:rank=1,step=9,point=ready,again=1",
        "kill:rank=1,step=1,point=backward",
    ],
)
def test_what_does_not_end_in_place_is_written(tmp_path: Path, whole_job: RunJob, faults: str) -> None:
    """A new process that hangs, one that dies again and again, a death in the first step."""
    job = run_to_end(tmp_path / "job", 2, faults=faults, environ=ON)
    assert_equal(job, whole_job(2))
    assert len(job.starts()) == 2


@pytest.mark.long
def test_jobs_that_rehearse_recover_too(tmp_path: Path, whole_job: RunJob) -> None:
    """All count anew which steps they compute twice."""
    faults = "kill:rank=1,step=9,point=backward;kill:rank=0,step=14,point=ready"
    job = run_to_end(tmp_path / "job", 2, faults=faults, environ={**ON, "TTP_REHEARSE": "every:3"})
    recovered(job, 2)
    assert_equal(job, whole_job(2))
