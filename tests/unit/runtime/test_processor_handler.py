"""The processor's handler, with a machine, ports and a gate of the test: which stream counts, and which closing of the gate."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ttp.processor import gate as shipped
from ttp.processor.core.events import (
    CloseGate,
    Connect,
    Connected,
    Disconnected,
    Effect,
    Event,
    ExitProcess,
    GateClosed,
    LocalFault,
    OpenGate,
    ProcessorSettings,
    Received,
    Send,
    Tick,
    TrainReturned,
)
from ttp.processor.handler import Closed, Handler, Incoming, Opened, Stop
from ttp.processor.worker import Reopen, Settle
from ttp.proto.codec import CodecError, DownwardParcel
from ttp.proto.messages import Cause, CauseKind, Downward, Finished, Heartbeat, Phase, StateReport, Thaw

HELD = StateReport(0, 1, True, Phase.DONE, 3, 3, False, -1, ())
NOT_HELD = replace(HELD, closed=False)


class Stream:
    """One stream to a controller."""

    def __init__(self, term: int = 1) -> None:
        self.term, self.refused = term, False
        self.sent: list[Any] = []
        self.closes: list[float] = []
        self.cannot_carry = False

    def send(self, message: Any) -> None:
        if self.cannot_carry:
            raise CodecError("too long")
        self.sent.append(message)

    def close(self, drain_s: float = 0.0) -> None:
        self.closes.append(drain_s)


class Gate:
    """A gate whose closings get the numbers 1, 2 and so on, and that settles as the test says."""

    phase, step, waiting, drain_error = Phase.DONE, 3, False, ""

    def __init__(self) -> None:
        self.freeze_id = 0
        self.tickets = 0
        self.report = HELD
        self.settled: list[int] = []
        self.on_step: Callable[[], None] = lambda: None
        self.on_wait: Callable[[bool], None] = lambda waits: None

    def shut(self, freeze_id: int) -> int:
        self.freeze_id = freeze_id
        self.tickets += 1
        return self.tickets

    def settle(self, ticket: int, freeze_id: int, timeout_s: float) -> StateReport:
        self.settled.append(ticket)
        return replace(self.report, freeze_id=freeze_id)


class Bench:
    """A handler whose machine orders what the test says; it is its ports as well."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.received: list[Event] = []
        self.orders: Sequence[Effect] = ()
        self.gate = Gate()
        self.put_back: list[Any] = []
        self.tasks: list[Any] = []
        self.opened: list[tuple[Any, int]] = []
        self.left: list[int] = []
        self.lost = ""
        self.said: list[tuple[int, str]] = []
        self.put = self.put_back.append
        self.submit = self.tasks.append
        gate: Any = self.gate
        settings = ProcessorSettings(rank=0, heartbeat_s=0.2, reconnect_s=0.05)
        ports: Any = self
        self.handler = Handler(settings, self.first, gate, ports, machine=self, clock=lambda: self.now)  # type: ignore[arg-type]
        self.settings = settings
        self.handler.begin()

    def first(self) -> str:
        """Return the first controller's address."""
        return "c0"

    # the machine

    def initial(self, settings: ProcessorSettings, now: float) -> None: ...

    def next_deadline(self, state: Any) -> None: ...

    def transition(self, state: Any, event: Event, now: float) -> tuple[Any, Sequence[Effect]]:
        self.received.append(event)
        return None, self.orders

    # the ports

    def open_stream(self, address: Any, fence: int) -> Stream:
        self.opened.append((address, fence))
        return Stream()

    def registration(self) -> Any:
        return "the registration"

    def paused(self) -> bool:
        return False

    def work_done(self) -> int:
        return 0

    def checkpoint(self) -> str:
        return "/c/iter_0000003"

    def lost_parent(self) -> str:
        lost, self.lost = self.lost, ""
        return lost

    def welcomed(self, welcome: Any) -> None: ...

    def leave(self, code: int, reason: str) -> None:
        self.left.append(code)

    def log(self, level: int, text: str) -> None:
        self.said.append((level, text))

    # what the tests do

    def does(self, *effects: Effect) -> None:
        """Have the machine order these, once."""
        self.orders = effects
        self.handler.take(TrainReturned())
        self.orders = ()

    def connects(self, address: str = "c1", term: int = 1) -> Stream:
        """Return the stream that is on now, open."""
        self.does(Connect(address))
        stream: Any = self.handler.stream
        stream.term = term
        self.handler.take(Opened(stream))
        assert isinstance(stream, Stream)
        return stream

    def closings(self) -> list[StateReport]:
        """Return what the machine has received from the gate."""
        return [event.report for event in self.received if isinstance(event, GateClosed)]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_new_stream_takes_the_place_of_the_one_before_which_is_closed(bench: Bench) -> None:
    """It is not open before its greeting: the term is not known, and nothing is sent."""
    old = bench.connects()
    bench.does(Connect("c2"))
    new: Any = bench.handler.stream
    assert old.closes == [0.0] and new is not old
    bench.does(Send(Finished(0)))
    assert old.sent == [] and new.sent == []
    bench.handler.take(Opened(new))
    bench.does(Send(Finished(0)))
    assert new.sent == [Finished(0)] and old.sent == []


def test_a_stream_that_was_given_up_opens_brings_and_ends_nothing(bench: Bench) -> None:
    old = bench.connects()
    new = bench.connects()
    before = list(bench.received)
    bench.does(Connect("c3"))
    third: Any = bench.handler.stream
    assert third is not new
    for stream in (old, new):
        bench.handler.take(Opened(stream))
        bench.handler.take(Incoming(stream, DownwardParcel("job", 1, (0,), Thaw(1))))
        bench.handler.take(Closed(stream, "noticed late"))
    assert bench.received == [*before, TrainReturned()]
    now: Any = bench.handler.stream
    assert now is third
    bench.does(Send(Finished(0)))
    assert now.sent == []


def test_a_lower_term_does_not_take_the_fence_down(bench: Bench) -> None:
    bench.connects(term=5)
    bench.connects(term=3)
    bench.connects()
    assert [fence for _, fence in bench.opened] == [0, 5, 5]


def test_the_end_of_the_stream_says_whether_its_controller_is_gone_for_good(bench: Bench) -> None:
    for refused in (False, True):
        stream = bench.connects()
        stream.refused = refused
        bench.handler.take(Closed(stream, "reset"))
        assert bench.received[-1] == Disconnected("reset", refused) and bench.handler.stream is None
    registration: Any = "the registration"
    assert Connected(registration) in bench.received


@pytest.mark.parametrize(("ranks", "mine"), [((0,), True), ((0, 1), True), ((), True), ((1,), False)])
def test_what_is_addressed_to_others_on_the_same_stream_is_not_this_ranks(
    bench: Bench, ranks: tuple[int, ...], mine: bool
) -> None:
    stream: Any = bench.connects()
    message: Downward = Thaw(1)
    bench.handler.take(Incoming(stream, DownwardParcel("job", 1, ranks, message)))
    assert (Received(message) in bench.received) is mine


def test_the_first_controller_is_asked_for_anew_and_others_are_found_by_their_name(bench: Bench) -> None:
    """Where the first one is may become known late."""
    led: list[Any] = []
    for address in (bench.settings.address, "c1"):
        bench.does(Connect(address))
        led.append(bench.handler.controller)
    assert led == [address for address, _ in bench.opened] == [bench.first, "c1"]


def test_nothing_is_done_after_the_order_to_leave(bench: Bench) -> None:
    stream = bench.connects()
    bench.does(Send(Finished(0)), ExitProcess(75, "step 3 is saved"), Send(Finished(0)), ExitProcess(1, "again"))
    assert stream.sent == [Finished(0)] and bench.left == [75] and not bench.handler.running


def test_what_the_wire_cannot_carry_is_said_and_the_rest_goes_on(bench: Bench) -> None:
    stream = bench.connects()
    stream.cannot_carry = True
    bench.does(Send(Finished(0)), CloseGate(1))
    assert (logging.ERROR, "too long") in bench.said and bench.gate.freeze_id == 1


def test_the_stream_is_drained_at_the_end(bench: Bench) -> None:
    stream = bench.connects()
    bench.handler.take(Stop())
    bench.handler.close_stream(1.5)
    assert stream.closes == [1.5] and not bench.handler.running


def test_a_freeze_that_finds_no_update_is_answered_behind_what_is_queued_without_the_work_thread(bench: Bench) -> None:
    """With the newest checkpoint that this rank knows."""
    bench.does(CloseGate(1))
    (event,) = bench.put_back
    assert event == GateClosed(HELD) and bench.tasks == [] and bench.closings() == []
    bench.handler.take(event)
    assert bench.closings() == [replace(HELD, checkpoint="/c/iter_0000003")]


def test_a_freeze_that_must_wait_is_answered_by_the_work_thread(bench: Bench) -> None:
    bench.gate.report = NOT_HELD
    bench.does(CloseGate(1))
    assert bench.put_back == [] and bench.tasks == [Settle(1, 1)] and bench.gate.settled == [1]


def test_a_freeze_on_a_device_is_answered_as_soon_as_the_device_has_finished_the_update(bench: Bench) -> None:
    """Whatever the work thread is at: behind a closed gate it may write for longer than a new controller waits for the report."""
    finished = False
    gate: Any = shipped.Gate(0, drain=lambda timeout_s: finished)
    bench.handler._gate = gate
    bench.does(CloseGate(1))
    assert bench.put_back == [] and bench.tasks == [Settle(1, 1)], "the update is waited for on the work thread"
    finished = True
    bench.does(CloseGate(2))
    (event,) = bench.put_back
    assert (event.report.freeze_id, event.report.closed) == (2, True) and bench.tasks == [Settle(1, 1)]


def test_a_device_that_failed_is_logged_where_the_handler_answers_the_freeze(bench: Bench) -> None:
    bench.does(CloseGate(1))
    assert bench.said == []
    bench.gate.drain_error = "device lost"
    bench.does(CloseGate(2))
    bench.gate.report = NOT_HELD
    bench.does(CloseGate(3))
    bench.handler.take(GateClosed(replace(NOT_HELD, freeze_id=3)))
    bench.gate.report = HELD
    bench.handler.tick()
    failed = [text for level, text in bench.said if level == logging.ERROR]
    assert failed == [f"freeze {freeze_id}: the device failed: device lost" for freeze_id in (2, 3)]


def test_an_update_that_outlasts_its_freeze_is_reported_once_it_ends_and_once(bench: Bench) -> None:
    bench.gate.report = NOT_HELD
    bench.does(CloseGate(1))
    bench.handler.take(GateClosed(NOT_HELD))
    bench.handler.tick()
    assert [report.closed for report in bench.closings()] == [False]
    bench.gate.report = HELD
    for _ in range(3):
        bench.handler.tick()
    assert [report.closed for report in bench.closings()] == [False, True]
    assert isinstance(bench.received[-1], Tick)


@pytest.mark.parametrize("what", ["opened", "closed anew", "answered late"])
def test_an_update_of_a_freeze_that_is_over_is_not_reported(bench: Bench, what: str) -> None:
    """The gate's state is another freeze's then, or no rank's."""
    bench.gate.report = NOT_HELD
    bench.does(CloseGate(1))
    if what == "answered late":
        bench.does(CloseGate(2))
    bench.handler.take(GateClosed(NOT_HELD))
    if what == "opened":
        bench.does(OpenGate(1))
        assert bench.tasks[-1] == Reopen(1)
    elif what == "closed anew":
        bench.does(CloseGate(2))
    bench.gate.report = HELD
    bench.gate.settled.clear()
    bench.handler.tick()
    assert bench.gate.settled == [] and [report.closed for report in bench.closings()] == [False]


def test_a_step_that_a_freeze_interrupted_is_not_timed(bench: Bench) -> None:
    """It would pass for a slow one."""
    discarded: list[str] = []
    steps: Any = SimpleNamespace(discard=lambda: discarded.append("once"), done=(0, ()))
    bench.handler.steps = steps
    bench.does(CloseGate(1))
    assert discarded == []
    bench.does(OpenGate(1))
    assert discarded == ["once"]


def test_a_lost_launcher_is_this_ranks_fault_and_the_tick_follows(bench: Bench) -> None:
    bench.lost = "the launcher (pid 7) is gone"
    bench.handler.tick()
    bench.handler.tick()
    fault, *ticks = bench.received
    assert fault == LocalFault(Cause(CauseKind.AGENT_LOST, (0,), "the launcher (pid 7) is gone"), "")
    assert [type(event) for event in ticks] == [Tick, Tick]


def test_a_failure_of_the_machine_costs_one_item(bench: Bench) -> None:
    """The thread is the rank's protection."""

    def fails(state: Any, event: Event, now: float) -> Any:
        raise RuntimeError("a bug")

    works = bench.transition
    bench.transition = fails  # type: ignore[method-assign]
    bench.does(CloseGate(1))
    bench.transition = works  # type: ignore[method-assign]
    bench.does(CloseGate(2))
    assert bench.gate.freeze_id == 2 and bench.handler.running
    ((level, text),) = bench.said
    assert level == logging.ERROR and "the processor's machine failed on TrainReturned" in text and "a bug" in text


def test_a_heartbeat_has_where_the_time_went_and_the_loss_that_was_reported_since_the_last(bench: Bench) -> None:
    """No machine knows of them. A loss may be any number, and is said once."""
    stream, plain = bench.connects(), Heartbeat(0, Phase.COMPUTE, 3)
    steps = bench.handler.steps
    bench.does(Send(plain))
    steps.finish(1.0)
    bench.now = 2.0
    bench.gate.on_wait(True)
    bench.now = 5.0
    bench.gate.on_wait(False)
    steps.finish(6.0)
    bench.handler.loss = math.inf
    bench.does(Send(plain), Send(plain), Send(Finished(0)))
    expected = replace(plain, own_s=2.0, waited_s=3.0, loss=math.inf)
    assert stream.sent[-4:] == [plain, expected, plain, Finished(0)]
