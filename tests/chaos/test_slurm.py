"""The batch script for Slurm under a real one (`slurm_cluster.py`): two nodes on this machine, one rank each."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.conftest import SMALL
from tests.chaos.slurm_cluster import Slurm, why_not
from ttp.chaos.observed.training_job import read_jsonl

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "slurm" / "train.sbatch"
WAIT_S = 280.0


class Training:
    """The example's job, and what can be seen of it."""

    def __init__(self, slurm: Slurm, folder: Path, *options: str) -> None:
        self.slurm = slurm
        self.output, self.log = folder / "out", folder / "job.log"
        arguments = ["--config", "gpt_tiny", *SMALL, "--training_config.device=cpu"]
        arguments += [f"--training_config.output_dir={self.output}", "--training_config.training_iters=1000000"]
        asked = ["--gpus-per-node=1", "--cpus-per-task=1", "--time=30", f"--output={self.log}", *options]
        self.job = slurm.submit(*asked, str(SCRIPT), *arguments, GPUS_PER_NODE="1", TTP_IN_PLACE="False")

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else self.slurm.logs()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, f"no {what}\n{self.text}"
            time.sleep(0.1)

    def lines(self) -> list[dict[str, object]]:
        path = self.output / "metrics.jsonl"
        return list(read_jsonl(path)) if path.exists() else []

    def last(self) -> int:
        return max((int(str(line.get("step", 0))) for line in self.lines()), default=0)

    def go_on(self) -> None:
        """Wait for some steps more."""
        step = self.last()
        self.until(lambda: self.last() >= step + 5, f"step {step + 5}")

    def resumed_from(self) -> list[int]:
        return [int(str(line["from_step"])) for line in self.lines() if line.get("event") == "resume"]

    def saved(self) -> int:
        names = [path.name for path in (self.output / "checkpoints").glob("iter_*")]
        return max((int(name[5:]) for name in names if re.fullmatch(r"iter_\d+", name)), default=0)

    def own_processes(self) -> dict[int, str]:
        """Return the step's processes: launchers, ranks, controllers."""
        return {
            pid: line for pid, line in self.slurm.processes().items() if re.search(r"ttprun|ttp\.(trainer|contr)", line)
        }

    def rank(self, number: int) -> int:
        """Return a rank's process."""
        for pid, line in self.own_processes().items():
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if f"RANK={number}".encode() in variables and "-m ttp.trainer" in line and "ttprun" not in line:
                    return pid
        raise AssertionError(f"no rank {number}\n{self.text}")

    def taken_away(self) -> None:
        """Wait until Slurm has taken the job off its nodes, and see that the last step was saved."""
        self.until(lambda: self.slurm.state(self.job) != "RUNNING", "end of the run")
        self.until(lambda: not self.own_processes(), "end of the processes")
        assert self.saved() >= self.last() > 0, self.text


def test_a_killed_rank_comes_back_and_a_cancelled_job_is_saved(tmp_path: Path) -> None:
    """On two nodes of Slurm's; `scancel` signals every process of the step, and the saved job is not requeued."""
    with Slurm() as slurm:
        training = Training(slurm, tmp_path)
        training.go_on()
        os.kill(training.rank(1), signal.SIGKILL)
        training.until(lambda: "restarting (1 of 3 restarts)" in training.text, "restart")
        training.until(lambda: bool(training.resumed_from()), "resumption")
        training.go_on()
        slurm.run("scancel", training.job)
        training.taken_away()
        assert slurm.state(training.job) in ("CANCELLED", "COMPLETING"), training.text


@pytest.mark.parametrize("how", ["scancel --batch", "preemption"])
def test_a_job_that_is_taken_away_is_saved_requeued_and_goes_on(tmp_path: Path, how: str) -> None:
    """By the notice to the batch shell (as before the time limit), which requeues; by a more urgent job, where Slurm does."""
    with Slurm() as slurm:
        training = Training(slurm, tmp_path)
        training.go_on()
        if how == "preemption":
            place = ("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
            slurm.submit(*place)
        else:
            slurm.run("scancel", "--signal=TERM", "--batch", training.job)
        training.taken_away()
        saved = training.saved()
        training.until(lambda: saved in training.resumed_from(), "resumption where it was")
        training.go_on()
        slurm.run("scancel", training.job)
        training.taken_away()
