"""What a message may carry: a value past its bounds is refused with nothing changed, and what is kept is bounded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.protocol.bench import ControllerBench, ProcessorBench, record, registration, report, share
from ttp.controller.core.dump import publishing, writing
from ttp.controller.core.facts.state import MOST_KEPT, Stage
from ttp.errors import ProtocolError
from ttp.processor.core.events import Connected, Disconnected
from ttp.processor.core.failover import controllers
from ttp.proto.limits import LAST_STEP, MOST_ADDRESSES, MOST_RECORDS, check_upward
from ttp.proto.messages import (
    AgentHello,
    Cause,
    CauseKind,
    Exit,
    FaultReport,
    FileEntry,
    Freeze,
    Heartbeat,
    Part,
    Phase,
    Progress,
    Published,
    PublishOrder,
    Registration,
    Regroup,
    Regrouped,
    ReplaceFailed,
    RolledForward,
    RollForward,
    ShareResult,
    StandbyList,
    StandbyReport,
    StepFailed,
    Thaw,
    Welcome,
    WorkerExit,
    WriteOrder,
    Written,
)

CAUSE = Cause(CauseKind.EXITED, (0,), "x")
NAN = float("nan")
UPWARD: list[Any] = [
    Heartbeat(1, Phase.COMPUTE, -1),
    Heartbeat(1, Phase.COMPUTE, LAST_STEP + 1),
    Heartbeat(1, Phase.COMPUTE, 5, frozen=-1),
    Heartbeat(1, Phase.COMPUTE, 5, steps=LAST_STEP + 1),
    Heartbeat(1, Phase.COMPUTE, 5, step_times_s=(NAN,)),
    replace(registration(1), state_step=2**63 - 1),
    replace(registration(1), state_step=-1),
    replace(registration(1), step_times_s=(0.1, NAN)),
    replace(registration(1), controllers=("a",) * (MOST_ADDRESSES + 2)),
    report(1, 1, Phase.READY, 2**60),
    replace(report(1, 1, Phase.READY, 5), backup_step=-2),
    replace(report(1, 1, Phase.READY, 5), records=(record(5),) * (MOST_RECORDS + 1)),
    FaultReport(1, Cause(CauseKind.EXCEPTION, (7,), "x"), ""),
    AgentHello("h", (1, 9), (1, 2)),
    AgentHello("h", (1, 2), (1,)),
    WorkerExit(1, 101, "x", NAN),
    RolledForward(1, 1, -5),
    Written(1, 1, "t", (Part("g", 2, 2),), share(1)),
    Written(1, 1, "t", (), ShareResult((FileEntry("../x", 1, "", 1),))),
    Written(1, 1, "t", (), ShareResult((FileEntry("x", -1, "", 1),))),
    Written(1, 1, "t", (), ShareResult((FileEntry("x", 1, "", 9),))),
    Published(1, 1, 2**62, "/a"),
    StepFailed(1, 2**60, "write", "t", "x", ()),
    Progress(1, -2),
    Regrouped(1, -2),
    Regrouped(1, LAST_STEP + 1),
    ReplaceFailed("h", 1, 2**60, "x"),
    replace(registration(1), vacant=-1),
    replace(registration(1), vacant=LAST_STEP + 1),
]  # fmt: skip
DOWNWARD: list[Any] = [
    Welcome(1, 3, 0.0, 3.0, ""),
    Welcome(1, 3, 1.0, NAN, ""),
    Freeze(-2, CAUSE),
    Thaw(LAST_STEP + 1),
    RollForward(1, record(2**60)),
    WriteOrder(1, 5, "/a", "t", (Part("g", -1, 2),)),
    PublishOrder(1, 5, "/a", "t", (ShareResult((FileEntry("..", 1, "", 0),)),), CAUSE, None, 3),
    PublishOrder(1, 5, "/a", "t", (), CAUSE, record(-1), 3),
    Exit(256, "x"),
    Regroup(-2, 5, (), None),
    Regroup(1, LAST_STEP + 1, (), None),
    Regroup(1, -1, (), None),
    Regroup(1, 5, (-1,), None),
    StandbyList(("a",), -1.0),
    StandbyList(("a",) * (MOST_ADDRESSES + 1), 1.0),
]


@pytest.mark.parametrize("message", UPWARD, ids=[f"{type(m).__name__}-{n}" for n, m in enumerate(UPWARD)])
def test_a_controller_refuses_a_value_past_its_bounds(message: Any) -> None:
    """In a running job and in one that freezes."""
    for frozen in (False, True):
        bench = ControllerBench()
        if frozen:
            bench.say(WorkerExit(2, 102, "signal SIGKILL", 0.0))
        before = bench.state
        with pytest.raises(ProtocolError, match=r": got .*, expected |is not allowed here"):
            bench.say(message)
        assert bench.state is before


@pytest.mark.parametrize("message", DOWNWARD, ids=[f"{type(m).__name__}-{n}" for n, m in enumerate(DOWNWARD)])
def test_a_processor_refuses_a_value_past_its_bounds(message: Any) -> None:
    """In training and behind a closed gate."""
    for frozen in (False, True):
        bench = ProcessorBench()
        if frozen:
            bench.freeze()
        before = bench.state
        with pytest.raises(ProtocolError, match=r": got .*, expected |is not allowed here"):
            bench.receive(message)
        assert bench.state is before


def test_what_is_kept_of_a_fault_and_of_a_job_is_bounded() -> None:
    """A rank that reports without end fills no memory."""
    bench = ControllerBench()
    bench.say(WorkerExit(2, 102, "signal SIGKILL", 0.0))
    for number in range(MOST_KEPT + 50):
        bench.say(FaultReport(1, Cause(CauseKind.EXCEPTION, (1,), f"{number}"), ""))
    assert bench.state.fault is not None and len(bench.state.fault.causes) == MOST_KEPT + 4
    assert len(bench.state.notes.signs) == MOST_KEPT + 4
    bench = ControllerBench()
    for number in range(0, 2000, 500):
        bench.say(replace(registration(1), controllers=tuple(f"h:{n}" for n in range(number, number + 500))))
    assert len(bench.state.successors) == MOST_ADDRESSES
    for number in range(MOST_KEPT + 4):
        bench.say(AgentHello(f"h{number}", (1,), (101,)))
    with pytest.raises(ProtocolError, match="hosts already, expected at most"):
        bench.say(AgentHello("one more", (1,), (101,)))


def test_a_rank_that_has_learned_of_as_many_controllers_as_it_keeps_can_still_register() -> None:
    """Its own list is as long as the ones that it may receive, and has the controller that it is with."""
    rank = ProcessorBench()
    for letter in "ab":
        rank.receive(StandbyList(tuple(f"{letter}:{number}" for number in range(MOST_ADDRESSES)), 1.0))
    assert len(rank.state.successors) == MOST_ADDRESSES and rank.state.successors[-1] == f"b:{MOST_ADDRESSES - 1}"
    rank.state = replace(rank.state, place=MOST_ADDRESSES)
    rank.receive(StandbyList(tuple(f"c:{number}" for number in range(MOST_ADDRESSES)), 1.0))
    assert len(rank.state.successors) == MOST_ADDRESSES and rank.state.successors[-1] == f"b:{MOST_ADDRESSES - 1}"
    assert controllers(rank.state)[rank.state.place] == f"b:{MOST_ADDRESSES - 1}"
    rank.take(Disconnected("the stream broke"))
    rank.take(Connected(registration(1)))
    (again,) = rank.said(Registration)
    assert len(again.controllers) == MOST_ADDRESSES + 1
    check_upward(again, 4)


def test_the_errors_that_are_kept_of_writes_that_fail_are_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every directory every write fails, and after that every publish: each error has its directory and its rank."""
    for module in (writing, publishing):
        monkeypatch.setattr(module, "MOST_KEPT", 4)
    roots = tuple(f"/{number}" for number in range(5))
    for fails in ("write", "publish"):
        bench = ControllerBench(assembled=False)
        bench.say(*(registration(rank, roots=roots) for rank in range(4)), WorkerExit(3, 103, "signal SIGKILL", 0.0))
        bench.all_report(7, ranks=(0, 1, 2))
        seen = 0
        while bench.at(Stage.WRITING) or bench.at(Stage.PUBLISHING):
            dump = bench.state.dump
            assert dump is not None and len(dump.errors) <= 4
            if fails == "publish" and bench.at(Stage.WRITING):
                bench.all_write({rank: work.orders[0] for rank, work in enumerate(dump.work) if work.orders})
                continue
            seen += 1
            rank = min(dump.publishers) if dump.publishers else dump.work.ranks(lambda work: bool(work.orders))[0]
            name = dump.order.tmp_name if dump.publishers and dump.order else dump.work[rank].orders[0].tmp_name
            bench.say(StepFailed(rank, 1, fails, name, f"error {seen}"))
        (refused,) = bench.logged("refused")
        assert seen > 5 and f"error {seen}" in refused["reason"] and "error 1;" not in refused["reason"]


def test_the_errors_that_are_kept_of_rounds_that_follow_each_other_are_the_newest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Files of one writer after the other ended short, and all is written anew each time."""
    for module in (writing, publishing):
        monkeypatch.setattr(module, "MOST_KEPT", 3)
    bench = ControllerBench(((0, 1, 2, 3),))
    bench.say(WorkerExit(3, 103, "signal SIGKILL", 0.0))
    for writer in (2, 1):
        bench.all_report(7, ranks=(0, 1, 2))
        bench.all_write(bench.orders())
        for publisher in (0, 1):
            freeze_id, dump = bench.state.freeze_id, bench.state.dump
            assert dump is not None and dump.order is not None
            error = f"file of {writer} is short for {publisher}"
            bench.say(StepFailed(publisher, freeze_id, "publish", dump.order.tmp_name, error, torn=(writer,)))
    assert bench.state.fault is not None and bench.at(Stage.FREEZING)
    kept = [error.rpartition(": ")[2] for error in bench.state.fault.errors]
    assert kept == ["file of 2 is short for 1", "file of 1 is short for 0", "file of 1 is short for 1"]


def test_standbys_that_were_lost_are_kept_up_to_a_number() -> None:
    bench = ControllerBench()
    for number in range(MOST_ADDRESSES + 20):
        bench.say(StandbyReport(1, f"h:{number}", False))
    assert len(bench.state.restoring.lost) == MOST_ADDRESSES == len(bench.logged("standby_lost"))
