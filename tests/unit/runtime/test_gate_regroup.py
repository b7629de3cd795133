"""The gate of a rank that regroups: what was final or torn can open again, and only at a thaw."""

from __future__ import annotations

import threading

import pytest

from tests.gates import freeze, thaw
from tests.unit.runtime.test_gate import LONG_S, Trainer, one_update, record, waits_in
from ttp.errors import ProtocolError, Regroup
from ttp.processor.gate import Gate
from ttp.proto.messages import Phase


def trains(gate: Gate, step: int) -> None:
    one_update(gate, step)
    assert (gate.phase, gate.state_step) == (Phase.DONE, step)


def rolled_forward() -> Gate:
    """A gate that was rolled forward to step 2."""
    gate = Gate(2)
    one_update(gate, 1)
    gate.computing(2)
    gate.ready(2)
    freeze(gate, 1, LONG_S)
    gate.start_roll_forward(record(2))
    gate.rolled_forward(2, backup_step=1)
    return gate


def test_a_gate_that_was_rolled_forward_opens_after_it_has_regrouped() -> None:
    gate = rolled_forward()
    assert gate.final and not thaw(gate, 1)
    gate.regrouped(2, None)
    assert gate.closed and not gate.final
    assert (gate.phase, gate.step, gate.state_step, gate.backup_step) == (Phase.COMPUTE, 3, 2, -1)
    assert thaw(gate, 1)
    trains(gate, 3)


def test_a_thread_that_waits_at_the_gate_leaves_its_step_when_it_is_asked_to() -> None:
    """And not before; nor is it asked at a gate that is open."""
    gate, asked = Gate(2), threading.Event()
    gate.left = asked.is_set
    one_update(gate, 1)
    freeze(gate, 1, LONG_S)
    trainer = Trainer(lambda: one_update(gate, 2))
    assert waits_in(trainer, "computing")
    asked.set()
    with pytest.raises(Regroup, match="rank 2 leaves step 1"):
        trainer.finish()
    gate.regrouped(1, None)
    asked.clear()
    assert thaw(gate, 1)
    asked.set()
    trains(gate, 2)


def test_regrouping_opens_nothing_by_itself() -> None:
    gate = rolled_forward()
    gate.regrouped(2, None)
    trainer = Trainer(lambda: one_update(gate, 3))
    assert waits_in(trainer, "computing")
    report = gate.settle(gate.shut(2), 2, LONG_S)
    assert (report.closed, report.final, report.torn, report.phase, report.step) == (
        True,
        False,
        False,
        Phase.COMPUTE,
        3,
    )
    assert not thaw(gate, 1), "the freeze in force is 2"
    assert thaw(gate, 2)
    trainer.finish()
    assert gate.state_step == 3


def test_the_training_thread_enters_its_training_only_when_the_gate_opens() -> None:
    gate = rolled_forward()
    gate.regrouped(2, None)
    trainer = Trainer(gate.await_open)
    assert waits_in(trainer, "await_open") and not trainer.passed.is_set()
    assert thaw(gate, 1)
    trainer.finish()
    gate.await_open()
    assert freeze(gate, 2, LONG_S).closed, "it took nothing along"


def test_a_process_without_a_state_is_torn_until_it_is_filled() -> None:
    gate = Gate(3)
    ticket = gate.vacate(4)
    assert gate.closed and gate.torn and gate.freeze_id == 4
    report = gate.settle(gate.shut(5), 5, LONG_S)
    assert (report.closed, report.torn, report.state_step) == (True, True, 0)
    gate = Gate(3)
    ticket = gate.vacate(4)
    gate.regrouped(7, None)
    assert gate.closed and not gate.torn and (gate.step, gate.state_step) == (8, 7)
    assert gate.records == ()
    assert gate.reopen(ticket)
    trains(gate, 8)


def test_a_process_without_a_state_that_is_thawed_begins_no_update() -> None:
    gate = Gate(3)
    assert gate.reopen(gate.vacate(4)), "a torn rank is let out of its wait"
    with pytest.raises(ProtocolError, match="an earlier update failed half way"):
        gate.computing(1)


def test_an_open_gate_and_another_steps_state_are_refused() -> None:
    gate = Gate(2)
    one_update(gate, 1)
    freeze(gate, 1, LONG_S)
    with pytest.raises(ProtocolError, match="expected a closed gate and the state of that step, got 1's"):
        gate.regrouped(2, None)
    assert thaw(gate, 1)
    with pytest.raises(ProtocolError, match="expected a closed gate"):
        gate.regrouped(1, None)
    trains(gate, 2)
