"""What a message may carry: a value past its bounds is refused with nothing changed, and what is kept is bounded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.protocol.bench import ControllerBench, ProcessorBench, record, registration, report, share
from ttp.controller.state import MOST_KEPT
from ttp.errors import ProtocolError
from ttp.proto.limits import LAST_STEP, MOST_ADDRESSES, MOST_RECORDS
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
    Published,
    PublishOrder,
    RolledForward,
    RollForward,
    ShareResult,
    StepFailed,
    Successors,
    Thaw,
    Welcome,
    WorkerExit,
    Working,
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
    replace(registration(1), controllers=("a",) * (MOST_ADDRESSES + 1)),
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
    Working(1, -2),
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
    Successors(("a",), -1.0),
    Successors(("a",) * (MOST_ADDRESSES + 1), 1.0),
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
            bench.hear(message)
        assert bench.state is before


def test_what_is_kept_of_a_fault_and_of_a_job_is_bounded() -> None:
    """A rank that reports without end fills no memory."""
    bench = ControllerBench()
    bench.say(WorkerExit(2, 102, "signal SIGKILL", 0.0))
    for number in range(MOST_KEPT + 50):
        bench.say(FaultReport(1, Cause(CauseKind.EXCEPTION, (1,), f"{number}"), ""))
    assert bench.state.fault is not None and len(bench.state.fault.causes) == MOST_KEPT + 4
    bench = ControllerBench()
    for number in range(0, 2000, 500):
        bench.say(replace(registration(1), controllers=tuple(f"h:{n}" for n in range(number, number + 500))))
    assert len(bench.state.successors) == MOST_ADDRESSES
    for number in range(MOST_KEPT + 4):
        bench.say(AgentHello(f"h{number}", (1,), (101,)))
    with pytest.raises(ProtocolError, match="hosts already, expected at most"):
        bench.say(AgentHello("one more", (1,), (101,)))
