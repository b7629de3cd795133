"""The launcher's line on streams and a clock of the test: whose messages count, when it goes on to the next controller, what is sent."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from ttp.controller import agent_link
from ttp.controller.agent_link import AgentLink
from ttp.proto.codec import CodecError, DownwardParcel
from ttp.proto.messages import (
    NO_PROCESS,
    AgentHello,
    Cause,
    CauseKind,
    Downward,
    Exit,
    Freeze,
    KeepAlive,
    Replace,
    ReplaceFailed,
    StandbyList,
    TakePlaces,
    Thaw,
    Vouch,
    WorkerExit,
)

from .conftest import LONG_S, until

LEASE_S = 3.0
HELLO = AgentHello("host", (0, 1), (100, 101))
SENT_AWAY = Exit(75, "step 7 is saved")


class Stream:
    """One stream of the line. The test says what comes; a closed one reports its end at once, as a broken one does."""

    def __init__(self, bench: Bench, address: str, line: AgentLink, fence: int, greeting_s: float) -> None:
        self._bench, self._line, self.greeting_s = bench, line, greeting_s
        self.address, self.fence = address, fence
        self.term = 0
        self.refused = False
        self.sent: list[Any] = []
        self.closes: list[float] = []
        self._over = False

    def start(self) -> None:
        self._bench.started.put(self)

    def send(self, *messages: Any) -> None:
        if self._bench.cannot_carry:
            raise CodecError("too long")
        self.sent += messages

    def close(self, drain_s: float = 0.0) -> None:
        self.closes.append(drain_s)
        self.breaks()

    def opens(self, term: int = 1) -> None:
        self._bench.now += 0.001
        self.term = term
        self._line.stream_opened(self)  # type: ignore[arg-type]

    def brings(self, message: Downward) -> None:
        self._line.stream_received(self, DownwardParcel("job", self.term, (0, 1), message))  # type: ignore[arg-type]

    def breaks(self, *, refused: bool = False) -> None:
        """End, once."""
        over, self._over = self._over, True
        if not over:
            self.refused = refused
            self._line.stream_closed(self, "over")  # type: ignore[arg-type]


class Bench:
    """A line whose streams and clock are the test's."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.looks = 0
        """So often was the clock read."""
        self.started: queue.SimpleQueue[Stream] = queue.SimpleQueue()
        self.cannot_carry = False
        self.runs: Mapping[int, int] = {}
        self.orders: list[Replace | TakePlaces | Thaw] = []
        self.line: AgentLink

    def monotonic(self) -> float:
        self.looks += 1
        return self.now

    def make_stream(self, address: str, job_id: str, line: AgentLink, *, fence: int, greeting_s: float) -> Stream:
        return Stream(self, address, line, fence, greeting_s)

    def next(self) -> Stream:
        """Return the stream that the line has started after those before."""
        return self.started.get(timeout=LONG_S)

    def looked(self) -> None:
        """Wait until the line has looked several times with the clock as it is now."""
        seen = self.looks
        until(lambda: self.looks > seen + 5 or not self.started.empty(), "a look at the clock")

    def passes(self, seconds: float) -> None:
        """Let time pass, as it does for a launcher that is not stopped."""
        for _ in range(int(seconds / 0.5)):
            self.now += 0.5
            self.looked()

    def opened(self) -> Stream:
        """Return the next stream, open, with a controller on it that has granted a lease and named one that follows."""
        stream = self.next()
        stream.opens()
        stream.brings(StandbyList(("c1",), LEASE_S))
        return stream


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench()
    monkeypatch.setattr(agent_link, "ControlStream", made.make_stream)
    monkeypatch.setattr(agent_link, "time", SimpleNamespace(monotonic=made.monotonic, time=lambda: 0.0))
    monkeypatch.setattr(agent_link, "LOOK_S", 0.002)
    monkeypatch.setattr(agent_link, "RECONNECT_S", 0.002)
    made.line = AgentLink("c0", "job", "host", (0, 1), (100, 101), lambda: made.runs, made.orders.append)
    yield made
    made.line.close()
    assert not made.line._thread.is_alive()


def test_what_a_stream_that_is_over_says_late_is_not_used(bench: Bench) -> None:
    """Neither its greeting, nor a message, nor its end: a new stream is on the line, and has not been greeted."""
    old = bench.next()
    old.breaks()
    new = bench.next()
    old.opens()
    old.brings(SENT_AWAY)
    assert not bench.line.attached and bench.line.sent_away_monotonic_s is None
    assert old.sent == [] and new.sent == []
    new.opens()
    new.brings(KeepAlive())
    bench.line.stream_closed(old, "noticed late")  # type: ignore[arg-type]
    assert bench.line.attached


def test_nothing_is_sent_before_the_greeting_and_the_deaths_of_until_then_follow_it(bench: Bench) -> None:
    """The term is not known before: the controller would end the stream."""
    bench.runs = {0: 100}
    stream = bench.next()
    bench.line.worker_exit(1, 101, "signal SIGKILL")
    bench.looked()
    assert stream.sent == []
    stream.opens()
    assert stream.sent[:2] == [HELLO, WorkerExit(1, 101, "signal SIGKILL", 0.0)]
    bench.line.worker_exit(0, 100, "exit code 1")
    assert stream.sent.count(WorkerExit(0, 100, "exit code 1", 0.0)) == 1


def test_a_new_stream_is_led_only_once_its_controller_has_said_something(bench: Bench) -> None:
    """The one before was led; at the other end of this one may be a standby that no rank has come to."""
    first = bench.opened()
    assert bench.line.attached
    first.breaks()
    second = bench.next()
    second.opens()
    assert not bench.line.attached
    second.brings(KeepAlive())
    assert bench.line.attached


def test_every_new_stream_brings_a_vouch_at_once(bench: Bench) -> None:
    """Its controller may have taken over a moment ago, and know nothing of the one before."""
    bench.runs = {0: 100}
    for _ in range(2):
        stream = bench.opened()
        until(lambda stream=stream: Vouch((0, 1), (100, NO_PROCESS)) in stream.sent, "a vouch")  # type: ignore[misc]
        stream.breaks()


def test_a_long_lease_makes_vouches_rare_and_the_next_controllers_greeting_may_take_as_long(bench: Bench) -> None:
    """As in a job of 10,000 ranks: a controller that takes over has all their handshakes to do."""
    bench.runs = {0: 100}
    stream = bench.next()
    assert stream.greeting_s == 5.0 and bench.line.lease_s == 0.0, "no controller has said yet what its lease is"
    stream.opens()
    stream.brings(StandbyList(("c1",), 15.0))
    assert bench.line.lease_s == 15.0
    until(lambda: Vouch((0, 1), (100, NO_PROCESS)) in stream.sent, "a vouch")
    bench.passes(1.5)  # where one was on its way before the lease was known
    before = len(stream.sent)
    for _ in range(2):
        bench.passes(4.0)
        stream.brings(KeepAlive())
    bench.passes(3.0)
    assert len(stream.sent) - before == 2, "three a lease"
    stream.breaks()
    assert bench.next().greeting_s == 15.0


def test_an_agent_reports_also_where_none_of_its_processes_runs(bench: Bench) -> None:
    """Its node is not lost: it may have to ask which ranks it may kill."""
    bench.runs = {}
    stream = bench.opened()
    until(lambda: Vouch((0, 1), (NO_PROCESS, NO_PROCESS)) in stream.sent, "a vouch")


def test_the_cause_of_the_newest_freeze_is_known(bench: Bench) -> None:
    stream = bench.opened()
    assert bench.line.frozen_by is None
    for kind in (CauseKind.SILENT, CauseKind.PREEMPTED):
        stream.brings(Freeze(3, Cause(kind, (1,), "why")))
        assert bench.line.frozen_by is kind
    stream.brings(Thaw(3))
    assert bench.line.frozen_by is None, "it is over"


def test_that_the_ranks_are_sent_away_stays_known_until_a_later_controller_leads_them(bench: Bench) -> None:
    """Since when, too: what the same controller sends afterwards, and again on its next stream, changes nothing."""
    stream = bench.opened()
    stream.brings(SENT_AWAY)
    since = bench.now
    for _ in range(2):
        bench.now += 0.5
        stream.brings(KeepAlive())
        stream.brings(SENT_AWAY)
        assert bench.line.sent_away_monotonic_s == since
        stream.breaks()
        stream = bench.next()
        stream.opens()
    stream.breaks()
    later = bench.next()
    later.opens(term=2)
    later.brings(KeepAlive())
    assert bench.line.sent_away_monotonic_s is None
    later.breaks()
    assert bench.next().fence == 2


def test_controllers_are_tried_in_turn_each_once_however_often_they_are_named(bench: Bench) -> None:
    """Nothing listens where they were; none waits for a lease to end."""
    first = bench.opened()
    first.brings(StandbyList(("c1", "c0"), LEASE_S))
    bench.line.add_controllers(["c1", "c2"])
    stream, tried = first, []
    for _ in range(4):
        stream.breaks(refused=True)
        stream = bench.next()
        tried.append(stream.address)
    assert (first.address, tried) == ("c0", ["c1", "c2", "c0", "c1"])


def test_a_stream_that_breaks_is_followed_by_another_without_a_wait_for_the_lease(bench: Bench) -> None:
    """To the same controller, which has been received within its lease: from the end of the stream on it has a whole one."""
    first = bench.opened()
    bench.passes(LEASE_S - 0.5)
    first.breaks()
    second = bench.next()
    assert second.address == "c0"
    bench.passes(LEASE_S - 0.5)
    assert second.closes == [] and bench.started.empty()


def test_a_controller_that_is_silent_for_a_lease_is_left_and_the_next_one_has_a_lease_of_its_own(bench: Bench) -> None:
    first = bench.opened()
    bench.passes(LEASE_S - 0.5)
    assert bench.line.attached and first.closes == []
    bench.passes(0.5)
    second = bench.next()
    assert not bench.line.attached and first.closes == [0.0] and second.address == "c1"
    bench.passes(0.5)
    assert second.closes == [] and bench.started.empty()


def test_the_end_of_a_silent_stream_ends_no_later_one(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own thread, which brings it, is held for a moment, while its lease ends as well."""
    first, held, go_on = bench.opened(), threading.Event(), threading.Event()

    def debug(*_: object) -> None:
        if threading.current_thread() is ending:
            held.set()
            go_on.wait(LONG_S)

    monkeypatch.setattr(agent_link, "log", SimpleNamespace(debug=debug))
    monkeypatch.setattr(first, "breaks", lambda **_: None)
    bench.passes(LEASE_S - 0.5)
    ending = threading.Thread(target=bench.line.stream_closed, args=(first, "over"))
    ending.start()
    assert held.wait(LONG_S)
    bench.passes(0.5)
    second = bench.next()
    second.opens()
    second.brings(KeepAlive())
    go_on.set()
    ending.join()
    bench.looked()
    assert second.closes == [] and bench.line.attached


def test_a_launcher_that_was_stopped_itself_does_not_take_its_controller_for_silent(bench: Bench) -> None:
    """What has come meanwhile waits to be read."""
    stream = bench.opened()
    bench.looked()
    bench.now += 10 * LEASE_S
    bench.looked()
    assert bench.line.attached and stream.closes == [] and bench.started.empty()


def test_what_the_wire_cannot_carry_does_not_reach_the_launchers_loop(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    stream = bench.opened()
    bench.cannot_carry = True
    bench.line.worker_exit(1, 101, "signal SIGKILL")
    assert "could not report to the controller: too long" in caplog.text
    bench.cannot_carry = False
    stream.breaks()


def test_a_line_that_is_closed_lets_what_was_said_out_and_takes_no_greeting_any_more(bench: Bench) -> None:
    stream = bench.opened()
    bench.line.worker_exit(1, 101, "signal SIGKILL")
    bench.line.close(7.0)
    assert stream.closes[0] == 7.0 and bench.started.empty()
    stream.opens()
    assert not bench.line.attached and stream.sent.count(HELLO) == 1


def test_a_line_that_is_closed_before_the_greeting_ends_its_stream_and_starts_none(bench: Bench) -> None:
    """Also where its thread comes to the next stream a moment later."""
    stream = bench.next()
    bench.line.close(7.0)
    assert stream.closes[0] == 0.0, "there is nothing to wait for"
    assert not bench.line._thread.is_alive()
    again = threading.Thread(target=bench.line._run, daemon=True)
    again.start()
    again.join(LONG_S)
    assert not again.is_alive() and bench.started.empty()


def test_the_controller_that_is_asked_whom_it_has_given_up_is_the_one_of_now(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask(address: str, **more: Any) -> Any:
        asked.append(address)
        return SimpleNamespace(stage="running", term=1, ranks=())

    monkeypatch.setattr(agent_link, "request_status", ask)
    bench.opened().breaks(refused=True)
    bench.next()
    assert bench.line.given_up() is None and asked == ["c1"]


def test_only_ranks_that_are_dead_because_they_were_silent_are_given_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is suspected may come back, one that has failed has its own end, and of one that is dead the cause may not be known."""
    silent = Cause(CauseKind.SILENT, (0,), "nothing was received")
    ranks = (
        SimpleNamespace(rank=0, dead=True, cause=silent),
        SimpleNamespace(rank=1, dead=False, cause=silent),
        SimpleNamespace(rank=2, dead=True, cause=Cause(CauseKind.EXITED, (2,), "signal SIGKILL")),
        SimpleNamespace(rank=3, dead=True, cause=None),
    )
    monkeypatch.setattr(
        agent_link, "request_status", lambda *of, **more: SimpleNamespace(stage="exiting", term=1, ranks=ranks)
    )
    bench.opened()
    assert bench.line.given_up() == frozenset({0})


def test_a_spare_nodes_room_is_known_and_the_order_to_use_it_passed_on(bench: Bench) -> None:
    """It has no process to report of."""
    bench.next()
    line = AgentLink("c0", "job", "spare", (), (), take=bench.orders.append, places=2)
    stream = bench.next()
    stream._line = line
    stream.opens()
    assert stream.sent[0] == AgentHello("spare", (), (), 2)
    stream.brings(TakePlaces((2, 3), 7))
    assert bench.orders == [TakePlaces((2, 3), 7)]
    line.close()


def test_orders_to_replace_a_process_and_the_end_of_a_fault_are_passed_on(bench: Bench) -> None:
    """What an earlier stream still brings is not."""
    stream = bench.opened()
    stream.brings(Replace(1, 101, 7))
    stream.brings(Thaw(7))
    assert bench.orders == [Replace(1, 101, 7), Thaw(7)]
    stream.breaks(refused=True)
    bench.next()
    stream.brings(Replace(1, 101, 7))
    assert len(bench.orders) == 2


def test_the_next_controller_learns_of_a_replaced_ranks_process_only(bench: Bench) -> None:
    """The death of the one before would be the other's, to a controller that does not know the rank."""
    stream = bench.opened()
    bench.line.worker_exit(0, 100, "exit code 1")
    bench.line.worker_exit(1, 101, "signal SIGKILL")
    bench.line.replaced(1, 55)
    bench.line.replace_failed(1, 7, "process 55 has ended")
    assert stream.sent[-1] == ReplaceFailed("host", 1, 7, "process 55 has ended")
    stream.breaks(refused=True)
    again = bench.next()
    again.opens()
    assert again.sent == [AgentHello("host", (0, 1), (100, 55)), WorkerExit(0, 100, "exit code 1", 0.0)]
    bench.line.worker_exit(1, 55, "exit code 3")
    assert again.sent[-1] == WorkerExit(1, 55, "exit code 3", 0.0)


def test_without_a_controller_a_refusal_is_lost(bench: Bench) -> None:
    """The time of the order runs out then."""
    stream = bench.next()
    bench.line.replace_failed(1, 7, "no process")
    stream.opens()
    assert stream.sent == [HELLO]
