"""Digests of replicas that differ: in each report of the state that they were read from, and given while the gate is open only."""

from __future__ import annotations

import threading

import pytest

from tests.gates import freeze, thaw
from tests.unit.runtime.test_gate import LONG_S, Trainer, one_update, waits_in
from ttp.errors import ProtocolError, Regroup
from ttp.processor.gate import Gate
from ttp.proto.messages import Digest

DIGESTS = (Digest("g0", -5, 3),)


def test_a_report_has_the_digests_of_its_state() -> None:
    gate = Gate(1)
    one_update(gate, 1)
    gate.dispute(1, DIGESTS)
    assert freeze(gate, 1, LONG_S).digests == DIGESTS
    assert thaw(gate, 1) and freeze(gate, 2, LONG_S).digests == DIGESTS, "a false alarm changes nothing"
    assert thaw(gate, 2)
    one_update(gate, 2)
    assert freeze(gate, 3, LONG_S).digests == (), "of another state"


def test_digests_can_be_withdrawn() -> None:
    gate = Gate(1)
    one_update(gate, 1)
    gate.dispute(1, DIGESTS)
    gate.dispute(1, ())
    assert freeze(gate, 1, LONG_S).digests == ()


def test_a_rank_that_has_regrouped_has_none() -> None:
    gate = Gate(1)
    one_update(gate, 1)
    gate.dispute(1, DIGESTS)
    freeze(gate, 1, LONG_S)
    gate.regrouped(1, None)
    assert freeze(gate, 2, LONG_S).digests == ()


def test_behind_a_closed_gate_a_rank_waits_with_them() -> None:
    """What is decided from its report without them is over before another rank learns of them."""
    gate = Gate(1)
    one_update(gate, 1)
    assert freeze(gate, 1, LONG_S).digests == ()
    trainer = Trainer(lambda: gate.dispute(1, DIGESTS))
    assert waits_in(trainer, "dispute")
    assert freeze(gate, 2, LONG_S).digests == ()
    assert thaw(gate, 2)
    trainer.finish()
    assert freeze(gate, 3, LONG_S).digests == DIGESTS


def test_a_rank_that_waits_with_them_leaves_its_step_when_it_is_asked_to() -> None:
    gate, asked = Gate(1), threading.Event()
    gate.left = asked.is_set
    one_update(gate, 1)
    freeze(gate, 1, LONG_S)
    trainer = Trainer(lambda: gate.dispute(1, DIGESTS))
    assert waits_in(trainer, "dispute")
    asked.set()
    with pytest.raises(Regroup):
        trainer.finish()


def test_digests_of_another_step_are_refused() -> None:
    gate = Gate(1)
    one_update(gate, 1)
    with pytest.raises(ProtocolError, match=r"dispute\(2\): expected the state of that step, got 1's"):
        gate.dispute(2, DIGESTS)
    assert freeze(gate, 1, LONG_S).digests == ()
