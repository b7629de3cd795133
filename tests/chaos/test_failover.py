"""Real controllers get real signals, idle and in the middle of a dump; a standby takes over, and the job loses nothing.

One job of six faults, an attempt each; the tests look at what its controllers reported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.conftest import JOB_S, RunJob, arguments
from tests.chaos.test_kills import assert_equal
from ttp.chaos.observed.training_job import TrainingJob
from ttp.chaos.verdict.timeline import lost_steps, timeline
from ttp.runtime.standby import MOST_STANDBYS

Line = dict[str, Any]
STEPS = "--training_config.training_iters=200"
LEASE_S = 8.0
"""Longer than by default: a busy machine alone makes no rank silent for so long."""
IDLE, EARLY, WRITING, TOGETHER, STOPPED, TWICE = range(6)
"""The faults, by the attempt that they end."""


@dataclass(frozen=True, slots=True)
class Faulted:
    job: TrainingJob
    controller_killed_unix_s: float
    """In attempt IDLE."""
    lost: tuple[int | None, ...]
    """Committed steps that had to be trained again, by attempt."""


def lines_of(job: TrainingJob, start: int, event: str) -> list[Line]:
    journals = job.journals()
    return [line for line in journals[start] if line.get("event") == event] if len(journals) > start else []


def wait_for_line(job: TrainingJob, start: int, event: str) -> None:
    job.wait_for(lambda: bool(lines_of(job, start, event)), f"{event} in attempt {start}", JOB_S)


class Scenario:
    """What is done to the job, one attempt after the other."""

    def __init__(self, job: TrainingJob) -> None:
        self.job = job
        self.killed: list[tuple[float, int]] = []
        """When a rank of each attempt was killed, and the last step on record then."""
        self.controller_killed_unix_s = 0.0

    def train_a_little(self, start: int) -> int:
        """Wait until the attempt has made new steps; return the pid of its controller."""
        wait_for_line(self.job, start, "assembled")
        self.job.wait_for_step(self.job.last_step() + 3)
        return self.job.controller_pids()[0]

    def kill_rank(self, rank: int) -> None:
        kill = self.job.kill(rank)
        self.killed.append((kill.unix_s, kill.after_step))

    def kill_the_idle_controller_and_later_a_rank(self) -> None:
        controller = self.train_a_little(IDLE)
        self.controller_killed_unix_s = time.time()
        os.kill(controller, signal.SIGKILL)
        wait_for_line(self.job, IDLE, "thawed")
        self.job.wait_for_step(self.job.last_step() + 3)
        self.kill_rank(2)

    def kill_the_controller_before_all_gates_are_closed(self) -> None:
        """The dump cannot get past the gate of a survivor that is stopped until the controller is killed."""
        controller = self.train_a_little(EARLY)
        held = self.job.pids()[2]
        os.kill(held, signal.SIGSTOP)
        self.kill_rank(1)
        wait_for_line(self.job, EARLY, "freeze_sent")
        os.kill(controller, signal.SIGKILL)
        os.kill(held, signal.SIGCONT)

    def kill_the_controller_while_shares_are_written(self) -> None:
        controller = self.train_a_little(WRITING)
        self.kill_rank(3)
        wait_for_line(self.job, WRITING, "write_sent")
        with contextlib.suppress(ProcessLookupError):  # the dump was faster
            os.kill(controller, signal.SIGKILL)

    def kill_rank_0_and_the_controller_together(self) -> None:
        controller = self.train_a_little(TOGETHER)
        os.kill(controller, signal.SIGKILL)
        self.kill_rank(0)

    def stop_the_controller_kill_a_rank_and_let_the_controller_go_on(self) -> None:
        controller = self.train_a_little(STOPPED)
        os.kill(controller, signal.SIGSTOP)
        self.kill_rank(2)
        wait_for_line(self.job, STOPPED, "decided")
        os.kill(controller, signal.SIGCONT)

    def kill_the_idle_controller_and_later_a_rank_and_the_new_controller(self) -> None:
        controller = self.train_a_little(TWICE)
        os.kill(controller, signal.SIGKILL)
        wait_for_line(self.job, TWICE, "standby_started")
        self.job.wait_for_step(self.job.last_step() + 3)
        os.kill(self.job.controller_pids()[1], signal.SIGKILL)
        self.kill_rank(2)


@pytest.fixture(scope="module")
def faulted(tmp_path_factory: pytest.TempPathFactory) -> Faulted:
    output = tmp_path_factory.mktemp("failover") / "faulted"
    environ = {"TTP_LEASE_S": f"{LEASE_S:g}"}
    with TrainingJob(
        output, ranks=4, overrides=arguments(STEPS), environ=environ, launcher=("--max-restarts", "7")
    ) as job:
        scenario = Scenario(job)
        scenario.kill_the_idle_controller_and_later_a_rank()
        scenario.kill_the_controller_before_all_gates_are_closed()
        scenario.kill_the_controller_while_shares_are_written()
        scenario.kill_rank_0_and_the_controller_together()
        scenario.stop_the_controller_kill_a_rank_and_let_the_controller_go_on()
        scenario.kill_the_idle_controller_and_later_a_rank_and_the_new_controller()
        status = job.wait(JOB_S)
    assert status == 0, f"status {status}\n{job.console_tail(80)}"
    journals, metrics = job.journals(), job.metrics()
    lost = tuple(
        lost_steps(timeline(journals[start], metrics, unix_s), after_step)
        for start, (unix_s, after_step) in enumerate(scenario.killed)
    )
    return Faulted(job, scenario.controller_killed_unix_s, lost)


def test_every_step_is_saved_and_the_curves_are_the_baseline_jobs(faulted: Faulted, whole_job: RunJob) -> None:
    assert faulted.lost == (0, 0, 0, 0, 0, 0), faulted.job.console_tail(80)
    assert_equal(faulted.job, whole_job(4, STEPS))
    assert faulted.job.leftovers() == []


def test_an_idle_controller_is_replaced_within_a_second_or_so(faulted: Faulted) -> None:
    """Training continues under the standby, which later receives a death from the agent."""
    (took_over,), (thawed,) = lines_of(faulted.job, IDLE, "took_over"), lines_of(faulted.job, IDLE, "thawed")[:1]
    assert took_over["ranks"] == [0, 1, 2, 3] and took_over["absent"] == [] and took_over["controller"] == 1
    seconds = thawed["unix_s"] - faulted.controller_killed_unix_s
    print(f"from SIGKILL of the controller until all trained on under the standby: {seconds * 1e3:.0f} ms")
    assert seconds < LEASE_S, "it waited for a lease"
    death = lines_of(faulted.job, IDLE, "death_seen")[0]
    assert death["kind"] == "exited" and death["controller"] == 1


def test_a_dump_is_completed_by_the_standby(faulted: Faulted) -> None:
    """From its beginning on, where the gates were not closed yet. The other kill hits the dump somewhere behind the journal's
    line, when it may be published already."""
    assert {line["controller"] for line in lines_of(faulted.job, EARLY, "published")} == {1}
    assert {line["controller"] for line in lines_of(faulted.job, WRITING, "published")} <= {0, 1}
    assert lines_of(faulted.job, WRITING, "published")


def test_rank_0_and_its_controller_may_die_together(faulted: Faulted) -> None:
    (published,) = lines_of(faulted.job, TOGETHER, "published")
    assert published["controller"] == 1
    death = lines_of(faulted.job, TOGETHER, "death_seen")[0]
    assert death["rank"] == 0 and death["kind"] == "exited", "the agent reported it to the standby"


def test_a_stopped_controller_that_comes_back_publishes_nothing(faulted: Faulted) -> None:
    assert {line["controller"] for line in lines_of(faulted.job, STOPPED, "published")} == {1}
    assert not [line for line in lines_of(faulted.job, STOPPED, "decided") if line["controller"] == 0]
    checkpoints = Path(faulted.job.output_dir / "checkpoints")
    assert not [path.name for path in checkpoints.glob("iter_*") if "broken" in path.name]


def test_the_standby_that_replaces_one_leads_a_later_dump(faulted: Faulted) -> None:
    """The first controller and the standby that followed it are killed in one attempt, the second together with a rank."""
    (started,) = lines_of(faulted.job, TWICE, "standby_started")[:1]
    assert started["controller"] == 1
    (published,) = lines_of(faulted.job, TWICE, "published")
    assert published["controller"] > MOST_STANDBYS, "a standby of the beginning led"
