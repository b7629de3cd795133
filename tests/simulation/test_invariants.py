"""The checks of what is on disk can fail: wrong writers, publishers and trainers, each caught under the invariant it breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.checks import violations
from tests.simulation.disk import OLDER_STEP, Disk, File, Manifest, final_name
from tests.simulation.faults import KINDS
from tests.simulation.repetition import repeats_nothing
from tests.simulation.replica import Replica
from tests.simulation.scenario import Scenario, build
from tests.simulation.training import even
from tests.simulation.work import Worker
from ttp.controller.core.dump import finish, roll_forward, writing
from ttp.controller.core.facts import decision
from ttp.controller.core.ranks import liveness
from ttp.proto.messages import Cause, CauseKind, Phase

JOBS = 40


def caught(known: str, arrange: Callable[[Scenario], None] = lambda scenario: None) -> str:
    """Return the first violation that starts with `known`, of jobs in which a rank is killed and `arrange` adds the rest."""
    others: set[str] = set()
    for seed in range(JOBS):
        scenario = build(seed, even(4), faults=False, steps=5)
        scenario.harmless = False
        job = scenario.job
        job.hook("DONE 3", 2, lambda rank, job=job: job.kill(rank))  # type: ignore[misc]
        arrange(scenario)
        for text in violations(scenario):
            if text.startswith(known):
                return text
            others.add(text[:80])
    raise AssertionError(f"none of {JOBS} jobs violated {known}; seen instead: {sorted(others)[:5]}")


def with_fault(kind: str) -> Callable[[Scenario], None]:
    def arrange(scenario: Scenario) -> None:
        for rank in range(4):
            KINDS[kind].inject(scenario.job, scenario.job.rng, rank)

    return arrange


def test_right_ones_are_not_caught() -> None:
    """The jobs that the others are caught in violate nothing."""
    for kind in ("torn write", "failed fsync", "publisher killed before the rename"):
        with pytest.raises(AssertionError, match="violated I; seen instead: \\[\\]"):
            caught("I", with_fault(kind))


def test_a_publisher_that_does_not_look_at_sizes_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Any, disk: Disk, order: Any) -> Manifest:
        names = tuple(file.name for result in order.results for file in result.files)
        return Manifest(order.step, names, self.replica.host_states[order.step])

    monkeypatch.setattr(Worker, "_manifest", wrong)
    caught("I5", with_fault("torn write"))


def test_a_writer_that_takes_a_failed_fsync_for_done_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Any, order: Any, name: str, parts: Any) -> File:
        return File(parts, (self.rank, order.directory) not in self.job.disk.unsynced)

    monkeypatch.setattr(Worker, "_write", wrong)
    monkeypatch.setattr(Disk, "check_fsync", lambda self, rank, root: None)
    caught("I1", with_fault("failed fsync"))


def test_a_data_position_of_another_step_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer notes what it remembers before it has drawn the step's batch."""

    def wrong(self: Replica, step: int) -> None:
        self.gradients_of = step
        self.host_states[step] = self.host_states.get(step - 1, 0)

    monkeypatch.setattr(Replica, "reduced", wrong)
    caught("I12")


def test_a_tracker_that_is_replaced_before_the_rename_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Worker._write_manifest

    def wrong(self: Any, order: Any) -> None:
        self.job.disk.tracker[order.directory] = order.step
        right(self, order)

    def everybody_dies_before_the_rename(scenario: Scenario) -> None:
        job = scenario.job

        def strike(rank: int) -> None:
            for other in range(4):
                job.kill(other)

        job.hook("manifest written", 1, strike)

    monkeypatch.setattr(Worker, "_write_manifest", wrong)
    caught("I4", everybody_dies_before_the_rename)


def test_an_older_checkpoint_that_is_removed_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Worker._begin_publish

    def wrong(self: Any, order: Any) -> None:
        self.job.disk.directories.pop((order.directory, final_name(OLDER_STEP)), None)
        right(self, order)

    monkeypatch.setattr(Worker, "_begin_publish", wrong)
    caught("I9")


def test_a_checkpoint_that_a_restart_passes_over_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is published under its name, and its manifest says another step."""
    right = Worker._manifest

    def wrong(self: Any, disk: Disk, order: Any) -> Manifest:
        manifest = right(self, disk, order)
        return Manifest(manifest.step - 1, manifest.files, manifest.host_state)

    monkeypatch.setattr(Worker, "_manifest", wrong)
    caught("I10")


def test_a_dump_that_takes_longer_than_it_may_is_caught() -> None:
    """The check has shorter times than the controller, and every order hangs until it is given up."""

    def stuck(scenario: Scenario) -> None:
        scenario.job.times = replace(scenario.job.times, total_timeout_s=0.1, controller_lost_s=0.1)
        for process in scenario.job.ranks:
            process.hang_work = True

    caught("I11", stuck)


def test_a_controller_that_orders_no_rank_to_exit_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finish, "reachable", lambda members: ())
    repeats_nothing(monkeypatch)
    caught("I11: ranks")


def test_a_broken_stream_that_counts_as_a_death_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller believes its own journal; the check looks at what happened to the ranks."""

    def wrong(state: Any, rank: int, why: str, now: float, out: Any) -> Any:
        return liveness.rank_died(state, rank, Cause(CauseKind.SILENT, (rank,), why), False, now, out)

    def streams_break_in_the_dump(scenario: Scenario) -> None:
        job = scenario.job
        job.hook("freeze_sent", 1, lambda rank: [job.drop_stream(other) for other in range(4)])

    monkeypatch.setattr(liveness, "suspicion", wrong)
    caught("I9", streams_break_in_the_dump)


def test_a_newer_step_that_is_given_up_for_a_local_copy_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = decision.decide

    def wrong(groups: Any, reports: Any, records: Any, *more: Any) -> Any:
        stay = {rank: replace(report, phase=Phase.COMPUTE) for rank, report in reports.items()}
        return right(groups, stay, records, *more)

    def two_are_late(scenario: Scenario) -> None:
        job = scenario.job
        job.training = replace(job.training, local_copy=True)
        for process in job.ranks:
            process.replica.training = job.training
        for rank in (0, 2):
            job.ranks[rank].late_results[3] = 1.0

    monkeypatch.setattr(roll_forward, "decide", wrong)
    caught("I6", two_are_late)


def test_a_directory_that_is_given_up_for_one_ranks_disk_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank fails in the first directory, another in the second; the others can write in both."""

    def wrong(state: Any, ranks: Any, now: float, out: Any) -> Any:
        return writing.next_directory(state, now, out)

    def two_bad_disks(scenario: Scenario) -> None:
        scenario.job.disk.broken_for |= {(0, "/a"), (3, "/b")}

    monkeypatch.setattr(writing, "replace_writers", wrong)
    caught("I9", two_bad_disks)
