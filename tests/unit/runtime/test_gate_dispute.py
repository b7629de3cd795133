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


def test_a_rank_that_regroups_reports_behind_its_closed_gate() -> None:
    """Its gate opens only when all replicas are equal; what is written instead is decided from a report that has the digests."""
    gate = Gate(1)
    one_update(gate, 1)
    assert freeze(gate, 1, LONG_S).digests == ()
    gate.regroups = 1
    with pytest.raises(ProtocolError, match=r"dispute\(2\): expected the state of that step, got 1's"):
        gate.dispute(2, DIGESTS)
    gate.dispute(1, DIGESTS)
    assert freeze(gate, 2, LONG_S).digests == DIGESTS
    gate.regrouped(1, None)
    assert freeze(gate, 3, LONG_S).digests == () and not gate.regroups
    trainer = Trainer(lambda: gate.dispute(1, DIGESTS))
    assert waits_in(trainer, "dispute"), "from now on as ever"
    assert thaw(gate, 3)
    trainer.finish()


def test_a_rank_that_was_asked_again_as_it_regrouped_reports_no_more() -> None:
    """What is decided from its report without digests may be written: it must not let others learn of them."""
    gate = Gate(1)
    one_update(gate, 1)
    freeze(gate, 1, LONG_S)
    gate.regroups = 1
    assert freeze(gate, 2, LONG_S).digests == ()
    with pytest.raises(ProtocolError, match=r"dispute\(1\): regroups in freeze 1, and a newer one has come"):
        gate.dispute(1, DIGESTS)
    assert freeze(gate, 3, LONG_S).digests == ()


def test_a_process_that_has_been_given_its_state_reports_although_it_is_torn() -> None:
    """It was never at that step; no digest of a torn rank counts."""
    gate = Gate(1)
    gate.vacate(1)
    gate.regroups = 1
    gate.dispute(7, DIGESTS)
    found = freeze(gate, 2, LONG_S)
    assert found.torn and found.digests == DIGESTS
