"""What is refused: answers to no order, and exits, records and orders that the protocol does not have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from tests.unit.protocol.bench import ControllerBench, ProcessorBench, only, record, registration, report, share
from tests.unit.protocol.test_controller_dump import dying, publishing
from tests.unit.protocol.test_controller_members import killed
from tests.unit.protocol.test_processor import publish_order, write_order
from ttp.controller.core.facts.state import Stage
from ttp.errors import ProtocolError
from ttp.processor.core.events import ApplyUpdate, ExitProcess, PublishCheckpoint, WriteShare
from ttp.proto.messages import (
    CommitRecord,
    Exit,
    Part,
    Phase,
    Progress,
    Published,
    PublishOrder,
    Regrouped,
    RolledForward,
    RollForward,
    ShareResult,
    StateReport,
    StepFailed,
    Upward,
    WriteOrder,
    Written,
)

TMP = "iter_0000006_tmp_3_1_1"


def freezing() -> ControllerBench:
    job = ControllerBench()
    job.say(killed(3))
    return job


def rolling() -> ControllerBench:
    job = freezing()
    job.say(report(0, 1, Phase.READY, 6), report(1, 1, Phase.READY, 6), report(2, 1, Phase.DONE, 6, records=(6,)))
    assert job.at(Stage.ROLLING)
    return job


def being_published() -> ControllerBench:
    return publishing()[0]


UNASKED: dict[str, tuple[Callable[[], ControllerBench], tuple[Any, ...]]] = {
    "freezing": (freezing, (RolledForward(0, 1, 6), Regrouped(0, 1), Published(0, 1, 6, "/a/x"), StepFailed(0, 1, "write", TMP, "no space"))),
    "rolling": (rolling, (RolledForward(2, 1, 6), Published(0, 1, 6, "/a/x"), StepFailed(0, 1, "publish", TMP, "no space"))),
    "writing": (dying, (Published(0, 1, 6, "/a/x"), RolledForward(0, 1, 6), StepFailed(0, 1, "write", "iter_0000006_tmp_3_1_2", ""))),
    "parts": (
        dying,
        (
            Written(0, 1, TMP, (Part("g0", 5, 6),), share(0)),
            Written(0, 1, "iter_0000006_tmp_9_1_1", (), share(0)),
            Written(0, 1, "iter_0000006_tmp_9_1_1", dying().orders()[0].parts, share(0)),
            Written(0, 1, TMP, (Part("g0", 0, 2),), share(1)),
            Written(0, 1, TMP, dying().orders()[0].parts, ShareResult((*share(0).files, *share(1).files))),
        ),
    ),
    "publishing": (
        being_published,
        (Published(1, 1, 6, "/a/x"), Published(0, 1, 7, "/a/x"), StepFailed(0, 1, "sweep", TMP, ""), StepFailed(1, 1, "publish", TMP, "")),
    ),
    "another freeze": (freezing, (report(0, 2, Phase.COMPUTE, 1), RolledForward(0, 7, 6), Progress(0, 2))),
}  # fmt: skip


@pytest.mark.parametrize("where", UNASKED)
def test_an_answer_that_no_order_has_asked_for_is_refused_by_name_and_changes_nothing(where: str) -> None:
    begin, answers = UNASKED[where]
    job = begin()
    before = job.state
    for answer in answers:
        with pytest.raises(
            ProtocolError, match=rf"stage {before.stage.value}: .*rank {answer.rank}.*{type(answer).__name__}"
        ):
            job.say(answer)
        assert job.state is before


def test_a_report_under_a_number_that_was_never_sent_is_refused_while_training_is_on() -> None:
    job = ControllerBench()
    with pytest.raises(ProtocolError, match="expected freeze 0 at most"):
        job.say(StateReport(0, 3, True, Phase.COMPUTE, 1, 0, False, -1, ()))


def test_a_refusal_of_a_large_answer_is_short_and_says_who_and_what_was_expected() -> None:
    """It goes into the journal as it is, and a message has up to 16 MB."""
    job = dying()
    parts = tuple(Part(f"group {number}", 0, 1) for number in range(10_000))
    with pytest.raises(
        ProtocolError, match=r"unexpected answer of rank 0: got Written.*expected one of this rank's"
    ) as refused:
        job.say(Written(0, 1, TMP, parts, share(0)))
    assert len(str(refused.value)) <= ProtocolError.LONGEST


def test_answers_that_come_twice_are_late_and_no_error() -> None:
    """An order that is given again is answered again."""
    job = dying()
    orders = job.orders()
    first = min(orders)
    answers: list[Upward] = [job.written(first, orders[first])] * 2
    job.say(*answers, StepFailed(first, 1, "write", orders[first].tmp_name, "late"))
    assert not job.logged("write_failed")


def test_the_answer_to_an_order_of_the_directory_before_is_late_and_no_error() -> None:
    job = dying()
    orders = job.orders()
    for rank, order in orders.items():
        if job.at(Stage.WRITING) and not job.logged("written"):
            job.say(StepFailed(rank, 1, "write", order.tmp_name, "no space left on device"))
    assert {order.directory for order in job.orders().values()} <= {"/b"}
    job.say(*(job.written(rank, order) for rank, order in orders.items()))
    assert not job.logged("written")


# --- what a rank executes ---


@pytest.mark.parametrize("code", [0, 1, 76, 255])
def test_an_exit_with_a_status_that_controllers_do_not_have_is_refused(code: int) -> None:
    rank = ProcessorBench()
    before = rank.state
    with pytest.raises(ProtocolError, match=f"rank 1, training: invalid exit status: got {code}, expected 75"):
        rank.receive(Exit(code, "leave"))
    assert rank.state is before
    assert only(rank.receive(Exit(75, "saved")), ExitProcess)


BAD_RECORDS: dict[str, dict[str, Any]] = {
    "a clip factor above one": {"clip_factor": 1.5},
    "a clip factor that is not a number": {"clip_factor": nan},
    "a clip factor below zero": {"clip_factor": -0.5},
    "an endless clip factor": {"clip_factor": inf},
    "a norm below zero": {"grad_norm": -1.0},
}


@pytest.mark.parametrize("what", BAD_RECORDS)
def test_a_roll_forward_with_a_record_that_no_step_can_have_is_refused_and_the_rank_stays_whole(what: str) -> None:
    rank = ProcessorBench()
    rank.freeze(records=(4,))
    rank.receive(RollForward(1, replace(record(5), **BAD_RECORDS[what])))
    assert not only(rank.effects, ApplyUpdate)
    assert "invalid record of step 5" in rank.said(StepFailed)[0].error
    rank.roll()
    assert only(rank.effects, ApplyUpdate), "the true record is taken"


@pytest.mark.parametrize("norm", [nan, inf, 0.0])
def test_a_skipped_step_and_one_without_a_norm_are_records_like_any(norm: float) -> None:
    rank = ProcessorBench()
    rank.freeze()
    rank.receive(RollForward(1, CommitRecord(5, norm, 1.0, True, 1.0, (0.1,), ())))
    assert only(rank.effects, ApplyUpdate)


def test_a_record_that_differs_from_the_one_that_the_rank_holds_is_refused() -> None:
    rank = ProcessorBench()
    rank.freeze(records=(4, 5))
    rank.receive(RollForward(1, replace(record(5), learning_rates=(0.2,))))
    assert "which this rank holds" in rank.said(StepFailed)[0].error and not only(rank.effects, ApplyUpdate)


BAD_ORDERS: dict[str, dict[str, Any]] = {
    "a directory of another": {"directory": "/etc"},
    "a directory inside its own": {"directory": "/a/.."},
    "a published checkpoint's name": {"tmp_name": "iter_0000005"},
    "a path": {"tmp_name": "../iter_0000005_tmp_3_1_1"},
    "another step's staging directory": {"tmp_name": "iter_0000004_tmp_3_1_1"},
    "another freeze's staging directory": {"tmp_name": "iter_0000005_tmp_3_2_1"},
    "a claim": {"tmp_name": "iter_0000005_tmp_3_1_1_claim_0123456789ab"},
    "a name in other digits": {"tmp_name": "iter_000000٥_tmp_3_1_1"},
    "a name with a NUL": {"tmp_name": "iter_0000005_tmp_3_1_1\0"},
    "a name with leading zeros": {"tmp_name": "iter_0000005_tmp_03_1_1"},
    "no name": {"tmp_name": ""},
}


@pytest.mark.parametrize("what", BAD_ORDERS)
@pytest.mark.parametrize("order", [write_order(), publish_order()], ids=["write", "publish"])
def test_an_order_outside_the_ranks_own_directories_and_names_is_refused_with_the_reason(
    order: WriteOrder | PublishOrder, what: str
) -> None:
    rank = ProcessorBench()
    rank.freeze()
    wrong = replace(order, **BAD_ORDERS[what])
    rank.receive(wrong)
    (reported,) = rank.said(StepFailed)
    assert reported.tmp_name == wrong.tmp_name and reported.error.startswith("invalid ")
    assert not only(rank.effects, WriteShare) and not only(rank.effects, PublishCheckpoint)
    assert not rank.state.orders and not rank.state.ordered, "a rank that has refused can still be thawed"


def test_a_part_that_the_rank_does_not_hold_is_refused() -> None:
    rank = ProcessorBench()
    rank.freeze()
    rank.receive(replace(write_order(), parts=(Part("g0", 0, 2),)))
    assert rank.said(StepFailed)[0].error.startswith("invalid part")


def test_a_publish_order_with_another_steps_record_is_refused() -> None:
    rank = ProcessorBench()
    rank.freeze()
    rank.receive(replace(publish_order(), record=record(4)))
    assert rank.said(StepFailed)[0].error == "invalid record: got step 4, expected step 5, which is to be published"


def test_what_a_rank_may_write_is_what_it_registered_last() -> None:
    assert ProcessorBench().state.save_dirs == registration(1).save_dirs
    assert ProcessorBench().state.group_ids == {"g1"}
