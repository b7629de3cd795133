"""What the launcher makes of several signals."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException

from tests.unit.launch.test_agent import make_agent
from tests.waiting import until
from ttp.launch.agent import HoldAgent
from ttp.launch.attempts.signals import SAME_S, ShutdownSignals, without_ignored

DEADLINE_S = 30.0
NEVER_S = 3600.0
NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def torchs_handlers() -> Iterator[None]:
    """torch's agent has installed its handlers in this process."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise AssertionError("torch's own handler was called")

    handler.__module__ = SignalException.__module__
    before = {name: signal.signal(getattr(signal, name), handler) for name in NAMES}
    yield
    for name, kept in before.items():
        signal.signal(getattr(signal, name), kept)


@pytest.fixture
def clock(torchs_handlers: None) -> Clock:
    return Clock()


@pytest.fixture
def notices(clock: Clock) -> ShutdownSignals:
    made = ShutdownSignals(clock, NEVER_S)
    made.install()
    return made


def send(*names: str) -> None:
    for name in names:
        os.kill(os.getpid(), getattr(signal, name))


def given(notices: ShutdownSignals, name: str) -> None:
    with pytest.raises(SignalException) as raised:
        send(name)
    assert raised.value.sigval.name == notices.name == name


def await_words(caplog: pytest.LogCaptureFixture) -> None:
    until(lambda: "the workers are shutting down already" in caplog.text, "the line of a second signal")


@pytest.mark.parametrize("first", NAMES)
def test_signals_that_schedulers_send_are_one_notice_and_said_once(
    notices: ShutdownSignals, clock: Clock, caplog: pytest.LogCaptureFixture, first: str
) -> None:
    """SIGTERM twice, SIGTERM and SIGHUP, SIGINT and later SIGTERM: the shutdown is not disturbed."""
    caplog.set_level(logging.INFO, "ttp.launch")
    given(notices, first)
    with notices.leaving():
        for _ in range(3):
            clock.now_s += 5.0
            send("SIGTERM", "SIGHUP")
    clock.now_s += 5.0
    send("SIGTERM")
    await_words(caplog)
    assert caplog.text.count("the workers are shutting down already") == 1 and notices.name == first


@pytest.mark.parametrize("first", NAMES)
@pytest.mark.parametrize("second", ["SIGINT", "SIGQUIT"])
def test_a_second_signal_from_a_terminal_forces_the_end(
    notices: ShutdownSignals, clock: Clock, first: str, second: str
) -> None:
    """After whatever notice: a person is there who wants no more."""
    given(notices, first)
    clock.now_s += 2 * SAME_S
    with pytest.raises(SignalException) as raised, notices.leaving():
        send(second)
    assert raised.value.sigval.name == second


@pytest.mark.parametrize("second", NAMES)
def test_two_signals_at_once_are_one_whichever_they_are(notices: ShutdownSignals, clock: Clock, second: str) -> None:
    """Two equal ones may be one to the kernel as well; before and after the launcher has begun to end."""
    given(notices, "SIGINT")
    send(second)
    clock.now_s += SAME_S / 2
    with notices.leaving():
        send(second)


class Repeating(ShutdownSignals):
    """Counts how often it was seen whether the first signal was swallowed."""

    def __init__(self) -> None:
        super().__init__(lambda: self.now_s, 0.005)
        self.looked, self.now_s = 0, 100.0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.looked += self._repeats
        super()._handle(number, frame)


@pytest.mark.parametrize("name", NAMES)
def test_a_notice_that_a_library_has_swallowed_comes_again(
    torchs_handlers: None, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """logging prints what is raised within a line, and goes on. A scheduler sends its signal once."""
    notices, lines = Repeating(), []
    notices.install()

    class Line(logging.StreamHandler[Any]):
        def format(self, record: logging.LogRecord) -> str:
            send(name)
            lines.append("written")
            return "written"

    with pytest.raises(SignalException) as raised:
        Line().handle(logging.LogRecord("any", logging.INFO, "", 0, "any", None, None))
        lines.append("swallowed")
        until(lambda: False, "the notice again")
    assert raised.value.sigval.name == notices.name == name and lines == ["swallowed"] and not notices.forced
    assert "SignalException" in capsys.readouterr().err
    with notices.leaving():
        looked = notices.looked
    send(name)  # a second one, which is not mistaken for that
    assert looked == notices.looked and notices.forced is False


def test_a_notice_on_its_way_to_the_agent_is_not_raised_a_second_time(torchs_handlers: None) -> None:
    """What is closed on the way may take its time, and may fail."""
    notices, done = Repeating(), []
    notices.install()
    with pytest.raises(SignalException):
        try:
            send("SIGTERM")
        finally:
            looked = notices.looked
            until(lambda: notices.looked > looked + 3, "four looks while it is handled")
            try:
                raise OSError("a file that cannot be closed")
            except OSError:
                until(lambda: notices.looked > looked + 6, "four looks while that is handled")
            done.append("closed")
    assert done == ["closed"]
    with notices.leaving():
        pass


def test_a_notice_between_two_attempts_is_looked_after_when_the_next_one_begins(torchs_handlers: None) -> None:
    """Until then only another signal raises again."""
    notices = Repeating()
    notices.install()
    with notices.leaving():
        pass
    for _ in range(2):  # the first one, which was swallowed, and another
        with pytest.raises(SignalException):
            send("SIGTERM")
        notices.now_s += 2 * SAME_S
    until(notices._queue.empty, "the thread behind the first one")
    notices.install()
    with pytest.raises(SignalException):
        until(lambda: False, "the notice again")
    with notices.leaving():
        pass


def test_a_second_notice_behind_the_last_attempt_does_not_disturb_the_first(torchs_handlers: None) -> None:
    notices, done = Repeating(), []
    notices.install()
    with notices.leaving():
        pass
    with pytest.raises(SignalException):
        try:
            send("SIGTERM")
        finally:
            notices.now_s += 2 * SAME_S
            send("SIGTERM")
            done.append("closed")
    assert done == ["closed"]


def test_a_signal_that_cannot_be_sent_again_leaves_the_next_one_alone(notices: ShutdownSignals) -> None:
    """Another handler is there for a moment: torch's, as it starts workers."""
    given(notices, "SIGINT")
    own = signal.signal(signal.SIGINT, signal.SIG_IGN)
    notices._send(signal.SIGINT, repeats=True)
    assert not notices._repeats
    signal.signal(signal.SIGINT, own)
    with pytest.raises(SignalException):
        notices._send(signal.SIGINT, repeats=True)
        until(lambda: False, "the notice again")
    assert not notices.forced and not notices._repeats


def test_a_first_notice_while_workers_leave_for_another_reason_comes_out_afterwards(notices: ShutdownSignals) -> None:
    """Their shutdown is not disturbed, and the agent ends instead of restarting."""
    done = []
    with pytest.raises(SignalException) as raised, notices.leaving():
        send("SIGTERM")
        done.append("the workers have left")
    assert done and raised.value.sigval is signal.SIGTERM
    with notices.leaving():
        send("SIGTERM")


def test_a_notice_that_was_postponed_is_obeyed_and_not_raised_again(notices: ShutdownSignals, clock: Clock) -> None:
    """The scheduler's second SIGTERM comes while the agent shuts down; only a forcing signal interrupts that."""
    with pytest.raises(SignalException), notices.leaving():
        send("SIGTERM")
    clock.now_s += 2 * SAME_S
    send("SIGTERM", "SIGHUP")
    assert not notices.forced
    with pytest.raises(SignalException):
        send("SIGINT")
    assert notices.forced


def test_a_first_notice_as_leaving_begins_waits_until_the_workers_have_left(
    notices: ShutdownSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handlers for all signals are looked through first: that is long enough for one to come."""
    monkeypatch.setattr(notices, "install", lambda: send("SIGTERM"))
    done = []
    with pytest.raises(SignalException), notices.leaving():
        done.append("the workers have left")
    assert done and not notices.forced


@pytest.mark.parametrize("second", ["SIGINT", "SIGQUIT"])
def test_one_signal_forces_nothing_and_neither_do_two_at_once(
    notices: ShutdownSignals, clock: Clock, second: str
) -> None:
    """Ctrl-C once, or twice as one, ends no worker that saves; a later one does."""
    with pytest.raises(SignalException) as raised, notices.leaving():
        send("SIGINT", second)
        assert not notices.forced
        clock.now_s += 2 * SAME_S
        send(second)
    assert notices.forced and raised.value.sigval.name == second


def test_nohup_keeps_its_promise() -> None:
    """A SIGHUP that was ignored when the launcher began stays so, unless it is all that is to be handled."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert without_ignored("SIGTERM,SIGINT,SIGHUP,SIGQUIT") == "SIGTERM,SIGINT,SIGQUIT"
        assert without_ignored("SIGHUP") == "SIGHUP"
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert without_ignored("SIGTERM,SIGHUP") == "SIGTERM,SIGHUP"
    finally:
        signal.signal(signal.SIGHUP, before)


class Leaving:
    """Stands in for a round whose workers take their time, in which signals come."""

    fault = None

    def __init__(self, come: Callable[[], None], come_late: Callable[[], None] = lambda: None) -> None:
        self.come, self.come_late = come, come_late
        self.done: list[str] = []

    def living(self) -> list[int]:
        return [0, 1]

    def led_by_now(self) -> bool:
        return True

    def note_signal(self, name: str) -> None:
        self.done.append(f"signal {name}")

    def drain(self) -> None:
        self.come()
        self.done.append("left")

    def end_at_once(self) -> None:
        self.done.append("ended at once")

    def close(self, patient: bool, notice: Callable[[], str]) -> None:
        try:
            self.come_late()
        finally:
            self.done.append(f"closed{'' if patient else ' at once'}{notice() and ', ' + notice()}")


@pytest.fixture
def shut_down(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Callable[[HoldAgent, Leaving], None]:
    """Return what torch does at an attempt's end; signals are `later` than the first by more than a moment."""
    monkeypatch.setattr(LocalElasticAgent, "_shutdown", lambda self, *args, **kwargs: None)

    def end(agent: HoldAgent, attempt: Any) -> None:
        agent._attempt = attempt
        agent._shutdown(signal.SIGTERM)
        assert agent._attempt is None

    return end


def agent_of(clock: Clock, notices: ShutdownSignals | None = None) -> HoldAgent:
    agent = make_agent()
    agent._signals = notices or ShutdownSignals(clock, NEVER_S)
    agent._signals.install()
    return agent


def noticed(clock: Clock) -> HoldAgent:
    agent = agent_of(clock)
    given(agent._signals, "SIGTERM")
    clock.now_s += 1.0
    return agent


def test_a_second_notice_does_not_end_workers_that_are_saving(
    clock: Clock, shut_down: Callable[[HoldAgent, Leaving], None]
) -> None:
    """SIGHUP follows SIGTERM where systemd ends a session."""
    attempt = Leaving(lambda: send("SIGHUP", "SIGTERM"))
    shut_down(noticed(clock), attempt)
    assert attempt.done == ["signal SIGTERM", "left", "closed, SIGTERM"]


def test_ctrl_c_after_a_notice_ends_workers_at_once(
    clock: Clock, shut_down: Callable[[HoldAgent, Leaving], None]
) -> None:
    """torch raises its first signal again by itself."""
    attempt = Leaving(lambda: send("SIGINT"))
    shut_down(noticed(clock), attempt)
    assert attempt.done == ["signal SIGTERM", "ended at once", "closed at once, SIGTERM"]


def test_a_notice_at_an_attempts_end_is_not_lost(clock: Clock, shut_down: Callable[[HoldAgent, Leaving], None]) -> None:
    """The next attempt would follow."""
    agent = agent_of(clock)
    attempt = Leaving(lambda: send("SIGTERM"))
    attempt.living = lambda: [] if "left" in attempt.done else [0]  # type: ignore[method-assign]
    with pytest.raises(SignalException):
        shut_down(agent, attempt)
    assert attempt.done == ["left", "closed, SIGTERM"]


def test_ctrl_c_twice_at_an_attempts_end_ends_all_at_once(
    clock: Clock, shut_down: Callable[[HoldAgent, Leaving], None]
) -> None:
    """The first was a notice that had to wait; the second is a person who wants no more."""

    def come() -> None:
        send("SIGINT")
        clock.now_s += 2 * SAME_S
        send("SIGINT")

    attempt = Leaving(come)
    with pytest.raises(SignalException):
        shut_down(agent_of(clock), attempt)
    assert attempt.done == ["ended at once", "closed at once, SIGINT"]


def test_a_first_signal_before_the_drain_kills_no_worker(
    clock: Clock, shut_down: Callable[[HoldAgent, Leaving], None], caplog: pytest.LogCaptureFixture
) -> None:
    """It raises before the launcher has said that it is leaving: the workers have their time still, and then it comes out."""

    class Early(ShutdownSignals):
        @contextmanager
        def leaving(self) -> Iterator[None]:
            if not self.name:
                send("SIGTERM")
            with super().leaving():
                yield

    agent = agent_of(clock, Early(clock, NEVER_S))
    attempt = Leaving(lambda: None)
    with pytest.raises(SignalException) as raised:
        shut_down(agent, attempt)
    assert raised.value.sigval is signal.SIGTERM and agent._attempt is None
    assert attempt.done == ["signal SIGTERM", "left", "closed, SIGTERM"] and "second signal" not in caplog.text


def test_a_first_notice_while_an_attempt_is_closed_comes_out_afterwards(
    clock: Clock, shut_down: Callable[[HoldAgent, Leaving], None]
) -> None:
    """Other nodes' ranks may be writing under this node's controller, and none of its own remain."""

    def come_late() -> None:
        send("SIGTERM")
        attempt.done.append("waited")

    attempt = Leaving(lambda: None, come_late)
    with pytest.raises(SignalException) as raised:
        shut_down(agent_of(clock), attempt)
    assert raised.value.sigval is signal.SIGTERM and attempt.done == ["left", "waited", "closed, SIGTERM"]


@pytest.mark.parametrize("second", ["SIGINT", "SIGQUIT"])
def test_a_forcing_signal_interrupts_the_close_of_an_attempt(
    clock: Clock, shut_down: Callable[[HoldAgent, Leaving], None], second: str
) -> None:
    """Whether the notice came before or only now."""
    for agent, sent in ((noticed(clock), [second]), (agent_of(clock), ["SIGTERM", second])):

        def come_late(sent: list[str] = sent) -> None:
            for name in sent:
                clock.now_s += 2 * SAME_S
                send(name)
            raise AssertionError("it was not interrupted")

        with pytest.raises(SignalException) as raised:
            shut_down(agent, Leaving(lambda: None, come_late))
        assert raised.value.sigval.name == second


class HalfTaken:
    """Stands in for the lock of a Condition; a signal comes as it is taken."""

    def __init__(self) -> None:
        self.acquire = self.release = self.__exit__ = lambda *args: True
        self.__enter__ = partial(signal.raise_signal, signal.SIGTERM)


def test_a_signal_does_not_come_out_half_way_into_a_lock(notices: ShutdownSignals) -> None:
    """The lock would be taken for good: the launcher's threads would wait for it, and the launcher for them."""
    condition, done = threading.Condition(HalfTaken()), []  # type: ignore[arg-type]
    with pytest.raises(SignalException, match="SIGTERM"):
        with condition:
            done.append("entered")
        done.append("left")
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            time.sleep(0.01)
    assert done == ["entered", "left"] and notices.name == "SIGTERM"
