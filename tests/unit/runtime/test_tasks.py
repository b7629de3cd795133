"""What the work thread does before and after the holder's work: what it refuses, and what becomes of the gate."""

from __future__ import annotations

import pytest

from tests.gates import freeze, thaw
from ttp.errors import TornShare
from ttp.processor.core.events import ApplyUpdate, RollForwardDone, WorkFailed, WriteShare
from ttp.processor.gate import Gate
from ttp.processor.worker import Tasks
from ttp.proto.messages import Part, WriteOrder

from .conftest import commit_record


def frozen(step: int = 4, backup_step: int = -1) -> tuple[Gate, Tasks]:
    """Return a rank that is READY at `step`, frozen, and its tasks."""
    gate = Gate(0, state_step=step - 2)
    gate.computing(step - 1)
    gate.ready(step - 1)
    gate.begin_update(step - 1, commit_record(step - 1), backup_step)
    gate.end_update(step - 1)
    gate.computing(step)
    gate.ready(step)
    freeze(gate, 1, 0.0)
    return gate, Tasks(gate, 0.0, lambda level, text: None)


def write(step: int) -> WriteShare:
    return WriteShare(WriteOrder(1, step, "/a", f"iter_{step:07d}_tmp_1_1_1", (Part("g0", 0, 1),)))


def test_a_roll_forward_that_is_ordered_twice_is_answered_twice_and_done_once() -> None:
    gate, tasks = frozen()
    order = ApplyUpdate(1, commit_record(4))
    assert tasks.begin(order) is None
    assert tasks.done(order, 4) == tasks.begin(order) == RollForwardDone(1, 4)
    assert gate.final and not gate.torn


@pytest.mark.parametrize("how", ["raises", "gives another step"])
def test_a_roll_forward_that_fails_leaves_a_torn_state_that_no_rank_takes_for_the_steps(how: str) -> None:
    gate, tasks = frozen()
    order = ApplyUpdate(1, commit_record(4))
    tasks.begin(order)
    answer = tasks.failed(order, SystemExit(1)) if how == "raises" else tasks.done(order, 5)
    assert isinstance(answer, WorkFailed) and gate.torn and gate.closed, "and the gate's lock is free"
    assert isinstance(tasks.begin(order), WorkFailed)
    assert isinstance(tasks.begin(write(3)), WorkFailed) and isinstance(tasks.begin(write(4)), WorkFailed)


def test_what_is_written_is_the_state_or_the_local_copy_of_a_closed_gate() -> None:
    gate, tasks = frozen(backup_step=2)
    assert tasks.begin(write(3)) is None and tasks.begin(write(2)) is None
    assert isinstance(tasks.begin(write(4)), WorkFailed)
    thaw(gate, 1)
    assert isinstance(tasks.begin(write(3)), WorkFailed)


def test_a_failed_write_names_its_staging_directory_and_whose_files_are_torn() -> None:
    _, tasks = frozen()
    answer = tasks.failed(write(3), TornShare("ended short", (2,)))
    assert isinstance(answer, WorkFailed)
    assert (answer.freeze_id, answer.stage, answer.tmp_name, answer.torn) == (
        1,
        "write",
        "iter_0000003_tmp_1_1_1",
        (2,),
    )
