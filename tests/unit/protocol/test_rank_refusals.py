"""Which orders a frozen rank refuses, and what it forgets when its gate opens: one rule each, on a state made for it."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from tests.unit.protocol.bench import record, share
from ttp.processor.core import freezes, orders, refusals
from ttp.processor.core.events import Log, ProcessorSettings, Send
from ttp.processor.core.state import LinkState, OpenOrder, ProcessorState, RankMode
from ttp.proto.messages import (
    Cause,
    CauseKind,
    CommitRecord,
    FaultReport,
    Part,
    PublishOrder,
    Regroup,
    RollForward,
    StepFailed,
    Thaw,
    WriteOrder,
    Written,
)

NOW, RANK, FREEZE, STEP = 100.0, 1, 4, 5
NAME = f"iter_{STEP:07d}_tmp_3_{FREEZE}_1"


def state_of(**changed: Any) -> ProcessorState:
    """Rank 1 behind its closed gate, with the state of step 5."""
    state = ProcessorState(
        ProcessorSettings(RANK, controller_lost_s=20.0),
        RankMode.FROZEN,
        LinkState.UP,
        reconnect_at=inf,
        lost_since=inf,
        term=1,
        freeze_id=FREEZE,
        gate_id=FREEZE,
        closed=True,
        state_step=STEP,
        save_dirs=("/a",),
        group_ids=frozenset({"g1"}),
    )
    return replace(state, **changed)


def write_order() -> WriteOrder:
    return WriteOrder(FREEZE, STEP, "/a", NAME, (Part("g1", 0, 1),))


def publish_order(directory: str = "/a") -> PublishOrder:
    return PublishOrder(FREEZE, STEP, directory, NAME, (), Cause(CauseKind.EXITED, (3,), ""), None, 3)


def regroup_order(**changed: Any) -> Regroup:
    return replace(Regroup(FREEZE, STEP, (3,), None), **changed)


# --- a record ---


@pytest.mark.parametrize("clip_factor", [0.0, 0.5, 1.0])
def test_a_clip_factor_from_0_to_1_is_taken(clip_factor: float) -> None:
    assert refusals.why_no_roll_forward(state_of(), replace(record(STEP), clip_factor=clip_factor)) == ""


@pytest.mark.parametrize("clip_factor", [-0.1, 1.1, nan])
def test_any_other_is_not(clip_factor: float) -> None:
    why = refusals.why_no_roll_forward(state_of(), replace(record(STEP), clip_factor=clip_factor))
    assert why == f"invalid record of step 5: got clip factor {clip_factor}, expected 0 to 1"


@pytest.mark.parametrize(("norm", "taken"), [(0.0, True), (-0.1, False), (nan, True)])
def test_a_gradient_norm_is_not_negative(norm: float, taken: bool) -> None:
    assert (refusals.why_no_roll_forward(state_of(), replace(record(STEP), grad_norm=norm)) == "") is taken


def test_only_the_record_that_this_rank_holds_of_the_step_is_taken() -> None:
    held = replace(record(STEP), grad_norm=nan)
    state = state_of(records=(record(STEP - 1), held))
    assert refusals.why_no_roll_forward(state, replace(record(STEP), grad_norm=nan)) == "", "NaN is not equal to itself"
    assert "which this rank holds" in refusals.why_no_roll_forward(state, record(STEP))
    assert refusals.why_no_roll_forward(state, record(STEP + 1)) == "", "it holds none of that step"


# --- an order to regroup ---


def test_a_rank_regroups() -> None:
    assert refusals.why_no_regroup(state_of(), regroup_order()) == ""
    assert refusals.why_no_regroup(state_of(), regroup_order(record=record(STEP))) == ""
    held = state_of(records=(record(STEP - 1), record(STEP)))
    assert refusals.why_no_regroup(held, regroup_order(record=record(STEP))) == ""
    assert refusals.why_no_regroup(held, regroup_order()) == "", "no rank has reported one"
    assert refusals.why_no_regroup(state_of(ordered=FREEZE), regroup_order()) == "", (
        "this freeze has published the step"
    )


@pytest.mark.parametrize(
    "changed",
    [
        dict(ordered=FREEZE - 1),
        dict(orders=(OpenOrder(write_order()),)),
        dict(applying=record(STEP)),
        dict(finished=True),
        dict(alone=True),
    ],
    ids=str,
)
def test_a_rank_that_is_at_something_else_does_not(changed: dict[str, Any]) -> None:
    why = refusals.why_no_regroup(state_of(**changed), regroup_order())
    assert why == "this rank writes, rolls forward or has finished: its training cannot be entered again"


def test_the_record_is_of_the_step_and_the_one_that_this_rank_holds() -> None:
    assert "got step 6, expected step 5" in refusals.why_no_regroup(state_of(), regroup_order(record=record(STEP + 1)))
    other = replace(record(STEP), clip_factor=0.5)
    held = state_of(records=(other,))
    assert "which this rank holds" in refusals.why_no_regroup(held, regroup_order(record=record(STEP)))
    earlier = state_of(records=(replace(record(STEP - 1), clip_factor=0.5),))
    assert refusals.why_no_regroup(earlier, regroup_order(record=record(STEP))) == ""


@pytest.mark.parametrize("changed", [dict(closed=False), dict(torn=True), dict(state_step=STEP - 1)], ids=str)
def test_the_state_is_that_of_the_step(changed: dict[str, Any]) -> None:
    assert refusals.why_no_regroup(state_of(**changed), regroup_order()).startswith("the state: got step")


def test_only_a_replaced_rank_comes_without_a_state() -> None:
    vacant = state_of(vacant=True, closed=False, state_step=0)
    assert refusals.why_no_regroup(vacant, regroup_order(replaced=(RANK,))) == ""
    assert "expected this one to be among them" in refusals.why_no_regroup(vacant, regroup_order())
    assert "expected this one to be not among them" in refusals.why_no_regroup(
        state_of(), regroup_order(replaced=(RANK,))
    )


def test_an_order_that_failed_is_answered_again_and_another_one_is_not() -> None:
    failed = state_of(regrouping=regroup_order(), regroup_error="no peer came")
    out: list[Any] = []
    assert orders.regroup(failed, regroup_order(), NOW, out) is failed
    assert out == [Send(StepFailed(RANK, FREEZE, "regroup", "", "no peer came"))]
    out.clear()
    assert orders.regroup(failed, regroup_order(saved=True), NOW, out) is failed
    assert out == []


def test_a_rank_that_leaves_its_step_is_not_rolled_forward() -> None:
    out: list[Any] = []
    state = state_of(regrouping=regroup_order())
    assert orders.roll_forward(state, RollForward(FREEZE, record(STEP + 1)), NOW, out) is state
    assert [effect.message.error for effect in out] == [
        "the training thread has left the step, to make its groups again"
    ]


# --- orders to write and to publish ---


@pytest.mark.parametrize(
    ("take", "order", "stage"),
    [
        (orders.write, replace(write_order(), directory="/b"), "write"),
        (orders.publish, publish_order("/b"), "publish"),
    ],
)
def test_a_refused_order_is_named(take: Any, order: WriteOrder | PublishOrder, stage: str) -> None:
    out: list[Any] = []
    state = state_of()
    assert take(state, order, NOW, out) is state
    why = "invalid directory: got '/b', expected one of this rank's, ['/a']"
    assert out == [Log(f"{stage} refused: {why}"), Send(StepFailed(RANK, FREEZE, stage, NAME, why))]


@pytest.mark.parametrize(
    ("published", "why"),
    [
        (None, ""),
        (record(STEP), ""),
        (record(STEP + 1), "invalid record: got step 6, expected step 5, which is to be published"),
    ],
)
def test_a_step_is_published_with_its_own_record_or_with_none(published: CommitRecord | None, why: str) -> None:
    assert refusals.why_no_order(state_of(), replace(publish_order(), record=published)) == why


def test_the_first_orders_freeze_is_remembered() -> None:
    out: list[Any] = []
    first = orders.write(state_of(), write_order(), NOW, out)
    assert first.ordered == FREEZE
    later = orders.write(state_of(ordered=FREEZE - 1), write_order(), NOW, out)
    assert later.ordered == FREEZE - 1, "an earlier controller's order may be under way still"


# --- a gate that opens ---


def thawed(**changed: Any) -> tuple[ProcessorState, list[Any]]:
    out: list[Any] = []
    return freezes.thaw(state_of(**changed), Thaw(FREEZE), NOW, out), out


def test_an_open_gate_has_nothing_of_the_freeze() -> None:
    written = OpenOrder(write_order(), Written(RANK, FREEZE, NAME, write_order().parts, share(RANK)))
    after, _ = thawed(torn=True, orders=(written,), ordered=FREEZE)
    assert after.standing is RankMode.TRAINING
    assert (after.closed, after.torn, after.orders, after.ordered, after.answer_by) == (False, False, (), 0, inf)


def test_a_fault_that_no_controller_has_answered_is_reported_again_and_has_its_time() -> None:
    fault = FaultReport(RANK, Cause(CauseKind.EXCEPTION, (RANK,), "boom"), "")
    after, out = thawed(faults=(fault,))
    assert Send(fault) in out
    assert after.answer_by == NOW + 20.0
