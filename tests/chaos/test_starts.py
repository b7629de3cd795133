"""Faults before a job progresses: while it starts, while it resumes, in its first step, and again and again."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.conftest import STEPS, RunJob, arguments, run_to_end
from tests.chaos.launching import Launch
from tests.chaos.test_kills import assert_equal, published_steps
from ttp.chaos.observed.training_job import read_jsonl

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="watches /proc")

UNASSEMBLED = """
from ttp.runtime.job_controller import JobController
from ttp.trainer.__main__ import run_as_program
if rank == 1 and start == "0":
    find = JobController._find
    def wait_and_find(self, timeout_s):
        address = find(self, timeout_s)
        note("looked", address)
        await_file("go")
        return address
    JobController._find = wait_and_find
sys.argv = ["ttp.trainer", *sys.argv[2:]]
run_as_program()
"""
"""The bundled trainer; rank 1 finds the first attempt's controller and does not register before it may."""

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_trainer" / "train.py"


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_faults_while_starting_resuming_and_in_the_first_step_are_survived(tmp_path: Path, whole_job: RunJob) -> None:
    """One after the other in one job: ranks die before they are protected, right after, before and while a checkpoint is
    loaded, and in the first step after it; only what was committed before counts, and the end is that of a baseline job."""
    faults = (
        "kill:rank=1,point=start",
        "kill:rank=0,point=protected,round=1",
        "kill:rank=1,step=5,point=ready,round=2",
        "kill:rank=0,point=resume,round=3",
        "kill:rank=1,point=loaded,round=4",
        "kill:rank=0,step=6,point=done,round=5",
        "kill:rank=1,step=7,point=backward,round=6",
    )
    job = run_to_end(tmp_path / "faulted", 2, faults=";".join(faults), restarts=7, wait_s=1000)
    console = job.console_tail(10_000)
    steps = published_steps(
        job
    )  # a fault while a checkpoint is loaded finds the same step again, and keeps what is there
    assert steps[0] in (4, 5) and steps[-1] in (5, 6, 7) and steps == sorted(steps), console
    assert console.count("restarting (") == 7 and "2 attempts in a row failed before completing a step" in console
    assert_equal(job, whole_job(2))


@pytest.mark.long
@pytest.mark.parametrize("standbys", [0, 1])
def test_a_controller_lost_while_the_world_assembles_costs_one_attempt(tmp_path: Path, standbys: int) -> None:
    """Both ranks leave for the restart and say why, with a standby that no rank knows yet or without; the job comes back,
    and the report names the cause."""
    output = tmp_path / "output"
    trainer = (*arguments(), "--training_config.output_dir", str(output))
    environ = {"TTP_STANDBYS": str(standbys)}
    with Launch(tmp_path, UNASSEMBLED, "--nproc-per-node", "2", environ=environ, arguments=trainer) as job:
        job.await_notes("looked-1-0")
        journal = output / "log" / "journal_0.jsonl"
        job.until(lambda: '"registered"' in journal.read_text(), "registration of rank 0")
        (controller,) = [
            pid for pid in job.marked() if b"/journal_0.jsonl" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.kill(controller, signal.SIGKILL)
        (tmp_path / "go").touch()
        assert job.wait() == 0, job.text
        assert "restarting (1 of 3 restarts)" in job.text and "2 restarts" not in job.text
        assert re.search(r"rank \d raised ControllerError: rank \d: the controller at .* was lost", job.text)
        job.assert_nothing_left()
    fault = next(line for line in read_jsonl(output / "log" / "story.jsonl") if line["event"] == "fault")
    assert fault["start"] == 0 and fault["next"] == "restart 1 of 3"
    assert any("ControllerError" in culprit["cause"] for culprit in fault["culprits"])
    assert json.loads((output / "final.json").read_text())["step"] == STEPS


@pytest.mark.parametrize("status", [0, pytest.param(3, marks=pytest.mark.long)])
def test_a_script_that_always_dies_at_start_backs_off_and_stops(tmp_path: Path, status: int) -> None:
    """Long before its restarts are used up, with the reason; by a signal and by an exit code alike."""
    script = "note('begun', time.monotonic()); await_file(f'begun-{1 - rank}-{start}'); "
    script += "os.kill(os.getpid(), signal.SIGKILL)" if status == 0 else f"sys.exit({status})"
    with Launch(tmp_path, script, "--nproc-per-node", "2", "--max-restarts", "50") as job:
        assert job.wait() == 1
        assert job.notes("begun") == [f"begun-{rank}-{start}" for rank in (0, 1) for start in range(3)]
        begun = [max(float(job.read(f"begun-{rank}-{start}")) for rank in (0, 1)) for start in range(3)]
        assert begun[1] - begun[0] >= 1.0 and begun[2] - begun[1] >= 2.0
        assert "this attempt failed before completing a step; waiting 1 s" in job.text
        cause = "signal SIGKILL" if status == 0 else "exit code 3"
        assert re.search(
            rf"not restarting: ranks 0-1: {cause}; 3 attempts in a row failed before completing a step", job.text
        )
        job.assert_nothing_left()


def test_a_script_whose_checkpoint_is_another_models_is_not_restarted(tmp_path: Path) -> None:
    """The exception goes out of it, and its exit code is Python's 1: the report names it, and what must be corrected."""
    script = (
        "import ttp\nfrom ttp.errors import CheckpointMismatch\nttp.ttp_to_persist(main := lambda: None)\n"
        "raise CheckpointMismatch(\"'model.weight' has shape (4, 8), expected (4, 16)\")"
    )
    with Launch(tmp_path, script, "--nproc-per-node", "2", "--max-restarts", "50") as job:
        assert job.wait() == 1
        said = "CheckpointMismatch: 'model.weight' has shape (4, 8), expected (4, 16)"
        assert f"cause   exit code 1: {said}\n" in job.text
        assert "next    no restart: CheckpointMismatch is not retryable: correct its cause first\n" in job.text
        assert "restarting (" not in job.text and "] attempt 1:" not in job.text


@pytest.mark.long
def test_the_limit_of_a_crash_loop_is_a_choice(tmp_path: Path) -> None:
    """0 leaves the end to --max-restarts alone; a signal to the launcher ends the waiting."""
    options = ("--max-restarts", "50", "--ttp-futile-starts", "0")
    with Launch(tmp_path, "note('begun'); sys.exit(3)", *options) as job:
        job.await_notes("begun-0-3")
        job.until(lambda: "4 attempts in a row" in job.text, "fourth end")
        began = time.monotonic()
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 1 and time.monotonic() - began < 8.0
        assert "not restarting" not in job.text


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_script_that_always_dies_in_its_first_step_backs_off_and_stops(tmp_path: Path) -> None:
    """Under a controller, whatever the time an attempt takes; a step that was committed before does not count."""
    first = "kill:rank=1,step=2,point=backward"
    later = ";".join(f"kill:rank=1,step=2,point=backward,round={start}" for start in (1, 2, 3))
    with Launch(
        tmp_path,
        f"import runpy; sys.argv = ['train.py', '--steps', '40', '--save-dir', str(out / 'save')]\n"
        f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')",
        *("--nproc-per-node", "2", "--max-restarts", "50"),
        environ={"TTP_FAULTS": f"{first};{later}"},
    ) as job:
        job.until(lambda: job.process.poll() is not None, "end", within_s=500)
        assert job.wait() == 1
        assert "restarting (1 of 50 restarts): rank 1: signal SIGKILL" in job.text
        assert len(re.findall(r"resumed at step 1\b", job.text)) >= 2
        assert "not restarting: rank 1: signal SIGKILL" in job.text
        assert "3 attempts in a row failed before completing a step" in job.text
        assert "attempt 3:" in job.text and "attempt 4:" not in job.text
        job.assert_nothing_left()
