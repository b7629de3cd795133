"""Words of an earlier freeze, or of an earlier controller's: they come late, or twice, and mean nothing."""

from __future__ import annotations

import pytest

from tests.unit.protocol.bench import ControllerBench, ProcessorBench, registration, report
from tests.unit.protocol.test_controller_dump import dying, failed, publishing
from tests.unit.protocol.test_controller_members import fault, killed
from tests.unit.protocol.test_patience import rolling
from tests.unit.protocol.test_processor import ERROR, WELCOME
from ttp.controller.core.facts.state import Stage
from ttp.processor.core.events import Connected, Disconnected, LocalFault
from ttp.proto.messages import (
    Cause,
    CauseKind,
    FaultReport,
    Phase,
    Progress,
    Published,
    RolledForward,
    StepFailed,
    Thaw,
    Upward,
    Written,
)

EARLIER = 0
"""The freeze before the one in force, which is 1."""
READY = Phase.READY


@pytest.mark.parametrize(
    "word",
    [RolledForward(0, EARLIER, 7), StepFailed(0, EARLIER, "roll_forward", "", "raised")],
    ids=["rolled forward", "failed"],
)
def test_an_earlier_freezes_roll_forward_answers_nothing(word: Upward) -> None:
    """Ranks 0 and 3 roll forward; what rank 0 did for another freeze is not what it was asked for now."""
    job = rolling()
    job.say(RolledForward(3, 1, 7), word)
    assert job.at(Stage.ROLLING) and not job.logged("roll_forward_failed")
    job.say(RolledForward(0, 1, 7))
    assert job.at(Stage.WRITING)


def test_an_earlier_freezes_write_answers_nothing() -> None:
    """Not even under the name of this staging directory."""
    job = dying()
    order = job.orders()[0]
    job.say(Written(0, EARLIER, order.tmp_name, order.parts, job.written(0, order).result))
    job.say(StepFailed(0, EARLIER, "write", order.tmp_name, "no space left on device"))
    assert job.state.dump is not None and job.state.dump.pending == 3 and not job.logged("write_failed")


def test_an_earlier_freezes_publish_answers_nothing() -> None:
    """Neither that it was done nor that it failed."""
    job, rank, order = publishing()
    job.say(Published(rank, EARLIER, order.step, "/a/iter_0000006"))
    job.say(StepFailed(rank, EARLIER, "publish", order.tmp_name, "no space left on device"))
    assert job.at(Stage.PUBLISHING) and not job.logged("publish_failed")
    job.say(failed(rank, order))
    assert job.logged("publish_failed")


def test_work_for_an_earlier_freeze_does_not_prolong_the_wait_for_answers() -> None:
    """Rank 0 reports at 20 s that another freeze's work progresses; 30 s after the orders all that owe something are stuck."""
    job = dying()
    job.wait(20.0)
    job.say(*(Progress(rank, EARLIER) for rank in range(3)))
    job.wait(10.1)
    assert job.logged("stuck")[0]["ranks"] == (0, 1, 2)


def test_work_for_an_earlier_freeze_does_not_prolong_a_round() -> None:
    """Rank 1 has not reported; its work for another freeze does not prolong the wait."""
    job = ControllerBench(freeze_timeout_s=10.0)
    job.say(killed(3))
    job.all_report(7, READY, ranks=(0, 2))
    job.wait(8.0)
    job.say(Progress(1, EARLIER))
    job.wait(2.1)
    assert job.logged("frozen")[0]["silent"] == (1,)


def test_all_faults_of_a_rank_are_said_again_on_a_new_stream() -> None:
    """The second may be the culprit's text, the first what others felt of it; the new controller knows neither."""
    second = LocalFault(Cause(CauseKind.PREEMPTED, (1,), "SIGTERM"), "")
    rank = ProcessorBench()
    rank.receive(WELCOME)
    rank.take(ERROR)
    rank.take(second)
    rank.take(Disconnected("reset by peer", refused=False))
    rank.tick(after=1.0)
    rank.take(Connected(registration(1)))
    assert [reported.cause for reported in rank.said(FaultReport)] == [ERROR.cause, second.cause]


def test_of_a_record_that_is_reported_twice_the_first_is_kept() -> None:
    """Ranks may have rolled forward with it already."""
    job = ControllerBench()
    job.say(fault(0, CauseKind.EXCEPTION))
    first, second = (report(rank, 1, Phase.DONE, 7, records=[7]) for rank in (0, 1))
    other = second.records[0].__class__(7, 9.9, 1.0, False, 1.0, (0.1,), (2.0,))
    job.say(first, second.__class__(1, 1, True, Phase.DONE, 7, 7, False, -1, (other,)))
    assert job.state.fault is not None and job.state.fault.records == first.records


def test_no_gate_is_opened_while_a_rank_that_has_reported_is_suspect() -> None:
    """Its stream broke after its report: it may be dead, and a thaw would be followed by the next freeze."""
    job = ControllerBench()
    job.close(2)
    job.say(*(report(rank, 1, READY, 7) for rank in (0, 1, 3)))
    job.close(1)
    job.say(registration(2), report(2, 1, READY, 7))
    assert job.at(Stage.FREEZING) and not job.sent(Thaw)
    job.say(registration(1))
    assert sorted(job.sent(Thaw)) == [0, 1, 2, 3]
