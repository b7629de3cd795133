"""A caller's end of a stream, on a call of the test: when it is open, when it is given up, and that its end is always said, once."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from ttp.proto import control_pb2 as pb
from ttp.proto import stream as streams
from ttp.proto.codec import DownwardParcel, encode_downward
from ttp.proto.messages import Finished, KeepAlive
from ttp.proto.stream import ControlStream

from .conftest import LONG_S

JOB, TERM = "job", 3
Answer = pb.DownwardEnvelope | Exception | None


class Ended(grpc.RpcError, grpc.Call):  # type: ignore[misc]
    """What gRPC raises out of a call."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


Ended.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
CANCELLED = Ended(grpc.StatusCode.CANCELLED, "cancelled here")


class Call:
    """One call. The test says what comes; what the caller sends is read when the test says so."""

    def __init__(self) -> None:
        self.answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self.cancelled = threading.Event()
        self.requests: Iterator[pb.UpwardEnvelope] = iter(())
        self.sent: list[pb.UpwardEnvelope] = []

    def cancel(self) -> None:
        self.cancelled.set()
        self.answers.put(CANCELLED)

    def comes(self, *answers: Answer) -> None:
        for answer in answers:
            self.answers.put(answer)

    def __iter__(self) -> Iterator[pb.DownwardEnvelope]:
        while (answer := self.answers.get(timeout=LONG_S)) is not None:
            if isinstance(answer, Exception):
                raise answer
            yield answer


def greeting(job_id: str = JOB, term: int = TERM) -> pb.DownwardEnvelope:
    return encode_downward(job_id, term, (), None)


def beat(term: int = TERM) -> pb.DownwardEnvelope:
    return encode_downward(JOB, term, (0,), KeepAlive())


class Caller:
    """Listens to one stream."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.reason = ""
        self.ended, self.opened, self.received = threading.Event(), threading.Event(), threading.Event()

    def stream_opened(self, stream: ControlStream) -> None:
        self.seen.append("opened")
        self.opened.set()

    def stream_received(self, stream: ControlStream, parcel: DownwardParcel) -> None:
        self.seen.append(type(parcel.message).__name__)
        self.received.set()

    def stream_closed(self, stream: ControlStream, reason: str) -> None:
        self.seen.append("closed")
        self.reason = reason
        self.ended.set()

    def at_the_end(self, stream: ControlStream) -> list[str]:
        """Wait for it; return what was said."""
        assert self.ended.wait(LONG_S)
        stream._thread.join(LONG_S)
        return self.seen


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Call:
    """Return the call that a stream makes as soon as it is started."""
    made = Call()

    class Stub:
        def __init__(self, channel: Any) -> None:
            """It needs none."""

        def Attach(self, requests: Iterator[pb.UpwardEnvelope], metadata: object = None) -> Call:
            made.requests = requests
            return made

    monkeypatch.setattr(streams, "ControlStub", Stub)
    monkeypatch.setattr(streams, "open_channel", lambda address: contextlib.nullcontext())
    return made


def started(caller: Caller, address: Any = "c0", fence: int = 0, **greeting: Any) -> ControlStream:
    stream = ControlStream(address, JOB, caller, fence=fence, **greeting)
    stream.start()
    return stream


def test_a_stream_is_open_with_the_greeting_and_carries_what_comes_until_its_end(call: Call) -> None:
    caller = Caller()
    stream = started(caller)
    call.comes(greeting(), beat(), beat(), None)
    assert caller.at_the_end(stream) == ["opened", "KeepAlive", "KeepAlive", "closed"]
    assert caller.reason == "the controller ended the stream" and not stream.refused and stream.term == TERM
    assert list(call.requests) == [], "nothing waits to be sent any more"


REFUSED = {
    "another job's": ([greeting(job_id="other")], 0, False, "is the controller of job 'other'"),
    "one of a lower term": ([greeting()], TERM + 1, True, "it is fenced"),
    "one that changes its term": ([greeting(), beat(TERM + 1)], 0, False, "changed its term from 3 to 4"),
    "one that comes to another job": (
        [greeting(), greeting(job_id="other")],
        0,
        False,
        "is the controller of job 'other'",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_controller_that_is_not_the_jobs_is_given_up_and_nothing_of_it_taken(call: Call, what: str) -> None:
    answers, fence, refused, why = REFUSED[what]
    caller = Caller()
    stream = started(caller, fence=fence)
    call.comes(*answers, beat())
    assert caller.at_the_end(stream) == ["opened"] * (len(answers) - 1) + ["closed"]
    assert why in caller.reason and stream.refused == refused and call.cancelled.is_set()


def missing() -> str:
    raise KeyError("no address")


ENDS: dict[str, tuple[Any, list[Answer], str, bool]] = {
    "nothing listens": ("c0", [Ended(grpc.StatusCode.UNAVAILABLE, "Connection refused")], "UNAVAILABLE: Connection refused", True),
    "the network": ("c0", [Ended(grpc.StatusCode.UNAVAILABLE, "reset")], "UNAVAILABLE: reset", False),
    "bytes": ("c0", [greeting(), pb.DownwardEnvelope(job_id=JOB, term=TERM)], "unknown", False),
    "no address yet": (lambda: None, [], "the controller's address is not known yet", False),
    "no address": (missing, [], "the controller's address cannot be found: KeyError", False),
}  # fmt: skip


@pytest.mark.parametrize("what", ENDS)
def test_whatever_a_stream_ends_with_is_said_once_and_last(call: Call, what: str) -> None:
    address, answers, why, refused = ENDS[what]
    caller = Caller()
    stream = started(caller, address)
    call.comes(*answers)
    seen = caller.at_the_end(stream)
    assert seen[-1] == "closed" and seen.count("closed") == 1
    assert why in caller.reason and stream.refused == refused
    assert ("address" in caller.reason) == what.startswith("no address")


def test_a_controller_that_does_not_greet_is_given_up(call: Call) -> None:
    caller = Caller()
    assert caller.at_the_end(started(caller, greeting_s=0.05)) == ["closed"]
    assert call.cancelled.is_set()


def timers_of_the_test(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, Any]]:
    """Have streams make timers that never expire; return those that are made, with their times."""
    timers: list[tuple[float, Any]] = []

    class Timer:
        daemon = False

        def __init__(self, interval: float, function: Callable[..., None], args: tuple[Any, ...]) -> None:
            self.runs = False
            timers.append((interval, self))

        def start(self) -> None:
            self.runs = True

        def cancel(self) -> None:
            self.runs = False

    monkeypatch.setattr(
        streams, "threading", SimpleNamespace(Timer=Timer, Thread=threading.Thread, Lock=threading.Lock)
    )
    return timers


def test_a_stream_that_ends_before_its_greeting_leaves_no_timer_behind(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that still runs would be a thread for each try; and none keeps a process from ending."""
    timers = timers_of_the_test(monkeypatch)
    caller = Caller()
    stream = started(caller)
    call.comes(Ended(grpc.StatusCode.UNAVAILABLE, "reset"))
    assert caller.at_the_end(stream) == ["closed"]
    assert [(timer.runs, timer.daemon) for _, timer in timers] == [(False, True)]


def test_a_controller_that_has_greeted_may_be_silent(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease says for how long; the stream does not."""
    timers = timers_of_the_test(monkeypatch)
    caller = Caller()
    stream = started(caller)
    call.comes(greeting())
    assert caller.opened.wait(LONG_S)
    ((interval, timer),) = timers
    assert interval == streams.GREETING_TIMEOUT_S and not timer.runs
    stream.close()
    assert caller.at_the_end(stream) == ["opened", "closed"]


def test_a_stream_that_is_closed_ends_its_call_also_where_it_was_closed_before_the_call(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: the time for the greeting has not passed."""
    timers_of_the_test(monkeypatch)
    caller = Caller()
    stream = started(caller)
    call.comes(greeting())
    assert caller.opened.wait(LONG_S)
    stream.close()
    assert caller.at_the_end(stream) == ["opened", "closed"] and call.cancelled.is_set()
    call.cancelled.clear()
    early, go_on = Caller(), threading.Event()
    stream = started(early, lambda: "c0" if go_on.wait(LONG_S) else None)
    stream.close()
    go_on.set()
    assert early.at_the_end(stream)[-1] == "closed" and call.cancelled.is_set()


def test_a_close_with_a_time_lets_what_was_queued_out_first(call: Call) -> None:
    """Within the time the other side reads it, and ends the stream: nothing is cancelled before."""
    caller = Caller()
    stream = started(caller)
    call.comes(greeting())
    assert caller.opened.wait(LONG_S)
    stream.send(Finished(0))
    stream.send(Finished(1))

    def read() -> None:
        for envelope in call.requests:
            assert not call.cancelled.is_set()
            call.sent.append(envelope)
        call.comes(None)

    reader = threading.Thread(target=read)
    reader.start()
    stream.close(LONG_S)
    reader.join(LONG_S)
    assert [(one.job_id, one.term, len(one.messages)) for one in call.sent] == [(JOB, TERM, 1)] * 2
    assert caller.at_the_end(stream) == ["opened", "closed"] and caller.reason == "the controller ended the stream"
