"""A message that is lost although its stream lives costs a heartbeat: no step, no job, and of a false alarm no restart."""

from __future__ import annotations

import pytest

from tests.simulation.arranged_in_place import in_a_recovery
from tests.simulation.arranged_losses import in_a_dump, in_a_false_alarm, in_training
from tests.simulation.checks import run_and_check
from tests.simulation.lost import LOSABLE
from tests.simulation.truth import events
from tests.simulation.unasked import (
    exit_with_another_status,
    publish_another_steps_record,
    published_by_another,
    roll_forward_with_an_impossible_record,
    write_into_a_published_checkpoint,
)
from ttp.proto.messages import Regroup, Regrouped

OF_RECOVERIES = (Regroup, Regrouped)


@pytest.mark.parametrize("kind", LOSABLE, ids=lambda kind: kind.__name__)
def test_a_lost_message_is_sent_again(kind: type) -> None:
    """In a job without a fault, in a false alarm, in a dump that no rank can be missing from, and what is said only then in a recovery."""
    lost = 0
    for seed in range(6):
        for arrange in (in_training, in_a_false_alarm, in_a_dump, *((in_a_recovery,) if kind in OF_RECOVERIES else ())):
            scenario = arrange(seed, kind)
            found = run_and_check(scenario)
            assert not found, f"{arrange.__name__}({seed}, {kind.__name__}): {found}"
            job = scenario.job
            lost += all(rank.route.loses is None for rank in job.ranks)
            assert events(job, "published" if arrange is in_a_dump else "finished"), arrange.__name__
    assert lost, f"no {kind.__name__} was ever sent"


def test_an_answer_or_order_outside_the_protocol_changes_nothing() -> None:
    """Jobs in which one is sent end as without it."""
    for seed in range(8):
        for arrange, end, refusals in (
            (published_by_another, "published", 1),
            (exit_with_another_status, "finished", 1),
            (roll_forward_with_an_impossible_record, "published", 0),  # the rank answers that its order failed
            (write_into_a_published_checkpoint, "published", 1),  # the controller never named that directory
            (publish_another_steps_record, "published", 0),
        ):
            scenario = arrange(seed)
            found = run_and_check(scenario)
            assert not found and events(scenario.job, end), f"{arrange.__name__}({seed}): {found}"
            assert len(scenario.job.refusals or ()) == refusals, f"{arrange.__name__}({seed}): {scenario.job.refusals}"
