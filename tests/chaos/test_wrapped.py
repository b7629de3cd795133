"""Workers that are shells (`ttprun --no-python ./wrap.sh`, without `exec`): the ranks behind them have what other ranks have."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.chaos.conftest import arguments
from ttp.chaos.observed.training_job import TrainingJob

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="watches /proc")


@pytest.mark.long
def test_ranks_behind_shells_save_at_a_kill_and_at_a_notice(tmp_path: Path) -> None:
    """The rank's own process is the one that is watched, reported and named, and the shell's exit code is the rank's."""
    wrapper = tmp_path / "wrap.sh"
    wrapper.write_text(f"'{sys.executable}' \"$@\"\nexit $?\n")
    steps = "--training_config.training_iters=4000"
    launcher = ("--no-python", "sh", str(wrapper))
    with TrainingJob(tmp_path / "job", ranks=2, overrides=arguments(steps), launcher=launcher) as job:
        job.wait_for_step(3)
        victim = job.pids()[1]
        job.wait_for(lambda: f"rank 1 is process {victim}, started by its worker" in job.console_tail(400), "pids", 60)
        job.kill(1)
        job.wait_for(lambda: len(job.journals()) > 1, "the next attempt", 120)
        job.wait_for_step(job.last_step() + 3)
        second = dict(job.pids())
        reported = f"rank 0 is process {second[0]}, started by its worker"
        job.wait_for(lambda: reported in job.console_tail(400), "pids", 60)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(200) == 1
    console = (job.output_dir / "console.log").read_text()
    assert "rank 1: exit code 137 (a shell's code for SIGKILL)" in console, console
    assert "rank 0: exited for the restart (exit code 75)" in console, console
    assert "ranks 0-1: exited on a preemption notice (exit code 76)" in console, console
    (seen,) = [line for line in job.journals()[0] if line["event"] == "death_seen" and line["rank"] == 1]
    assert (seen["kind"], seen["text"], seen["pid"]) == ("exited", "signal SIGKILL", victim)
    saved = [line["step"] for start in job.journals() for line in start if line["event"] == "published"]
    assert len(saved) == 2 and saved[1] >= job.last_step() > saved[0] >= 3, console
    assert job.leftovers() == []
