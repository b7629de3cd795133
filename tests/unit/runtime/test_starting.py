"""The thread that starts controllers and looks for others: each order has its answer, in order, whatever the starter raises."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from ttp.processor.async_log import AsyncLog
from ttp.processor.core.events import ControllersFound, ControllerStarted, Event, LookForControllers, StartController
from ttp.processor.starting import Starting

WITHIN_S = 5.0
"""Nothing here waits for anything but its own threads."""


class Starter:
    """Starts no process. `fails`: whatever it is asked for."""

    def __init__(self) -> None:
        self.fails = ""
        self.known: list[tuple[str, ...]] = []

    def start(self, known: tuple[str, ...]) -> str:
        if self.fails:
            raise OSError(self.fails)
        self.known.append(known)
        return f"c{len(self.known)}"

    def look(self) -> tuple[str, ...]:
        if self.fails:
            raise ConnectionError(self.fails)
        return ("c1", "c2")

    def on_end(self, ended: Callable[[str], None]) -> None:
        raise AssertionError("not asked for by this thread")


class Asked:
    """A `Starting` and what it answers."""

    def __init__(self) -> None:
        self.starter, self.answers = Starter(), queue.SimpleQueue[Event]()
        self.starting = Starting(self.starter, AsyncLog(0), self.answers.put)

    def answer(self) -> Event:
        return self.answers.get(timeout=WITHIN_S)

    def threads(self) -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "ttp-controllers"]


@pytest.fixture
def asked() -> Iterator[Asked]:
    asked = Asked()
    yield asked
    asked.starting.stop()
    for thread in asked.threads():
        thread.join(WITHIN_S)


def test_orders_are_carried_out_one_after_the_other_on_one_thread(asked: Asked) -> None:
    """The thread begins with the first of them."""
    assert not asked.threads()
    asked.starting.submit(StartController(("c0",)))
    asked.starting.submit(LookForControllers())
    asked.starting.submit(StartController())
    assert asked.answer() == ControllerStarted("c1")
    assert asked.answer() == ControllersFound(("c1", "c2"))
    assert asked.answer() == ControllerStarted("c2")
    assert asked.starter.known == [("c0",), ()]
    (thread,) = asked.threads()
    assert thread.daemon, "a start that hangs would keep the process from ending"


def test_a_start_that_fails_is_answered_with_its_error(asked: Asked) -> None:
    asked.starter.fails = "no room"
    asked.starting.submit(StartController())
    assert asked.answer() == ControllerStarted("", "OSError: no room")


def test_a_look_that_fails_is_not_answered_and_the_thread_goes_on(asked: Asked) -> None:
    asked.starter.fails = "the store is gone"
    asked.starting.submit(LookForControllers())
    asked.starting.submit(StartController())
    assert asked.answer() == ControllerStarted("", "OSError: the store is gone")


def test_the_thread_ends_after_what_was_submitted_before(asked: Asked) -> None:
    asked.starting.submit(StartController())
    asked.starting.stop()
    assert asked.answer() == ControllerStarted("c1")
    for thread in asked.threads():
        thread.join(WITHIN_S)
    assert not asked.threads()
