"""How long a controller looks for a culprit behind hints, how many hints it keeps, and how many culprits it names."""

from __future__ import annotations

from tests.unit.protocol.bench import ControllerBench, registration, report
from tests.unit.protocol.test_controller_members import fault, killed
from ttp.controller.core.facts.state import Stage
from ttp.proto.messages import CauseKind, Phase

LEASE_S = 3.0


def test_later_hints_do_not_make_the_wait_for_the_culprit_longer() -> None:
    """One lease from the first failed collective, however many follow."""
    job = ControllerBench(lease_s=LEASE_S)
    job.say(fault(0, CauseKind.PEER_ERROR))
    job.all_report(7)
    for rank in (1, 2, 3):
        job.wait(LEASE_S / 4)
        job.say(fault(rank, CauseKind.PEER_ERROR))
    assert job.at(Stage.FREEZING)
    job.wait(LEASE_S / 4 + 0.1)
    assert job.at(Stage.WRITING)


def test_the_wait_for_the_culprit_begins_with_the_first_hint_and_not_with_a_suspicion_before_it() -> None:
    job = ControllerBench(lease_s=LEASE_S)
    job.close(1)
    job.wait(1.0, senders=(0, 2, 3))
    job.say(fault(0, CauseKind.PEER_ERROR), registration(1))
    job.all_report(7)
    job.wait(LEASE_S - 0.1)
    assert job.at(Stage.FREEZING)
    job.wait(0.2)
    assert job.at(Stage.WRITING)


def test_hints_are_remembered_up_to_a_number_and_culprits_always() -> None:
    """A death among ten thousand ranks makes ten thousand collectives fail."""
    holders = ((*range(80),),)
    job = ControllerBench(holders)
    for rank in range(79):
        job.say(fault(rank, CauseKind.PEER_ERROR))
    assert job.state.fault is not None and len(job.state.fault.causes) == 64
    job.say(fault(79, CauseKind.EXCEPTION))
    assert len(job.state.fault.causes) == 65


def test_many_culprits_are_named_and_some_of_their_texts() -> None:
    """All ranks stand in the cause; of the texts so many as can be read."""
    job = ControllerBench(((*range(12),),))
    for rank in range(8):
        job.say(killed(rank))
    job.say(*(report(rank, 1, Phase.COMPUTE, 7) for rank in range(8, 12)))
    job.all_write(job.orders())
    _, order = job.publish_order()
    assert order.cause.ranks == tuple(range(8)) and "more" not in order.cause.text
    job = ControllerBench(((*range(12),),))
    for rank in range(9):
        job.say(killed(rank))
    job.say(*(report(rank, 1, Phase.COMPUTE, 7) for rank in range(9, 12)))
    job.all_write(job.orders())
    _, order = job.publish_order()
    assert order.cause.ranks == tuple(range(9)) and order.cause.text.endswith("and 1 more")
