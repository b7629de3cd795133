"""The ports of a rank's driver, called one by one on this thread: what comes to its queue, and whom each of them wakes."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ttp.processor import driver
from ttp.processor.core.events import (
    BoundaryReached,
    ControllerEnded,
    ControllerStarted,
    LookForControllers,
    Noticed,
    ProcessorSettings,
    SavedAlone,
    SavesAlone,
    StartController,
    TrainReturned,
)
from ttp.processor.driver import Processor, ProcessorOptions
from ttp.processor.gate import Gate
from ttp.processor.handler import Closed, Incoming, Opened
from ttp.proto.stream import Relayed

from .conftest import LONG_S


class Starter:
    """Starts no controllers; says when one ends."""

    ended: Callable[[str], None]

    def start(self, known: tuple[str, ...]) -> str:
        return "c9"

    def look(self) -> tuple[str, ...]:
        return ()

    def on_end(self, ended: Callable[[str], None]) -> None:
        self.ended = ended


class Driven:
    """A driver whose threads do not run, with a clock of the test."""

    def __init__(self, options: ProcessorOptions | None = None) -> None:
        self.now = 0.0
        self.exits: list[int] = []
        self.calls: list[tuple[str, Any]] = []
        self.gate = Gate(0)
        holder: Any = SimpleNamespace(registration=lambda: None)
        self.processor = Processor(
            ProcessorSettings(0, 0.2, 0.05), "c0", "job", holder, self.gate, options or ProcessorOptions(), clock=lambda: self.now,
            exit_process=self.exits.append,
        )  # fmt: skip
        inner: Any = self.processor
        inner._handler.close_stream = lambda drain_s: self.calls.append(("closes", drain_s))
        inner._handler.steps = SimpleNamespace(
            pause=lambda now: self.calls.append(("pauses", now)), resume=lambda now: self.calls.append(("goes on", now))
        )
        inner._stacks.finish = lambda timeout_s: self.calls.append(("stacks", timeout_s))

    def queued(self) -> list[Any]:
        """Return what has come to the queue, and empty it."""
        found = []
        while not self.processor._queue.empty():
            found.append(self.processor._queue.get())
        return found


@pytest.fixture
def rank() -> Driven:
    return Driven()


def test_what_the_training_thread_and_the_stream_say_comes_to_the_queue_in_its_order(rank: Driven) -> None:
    stream: Any = SimpleNamespace(relay_failed=False)
    parcel: Any = object()
    rank.processor.preempted("SIGTERM")
    assert rank.gate.notice, "the next spanning collective takes it along"
    rank.processor.saves_alone(7)
    rank.processor.saved_alone(7, "/a", "no space")
    rank.processor.finished()
    rank.processor.stream_opened(stream)
    rank.processor.stream_received(stream, parcel)
    rank.processor.stream_closed(stream, "reset")
    assert rank.gate.step_boundary.on_reached is not None
    rank.gate.step_boundary.on_reached(8)
    assert rank.queued() == [
        Noticed("SIGTERM"), SavesAlone(7), SavedAlone(7, "/a", "no space"), TrainReturned(), Opened(stream), Incoming(stream, parcel),
        Closed(stream, "reset"), BoundaryReached(8),
    ]  # fmt: skip


def test_a_pause_within_a_pause_neither_shortens_nor_ends_it(rank: Driven) -> None:
    """An evaluation that saves: the rank counts as paused until the end of the outer pause, and its step is timed from there."""
    outer = rank.processor.pause(10.0)
    inner = rank.processor.pause(1.0)
    rank.now = 5.0
    assert rank.processor.paused()
    rank.processor.end_pause(inner)
    assert rank.processor.paused()
    assert ("goes on", 5.0) not in rank.calls
    longer = rank.processor.pause(60.0)
    rank.now = 12.0
    assert rank.processor.paused(), "the inner one may be the longer one"
    rank.processor.end_pause(longer)
    assert not rank.processor.paused()
    rank.processor.end_pause(outer)
    assert not rank.processor.paused()
    assert rank.calls[0] == ("pauses", 0.0) and rank.calls[-1] == ("goes on", 12.0)
    assert [what for what, _ in rank.calls].count("goes on") == 1


def test_a_rank_without_a_starter_answers_that_it_starts_no_controllers(rank: Driven) -> None:
    """The controller then asks another rank. A look for controllers has no answer where nothing is found."""
    rank.processor.start_controller(StartController(()))
    rank.processor.start_controller(LookForControllers())
    assert rank.queued() == [ControllerStarted("", "this rank starts no controllers")]


def test_the_end_of_a_controller_that_this_rank_has_started_comes_to_the_queue() -> None:
    starter = Starter()
    rank = Driven(ProcessorOptions(starter=starter))
    starter.ended("c9")
    assert rank.queued() == [ControllerEnded("c9")]


def test_a_lost_parent_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Driven(ProcessorOptions(watch_parent=True))
    assert rank.processor.lost_parent() == ""
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert "is gone" in rank.processor.lost_parent()
    assert rank.processor.lost_parent() == ""
    assert Driven().processor.lost_parent() == "", "no process watches it"


def waiters(rank: Driven) -> Iterator[threading.Thread]:
    """Start threads that wait for the verdict, for the welcome and behind a boundary."""
    for wait in (
        rank.processor.wait_for_verdict,
        lambda: rank.processor.wait_welcomed(10 * LONG_S),
        lambda: rank.gate.boundary(3),
    ):
        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        yield thread


def test_a_stopped_driver_keeps_no_thread_waiting(rank: Driven) -> None:
    """Those that wait already, and those that come later."""
    early = list(waiters(rank))
    rank.processor.stop()
    for thread in (*early, *waiters(rank)):
        thread.join(LONG_S)
        assert not thread.is_alive()


def test_a_stopped_driver_leaves_no_thread_behind() -> None:
    """Its own, those of its work, its log, its stacks and its controllers."""
    before = set(threading.enumerate())
    looked = threading.Event()
    starter = Starter()
    starter.look = lambda: looked.set() or ()  # type: ignore[method-assign, func-returns-value]
    holder: Any = SimpleNamespace(registration=lambda: None)
    processor = Processor(
        ProcessorSettings(0, 0.2, 0.05), lambda: None, "job", holder, Gate(0), ProcessorOptions(starter=starter)
    )
    processor.start()
    processor.start_controller(LookForControllers())
    assert looked.wait(LONG_S)
    mine = {thread.name for thread in set(threading.enumerate()) - before}
    assert mine >= {"ttp-processor", "ttp-work", "ttp-log", "ttp-controllers"}
    processor.stop()
    for thread in set(threading.enumerate()) - before:
        thread.join(LONG_S)
        assert not thread.is_alive(), thread.name


def test_a_released_rank_waits_neither_for_a_verdict_nor_for_a_welcome(rank: Driven) -> None:
    rank.processor.release()
    assert rank.processor.wait_for_verdict(0.0)
    assert rank.processor._welcomed.is_set() and rank.processor.wait_welcomed(0.0) is None


def test_the_newest_welcome_counts(rank: Driven) -> None:
    first: Any = "of the first controller"
    second: Any = "of the next one"
    rank.processor.welcomed(first)
    rank.processor.welcomed(second)
    assert rank.processor.wait_welcomed(0.0) is second


def test_a_rank_that_has_an_exception_to_show_is_let_go_in_place_of_ended(rank: Driven) -> None:
    """What it said goes out first."""
    rank.processor.release_at_exit()
    rank.processor.leave(75, "step 7 is saved")
    assert rank.exits == [] and rank.processor.wait_for_verdict(0.0)
    assert rank.calls == [("closes", 1.0)]


def test_a_rank_leaves_although_its_farewell_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "FLUSH_TIMEOUT_S", 0.2)
    go_on = threading.Event()
    rank = Driven()
    inner: Any = rank.processor
    inner._stacks.finish = lambda timeout_s: go_on.wait(LONG_S)
    try:
        rank.processor.leave(75, "step 7 is saved")
        assert rank.exits == [75]
    finally:
        go_on.set()
        for thread in threading.enumerate():  # what it still flushes would be another test's
            if thread.name == "ttp-farewell":
                thread.join(LONG_S)


def test_a_closed_output_keeps_the_others_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever read the one has gone: the other is flushed all the same, and the loggers' handlers before."""
    flushed: list[str] = []

    def closed() -> None:
        raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", SimpleNamespace(flush=closed))
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(flush=lambda: flushed.append("stderr")))
    handler: Any = SimpleNamespace(flush=lambda: flushed.append("a logger's"), level=logging.CRITICAL + 1)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    rank = Driven()
    rank.processor._say_farewell()
    assert flushed == ["a logger's", "stderr"]


@pytest.mark.parametrize(("lost_s", "greeting_s"), [(2.0, 5.0), (15.0, 5.0), (75.0, 15.0)])
def test_a_stream_is_opened_with_the_highest_term_that_was_seen_and_time_for_its_greeting(
    rank: Driven, monkeypatch: pytest.MonkeyPatch, lost_s: float, greeting_s: float
) -> None:
    """A controller of a lower one is refused; one to which all ranks of a large job come at once has a lease for its greetings."""
    rank.processor._settings = ProcessorSettings(rank=0, controller_lost_s=lost_s)
    made: list[Any] = []

    def make(*arguments: Any, **more: Any) -> Any:
        made.append((arguments, more))
        return SimpleNamespace(start=lambda: made.append("started"))

    monkeypatch.setattr(driver, "ControlStream", make)
    rank.processor.open_stream("c1", 5)
    given = {"fence": 5, "greeting_s": greeting_s, "relayed": None}
    assert made == [(("c1", "job", rank.processor), given), "started"]


def test_streams_go_through_the_relay_until_it_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then each is a connection of the rank's own: also where another stream ends later for another reason."""
    by: list[Relayed | None] = []

    def make(*arguments: Any, **more: Any) -> Any:
        by.append(more["relayed"])
        return SimpleNamespace(start=lambda: None)

    monkeypatch.setattr(driver, "ControlStream", make)
    relayed = Relayed("/tmp/r/1", 0, 0.75)
    rank = Driven(ProcessorOptions(relayed=relayed))
    for failed in (False, False, True, False, True):
        rank.processor.open_stream("c0", 0)
        ended: Any = SimpleNamespace(relay_failed=failed)
        rank.processor.stream_closed(ended, "reset")
    assert by == [relayed, relayed, relayed, None, None]
    assert len(rank.queued()) == 5, "the machine learns of each end"


def test_the_work_thread_waits_for_an_update_as_long_as_the_driver_was_given() -> None:
    assert Driven(ProcessorOptions(freeze_timeout_s=0.5)).processor._worker._tasks._freeze_timeout_s == 0.5
