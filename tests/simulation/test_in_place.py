"""Jobs that recover without a checkpoint: each arranged turn of events comes, and ends as it must."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulation import arranged_in_place as arranged
from tests.simulation.checks import run_and_check
from tests.simulation.in_place import LIMIT_S
from tests.simulation.scenario import Scenario
from tests.simulation.truth import events

RECOVERED = (
    arranged.one_dies, arranged.one_raises, arranged.the_last_step_is_rolled_forward, arranged.order_is_lost, arranged.controller_dies_behind_it,
    arranged.order_is_carried_out_late, arranged.rank_0_dies_with_its_controller,
)  # fmt: skip
STILL = (
    arranged.one_stands_still,
    arranged.one_stands_still_and_the_other_holder_dies,
    arranged.stopped_in_front_of_its_update,
)
WRITTEN = (
    arranged.dies_when_it_has_regrouped, arranged.raises_and_the_other_holder_dies, arranged.dies_while_another_rolls_forward,
    arranged.controller_dies_meanwhile, arranged.noticed_meanwhile, arranged.cannot_be_regrouped, arranged.dies_again_and_again,
    arranged.fills_differ, arranged.one_has_no_order_when_the_controller_dies,
)  # fmt: skip


def _run(build: Callable[[int], Scenario], seed: int) -> Scenario:
    scenario = build(seed)
    found = run_and_check(scenario)
    assert not found, f"seed {seed}: {found}"
    return scenario


@pytest.mark.parametrize("build", RECOVERED, ids=lambda build: build.__name__)
def test_training_continues_without_a_checkpoint(build: Callable[[int], Scenario]) -> None:
    for seed in range(8):
        job = _run(build, seed).job
        assert events(job, "regrouped") and events(job, "finished"), f"seed {seed}"
        assert not events(job, "published"), f"seed {seed}"
        assert len(events(job, "regrouped")) == 1, f"seed {seed}: once a fault"


def test_a_process_that_stands_still_is_ended_once_the_step_is_on_disk() -> None:
    """Training continues in the processes of the others."""
    for seed in range(24):
        job = _run(arranged.one_stands_still, seed).job
        moments = {line.event: at for at, line in job.journal}
        assert moments["published"] <= moments["regroup_sent"] < moments["finished"], f"seed {seed}"
        assert len(events(job, "regrouped")) == 1 and not events(job, "exit_sent"), f"seed {seed}"
        assert len(job.in_place.former) == 1, f"seed {seed}: one process"


def test_a_step_that_a_silent_process_holds_too_is_lost_by_no_death() -> None:
    """On disk, or in the memory of the one that was silent. Nor does it end an update beside the process in its place."""
    for seed in range(20):
        _run(arranged.stopped_in_front_of_its_update, seed)
    ends = [
        events(_run(arranged.one_stands_still_and_the_other_holder_dies, seed).job, "published") for seed in range(40)
    ]
    assert sum(map(bool, ends)) >= 20


@pytest.mark.parametrize("build", WRITTEN, ids=lambda build: build.__name__)
def test_what_cannot_be_recovered_is_written(build: Callable[[int], Scenario]) -> None:
    """In most of the jobs: some messages cross."""
    published = sum(bool(events(_run(build, seed).job, "published")) for seed in range(8))
    assert published >= 2


def test_a_rank_whose_training_has_returned_is_not_waited_for() -> None:
    """Nor does it enter its training again, whoever leads it (seed 600279226)."""
    for seed in range(8):
        job = _run(arranged.training_returns_in_front_of_it, seed).job
        moments = {line.event: at for at, line in reversed(job.journal)}
        assert moments["regroup_failed"] - moments["regroup_sent"] < LIMIT_S / 10, f"seed {seed}"
        assert events(job, "published") and not events(job, "regrouped"), f"seed {seed}"


def test_a_rank_that_regrouped_beside_its_write_is_not_thawed_by_a_standby() -> None:
    """All ranks live and have regrouped, and one writes still for the controller that was lost: the standby has the step written."""
    for seed in range(8):
        job = _run(arranged.regroups_after_all_beside_its_write, seed).job
        (tmp_name,) = {sent["tmp_name"] for sent in events(job, "write_sent")[:1]}
        assert events(job, "regroup_failed") and events(job, "took_over"), f"seed {seed}"
        assert len(events(job, "write_sent")) == 2 and tmp_name != events(job, "publish_sent")[0]["tmp_name"], (
            f"seed {seed}"
        )
        assert events(job, "published") and not events(job, "thawed"), f"seed {seed}"


def test_an_agent_drops_an_order_when_it_has_answered_a_later_one() -> None:
    """As `ttp/launch/attempts/replacements.py` does: else a process would be started that no rank waits for (seed 600255095)."""
    for seed in range(8):
        job = _run(arranged.order_is_carried_out_late, seed).job
        assert [line.event for _, line in job.journal].count("regroup_sent") == 2, f"seed {seed}: two orders"
        assert [process.rank for process in job.in_place.former] == [3], f"seed {seed}: one process"


def test_a_shard_whose_last_holder_dies_beside_a_replacement_is_refused() -> None:
    for seed in range(8):
        _run(arranged.last_holder_dies_while_another_rolls_forward, seed)
        job = _run(arranged.last_holder_dies_beside_a_replacement, seed).job
        assert events(job, "regroup_failed") and events(job, "refused"), f"seed {seed}"


def test_every_arrangement_is_tried() -> None:
    refused = (arranged.last_holder_dies_beside_a_replacement, arranged.last_holder_dies_while_another_rolls_forward)
    tried = (
        *RECOVERED,
        *WRITTEN,
        *refused,
        arranged.regroups_after_all_beside_its_write,
        arranged.training_returns_in_front_of_it,
        *STILL,
    )
    assert set(tried) == set(arranged.ARRANGED) and len(tried) == len(arranged.ARRANGED)
