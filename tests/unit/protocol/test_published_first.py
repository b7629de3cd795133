"""A step that is published before the ranks regroup: when they regroup then, and how the fault ends if they do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.protocol.bench import ControllerBench, report
from tests.unit.protocol.test_controller_members import fault, killed
from tests.unit.protocol.test_regroup import all_regroup, job, lose_rank_3
from ttp.controller.core.facts.state import Stage
from ttp.proto.incident import Incident, read_incident
from ttp.proto.messages import CauseKind, Exit, Phase, Published, Regroup, StepFailed, Thaw

IN_PLACE_S = 20.0


def publish(bench: ControllerBench) -> None:
    dump = bench.state.dump
    assert dump is not None
    bench.say(Published(min(dump.publishers), bench.state.freeze_id, 6, "/a/iter_0000006"))


def publishing(**settings: Any) -> ControllerBench:
    """Rank 3 is dead, and a rank was ordered to publish step 6."""
    bench = job(publish_first=True, in_place_s=IN_PLACE_S, **settings)
    lose_rank_3(bench)
    assert bench.at(Stage.WRITING) and not bench.sent(Regroup)
    bench.all_write(bench.orders())
    assert bench.at(Stage.PUBLISHING)
    return bench


def published(**settings: Any) -> ControllerBench:
    bench = publishing(**settings)
    publish(bench)
    assert bench.at(Stage.REGROUPING)
    return bench


def in_fault(bench: ControllerBench, **changed: Any) -> None:
    fault = bench.state.fault
    assert fault is not None
    bench.state = bench.state.with_fault(replace(fault, **changed))


def incident(bench: ControllerBench) -> Incident:
    return read_incident(bench.logged("incident")[-1])


def test_they_regroup_once_it_is_published() -> None:
    bench = published()
    assert sorted(bench.sent(Regroup)) == [0, 1, 2] and not bench.sent(Exit)
    all_regroup(bench)
    assert bench.at(Stage.RUNNING) and sorted(bench.sent(Thaw)) == [0, 1, 2, 3]
    found = incident(bench)
    assert found.in_place and found.saved is not None and (found.saved.step, found.steps_lost) == (6, 0)
    assert found.took_ms is not None and {"written", "published", "regrouped"} <= set(found.took_ms)


def test_the_next_faults_report_knows_what_this_one_has_published() -> None:
    """No rank has loaded or saved it: they report an older one."""
    bench = published()
    all_regroup(bench)
    bench.say(killed(3, pid=203), killed(1))
    bench.say(
        *(replace(report(rank, 2, Phase.COMPUTE, 9, records=[7, 8]), checkpoint="/a/iter_0000003") for rank in (0, 2))
    )
    found = incident(bench)
    assert (found.saved, found.goes_on_from, found.steps_lost) == (None, "/a/iter_0000006", 2)


def test_a_second_fault_is_published_again() -> None:
    bench = published()
    all_regroup(bench)
    lose_rank_3(bench, step=8, pid=203)
    assert bench.at(Stage.WRITING)


@pytest.mark.parametrize(
    "what",
    [(fault(2, CauseKind.EXCEPTION, "out of memory"),), (StepFailed(1, 1, "regroup", "", "refused"),), (killed(2),)],
)
def test_what_fails_then_ends_the_fault(what: tuple[Any, ...]) -> None:
    bench = published()
    bench.say(*what)
    assert bench.at(Stage.EXITING) and sorted(bench.sent(Exit))[:2] == [0, 1]
    found = incident(bench)
    assert found.saved is not None and found.goes_on_from == found.saved.path and not found.in_place


@pytest.mark.parametrize("end", ["the fault's time is over", "no rank is attached"])
def test_a_fault_that_is_given_up_then_has_its_checkpoint(end: str) -> None:
    if end == "no rank is attached":
        bench = published(orphan_timeout_s=4.0, lease_s=60.0)
        bench.close(0, 1, 2)
        bench.wait(5.0, senders=())
        assert bench.at(Stage.OVER)
    else:
        bench = published()
        in_fault(bench, began=-1000.0)
        bench.wait(0.1)
        assert bench.at(Stage.EXITING)
    found = incident(bench)
    assert found.saved is not None and found.saved.step == 6 and not found.not_saved and not bench.logged("refused")


def test_a_notice_that_came_meanwhile_ends_in_a_restart() -> None:
    bench = publishing()
    bench.say(fault(1, CauseKind.PREEMPTED, "SIGTERM"))
    publish(bench)
    assert bench.at(Stage.EXITING) and "preempted" in bench.logged("not_in_place")[0]["reason"]


def test_what_cannot_be_recovered_is_not_tried() -> None:
    """It is known before the step is written, and said once."""
    bench = job(publish_first=True, in_place_s=IN_PLACE_S, agents=False)
    lose_rank_3(bench)
    bench.all_write(bench.orders())
    publish(bench)
    assert bench.at(Stage.EXITING) and len(bench.logged("not_in_place")) == 1


def test_it_has_all_of_the_faults_time() -> None:
    """The half for writing is not needed any more."""
    bench = publishing(total_timeout_s=60.0, lease_s=100.0, progress_timeout_s=100.0)
    bench.wait(35.0, senders=range(3))
    publish(bench)
    assert bench.at(Stage.REGROUPING)
    bench = publishing(total_timeout_s=60.0, lease_s=100.0, progress_timeout_s=100.0)
    bench.wait(41.0, senders=range(3))
    publish(bench)
    assert bench.at(Stage.EXITING)
    assert bench.logged("not_in_place")[-1]["reason"] == "less than 20 s remain in the fault's time"


def test_a_rank_that_was_passed_over_keeps_the_others_from_it() -> None:
    bench = publishing()
    in_fault(bench, stuck=frozenset({2}))
    publish(bench)
    assert bench.at(Stage.EXITING)
    assert bench.logged("not_in_place")[-1]["reason"] == "rank 2 was given an order, and has not answered"


def test_what_was_published_after_all_while_they_write_elsewhere_ends_the_fault() -> None:
    """In the first directory, of which every rank had said that it cannot publish there. What they write now is under way still."""
    bench = publishing()
    while bench.at(Stage.PUBLISHING):
        dump = bench.state.dump
        assert dump is not None and dump.order is not None
        bench.say(StepFailed(min(dump.publishers), 1, "publish", dump.order.tmp_name, "no answer from the disk"))
    assert bench.at(Stage.WRITING)
    bench.say(Published(0, bench.state.freeze_id, 6, "/a/iter_0000006"))
    assert bench.at(Stage.EXITING) and not bench.logged("regroup_sent")
    found = incident(bench)
    assert found.saved is not None and found.saved.path == "/a/iter_0000006"
