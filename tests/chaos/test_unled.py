"""No rank can lead the survivors: the only controller was killed, or there never was one. The job does not wait as if somebody
could."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.chaos.conftest import RunJob, arguments
from tests.chaos.launching import Launch
from ttp.chaos.observed.training_job import TrainingJob
from ttp.checkpoint.format.manifest import read_manifest
from ttp.exchange import saved_alone
from ttp.launch.attempts.attempt import UNLED_S, UNPROTECTED_S
from ttp.proto.messages import CauseKind

STEPS = "--training_config.training_iters=400"
TOTAL_TIMEOUT_S = 600.0


@pytest.mark.long
def test_survivors_whose_only_controller_was_killed_are_not_held_for_the_whole_timeout(tmp_path: Path) -> None:
    """Training continues unprotected; at the next fault a survivor that never ends by itself is ended soon, and all restart. It is
    stopped: there is no grace after its hold."""
    environ = {"TTP_STANDBYS": "0", "TTP_OT": str(TOTAL_TIMEOUT_S)}
    with TrainingJob(tmp_path / "job", ranks=2, overrides=arguments(STEPS), environ=environ) as job:
        job.wait_for_step(3)
        (controller,) = job.controller_pids().values()
        os.kill(controller, signal.SIGKILL)
        job.wait_for_step(job.last_step() + 3)
        job.kill(0, signal.SIGSTOP)
        job.kill(1)
        killed = time.monotonic()
        job.wait_for(lambda: len(job.journals()) > 1, "the next attempt", TOTAL_TIMEOUT_S / 4)
        seconds = time.monotonic() - killed
        assert job.wait(200) == 0, job.console_tail(80)
    console = (job.output_dir / "console.log").read_text()
    assert f"the ranks had no controller for {UNLED_S:.0f} s" in console, job.console_tail(400)
    assert seconds > UNLED_S, "the stopped rank was given its time"
    assert "killed rank 0 (stopped): these ranks have nothing more to save" in console
    assert job.final()["step"] == 400
    assert job.leftovers() == []


@pytest.mark.long
def test_where_both_controllers_were_killed_sigterm_saves_the_step_in_flight(tmp_path: Path) -> None:
    """Rank 0 starts a controller in their place, which leads the ranks to a checkpoint; the next launch goes on at the next step."""
    output = tmp_path / "job"
    with TrainingJob(output, ranks=3, overrides=arguments(STEPS)) as job:
        job.wait_for_step(3)
        for pid in job.controller_pids().values():
            os.kill(pid, signal.SIGKILL)
        job.wait_for(lambda: "took_over" in {line["event"] for line in job.journals()[0]}, "a new controller", 120.0)
        job.wait_for_step(job.last_step() + 5)
        job.process.send_signal(signal.SIGTERM)
        job.wait(200)
        step, console = job.last_step(), (output / "console.log").read_text()
        (published,) = [line for line in job.journals()[0] if line["event"] == "published"]
        assert published["step"] >= step, f"step {step} was logged, step {published['step']} is on disk"
        assert f"saved   step {published['step']}" in console, job.console_tail(80)
        assert job.leftovers() == []
    with TrainingJob(output, ranks=3, overrides=arguments(STEPS)) as again:
        again.wait_for_step(published["step"] + 3)
        assert f"step {published['step']} (preempted)" in (output / "console.log").read_text()


@pytest.mark.long
@pytest.mark.parametrize("notified", ["ttprun", "one rank"])
def test_ranks_without_any_controller_save_the_step_in_flight_at_sigterm(
    tmp_path: Path, notified: str, whole_job: RunJob
) -> None:
    """The only controller is killed and none can be started: the ranks save together, the summary says so from what is on disk, and the
    job goes on with the bits of one that never stopped."""
    output, environ = tmp_path / "job", {"TTP_STANDBYS": "0"}
    with TrainingJob(output, ranks=3, overrides=arguments(), environ=environ) as job:
        job.wait_for_step(3)
        (controller,) = job.controller_pids().values()
        os.kill(controller, signal.SIGKILL)
        job.wait_for_step(job.last_step() + 2)
        if notified == "ttprun":
            job.process.send_signal(signal.SIGTERM)
            job.wait(200)
        else:
            job.kill(1, signal.SIGTERM)
            job.wait_for(lambda: len(job.journals()) > 1, "the next attempt", 200.0)
        account = saved_alone.read(output / "log", 0, 0.0)
        assert account is not None and account.noticed == ((0, 1, 2) if notified == "ttprun" else (1,))
        manifest = read_manifest(Path(account.path))
        logged = max(line["step"] for line in job.metrics() if "loss" in line)
        assert manifest.step == account.step and manifest.cause.kind is CauseKind.PREEMPTED
        if notified == "one rank":
            assert job.wait(300) == 0, job.console_tail(80)
        else:
            assert account.step >= logged, f"step {logged} was logged, step {account.step} is on disk"
        console = (output / "console.log").read_text()
        assert "no controller led the ranks" in console and f"saved   step {account.step} in {account.path}" in console
        assert "no step lost" in console and f"\nsaved   step {account.step}\nlost    0 steps" in console
        assert job.leftovers() == []
    if notified == "ttprun":
        with TrainingJob(output, ranks=3, overrides=arguments(), environ=environ) as again:
            assert again.wait(300) == 0, again.console_tail(80)
            assert f"step {account.step} (preempted)" in (output / "console.log").read_text()
    assert job.final() == whole_job(3).final()


UNPROTECTED = """
note("begun")
if rank == 1 and start == "0":
    await_file("begun-0-0")
    time.sleep(5)  # Nothing here shows when the workers' store answers the agent: before, it does not know whether a rank has called ttp.
    sys.exit(3)
if start == "0":
    time.sleep(600)
"""


def test_a_script_that_never_calls_ttp_is_reported_so_and_restarted_soon(tmp_path: Path) -> None:
    """The survivor has no reason to leave by itself: it is not held for a checkpoint that no rank can write."""
    with Launch(tmp_path, UNPROTECTED, "--nproc-per-node", "2") as job:
        assert job.wait() == 0
        assert job.text.count("no rank called ttp.start() so far; this attempt is unprotected") == 1
        assert f"the ranks had no controller for {UNPROTECTED_S:.0f} s; terminating rank 0" in job.text, job.text
        job.assert_nothing_left()
