"""When a controller that got SIGTERM leaves: a driver whose clock is moved by hand, and streams that note what they receive."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ttp.controller.core.facts.events import ControllerSettings
from ttp.controller.driver import Driver
from ttp.controller.handler import Addressed, Item, RankLink, StatusAsked, StopWhenUnused, StreamEnded, StreamMessages
from ttp.controller.journal import Journal, read_events
from ttp.proto.messages import Registration, ShardGroup
from ttp.proto.status import JobStatus

from .conftest import LONG_S

LEASE_S = 1.0
ASKED = StopWhenUnused("SIGTERM")


class Stream(RankLink):
    """One rank's stream, which takes everything."""

    def send(self, messages: Sequence[Addressed]) -> None: ...

    def reject(self, text: str) -> None:
        raise AssertionError(text)

    def finish(self) -> None: ...


class Driven:
    """A controller's driver with the time in the test's hands."""

    def __init__(self, folder: Path, standby: int = 0) -> None:
        settings = ControllerSettings(
            job_id="job", term=1, world_size=1, standby=standby, lease_s=LEASE_S, heartbeat_s=0.2
        )
        self.now = 1000.0
        self.reason = ""
        self.path = folder / "journal.jsonl"
        self._over = threading.Event()
        self._journal = Journal(self.path, settings)
        self.driver = Driver(settings, self._journal, self._finish, clock=lambda: self.now)
        self.driver.start()

    def _finish(self, reason: str) -> None:
        self.reason = reason
        self._over.set()

    def leaves(self) -> bool:
        """Say whether it ends with what it has received so far, after two whole turns of its loop."""
        for _ in range(2):
            answered = threading.Event()

            def note(status: JobStatus, answered: threading.Event = answered) -> None:
                answered.set()

            self.driver.put(StatusAsked(note))
            deadline = time.monotonic() + LONG_S
            while not answered.wait(0.005) and not self._over.is_set():
                assert time.monotonic() < deadline, "the driver neither answers nor ends"
        return self._over.is_set()

    def receive(self, *items: Item) -> bool:
        """Let it receive these; say whether it ends."""
        for item in items:
            self.driver.put(item)
        return self.leaves()

    def lasts(self, for_s: float) -> bool:
        """Let time pass, as it does for a driver that is not stopped; say whether it is still there then."""
        until = self.now + for_s
        while self.now < until:
            self.now += 0.1
            if self.leaves():
                return False
        return True

    def logged_events(self) -> list[str]:
        self.driver.join(LONG_S)
        self._journal.close()
        return [line.event for line in read_events(self.path)]

    def close(self) -> None:
        """End the driver, whatever it waits for."""
        if not self._over.is_set():
            self.driver._handler._finish("the test is over")
            self.driver.put(StatusAsked(lambda status: None))
        self.driver.join(LONG_S)
        self._journal.close()


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Driven]:
    made = Driven(tmp_path)
    yield made
    made.close()


def comes(stream: Stream) -> StreamMessages:
    """Let the only rank register on this stream."""
    group = ShardGroup("g0", "shard 0", 100)
    return StreamMessages(((stream, (Registration(0, 1, "host0", 1000, (group,), 0, ("/c",), "{}"),)),))


@pytest.mark.parametrize("order", ["order, then broken", "broken, then order"])
def test_a_rank_whose_stream_breaks_for_a_moment_finds_its_controller_again(controller: Driven, order: str) -> None:
    """It may be the last that has a shard. Once it has been gone for a lease, no rank needs this controller."""
    first, second = Stream(), Stream()
    assert not controller.receive(comes(first))
    broken: tuple[Item, Item] = (
        (ASKED, StreamEnded(first)) if order.startswith("order") else (StreamEnded(first), ASKED)
    )
    assert not controller.receive(*broken)
    assert controller.lasts(0.8 * LEASE_S)
    assert not controller.receive(comes(second)) and controller.lasts(1.5 * LEASE_S), "attached again"
    assert not controller.receive(StreamEnded(second)) and controller.lasts(0.8 * LEASE_S)
    assert not controller.lasts(0.5 * LEASE_S)
    assert controller.reason == "SIGTERM"
    events = controller.logged_events()
    assert events.count("stays") == 1 and events[-1] == "stopped"


def test_time_in_which_the_controller_stood_still_is_not_taken_from_the_ranks(controller: Driven) -> None:
    """They could not come back to a stopped process: it goes on, and gives them the lease from then."""
    first, second = Stream(), Stream()
    assert not controller.receive(comes(first), ASKED, StreamEnded(first))
    controller.now += 5 * LEASE_S
    assert not controller.leaves() and controller.lasts(0.8 * LEASE_S)
    assert not controller.receive(comes(second)) and controller.lasts(1.5 * LEASE_S)


def test_a_controller_that_no_rank_has_come_to_leaves_at_once(controller: Driven) -> None:
    """No rank has a state to save under it."""
    assert controller.receive(ASKED)
    assert controller.logged_events() == ["stopped"]


@pytest.mark.parametrize("guarded", [True, False])
def test_a_standby_leaves_unless_somebody_guards_it(tmp_path: Path, guarded: bool) -> None:
    """One that was started by hand has no other rank who ends it; a guarded one does not keep the word for later either."""
    standby = Driven(tmp_path, standby=1)
    try:
        assert standby.receive(StopWhenUnused("SIGTERM", guarded=guarded)) is not guarded
        assert standby.lasts(2 * LEASE_S) is guarded
    finally:
        standby.close()
    assert standby.logged_events() == (["stays"] if guarded else ["stopped"])
