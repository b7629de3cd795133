"""Looks at several endpoints: one that does not answer holds up nothing while another is in use, and is seen when it is back."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ClassVar

import pytest

from tests.unit.launch.test_multi_endpoint import Bench, agent, free_place, quick, serve
from tests.waiting import until
from ttp.launch.rendezvous import multi_endpoint
from ttp.launch.rendezvous.bounded_call import BoundedCall
from ttp.launch.rendezvous.multi_endpoint import Endpoint

__all__ = ["quick"]
"""A fixture that pytest uses by itself: short times."""


class Look:
    """Stands in for the looks at an endpoint: each ends when the test lets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *held: Endpoint) -> None:
        self.held = set(held)
        self.free = threading.Event()
        self.waits: list[tuple[Endpoint, float]] = []
        look = multi_endpoint.Window.look

        def looks(window: multi_endpoint.Window, within_s: float = 0.0) -> int | None:
            if window._place in self.held:
                self.free.wait(60)
                return None
            return look(window, 30.0)

        monkeypatch.setattr(multi_endpoint.Window, "look", looks)
        monkeypatch.setattr(Call, "look", self, raising=False)
        monkeypatch.setattr(multi_endpoint, "BoundedCall", Call)


class Call(BoundedCall[int | None]):
    """Counts how long it may be waited for where the test lets no answer come; any other is waited for until it has its answer."""

    waited_s: ClassVar[list[float]] = []
    look: ClassVar[Look]

    def __init__(self, call: Callable[[], int | None]) -> None:
        window = getattr(getattr(call, "func", None), "__self__", None)
        self.held = isinstance(window, multi_endpoint.Window) and window._place in self.look.held
        super().__init__(call)

    def wait(self, timeout_s: float) -> bool:
        if not self.held or self.look.free.is_set():
            return super().wait(30.0)
        self.waited_s.append(timeout_s)
        return False


def test_an_endpoint_that_does_not_answer_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not at all while the one in use answers, or once the agent knows that it is silent."""
    places = free_place(), free_place()
    server = serve(places[1])
    server.set(multi_endpoint.epoch_key(""), "3")
    look = Look(monkeypatch, places[0])
    known, one = agent(*places), agent(*places)
    Call.waited_s = []
    assert one.find(patient=False) == places[1] and one.epoch == 3
    first = list(Call.waited_s)
    assert max(first) > multi_endpoint.CONNECT_S, "it may be the one that is in use"
    Call.waited_s = []
    for _ in range(3):
        assert one.find(patient=False) == places[1] and one.newer_than(places[1]) is None
        assert one.find_in_use() == places[1]
    assert max(Call.waited_s) <= multi_endpoint.BACK_S
    Call.waited_s = []
    known.gave_no_answer(places[0])
    assert known.find(patient=False) == places[1] and max(Call.waited_s) <= multi_endpoint.BACK_S
    look.free.set()


def test_an_endpoint_that_falls_silent_holds_up_nothing_while_the_one_in_use_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first look at it, too."""
    places = free_place(), free_place()
    servers = [serve(place) for place in places]
    servers[1].set(multi_endpoint.epoch_key(""), "3")
    look = Look(monkeypatch)
    one = agent(*places)
    assert one.find(patient=False) == places[1]
    look.held.add(places[0])
    Call.waited_s = []
    assert one.find(patient=False) == places[1]
    assert Call.waited_s and max(Call.waited_s) <= multi_endpoint.BACK_S
    look.free.set()


def note(calls: list[str], name: str, call: Callable[..., object], *arguments: object, **options: object) -> object:
    calls.append(name)
    return call(*arguments, **options)


@pytest.mark.parametrize(
    ("unanswered", "connected", "lost"), [(0, True, False), (1, False, False), (2, False, True), (2, True, False)]
)
def test_a_store_that_accepted_no_connection_beside_training_is_not_waited_for_at_the_next_meeting(
    unanswered: int, connected: bool, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is slow is. One that answers has this agent's entry at once: it waits now."""
    place = free_place()
    server = serve(place)
    bench = Bench(place)
    noted: list[Endpoint] = []
    monkeypatch.setattr(bench.store_failover._stores, "gave_no_answer", noted.append)
    bench.join()
    until(lambda: len(bench.made) == 1)
    bench.made[0].joined.set()
    bench.thread.join(30)
    waiting = bench.store_failover._waiting
    assert waiting is not None
    waiting.stop()
    waiting._thread.join(30)  # a poll that is under way would set them as well
    waiting.unanswered, waiting._window.connected = unanswered, connected
    calls: list[str] = []
    stores = bench.store_failover._stores
    for name in ("ask", "find"):
        call = functools.partial(note, calls, name, getattr(stores, name))
        monkeypatch.setattr(stores, name, call)
    bench.join()
    bench.thread.join(30)
    assert noted == [place] * lost and server, "one answer may be late"
    assert calls[0] == ("ask" if unanswered < 2 else "find")
    bench.store_failover.shutdown()


def test_an_endpoint_that_is_back_is_seen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look that took so long ends without an answer; one of the next has it."""
    places = free_place(), free_place()
    servers = [serve(place) for place in places]
    servers[0].set(multi_endpoint.epoch_key(""), "1")
    look = Look(monkeypatch, places[1])
    one = agent(*places)
    one.epoch = 1
    one.gave_no_answer(places[1])
    assert one.newer_than(places[0]) is None
    servers[1].set(multi_endpoint.epoch_key(""), "2")
    look.held.clear()
    assert one.newer_than(places[0]) is None, "the first look is under way"
    look.free.set()
    until(lambda: one.newer_than(places[0]) == places[1])
