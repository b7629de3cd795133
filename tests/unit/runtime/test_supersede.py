"""The requests with which a controller that takes over looks for the earlier ones, and ends one that lives."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import until
from ttp.controller import __main__ as program
from ttp.controller.agent_link import request_status
from ttp.controller.core.facts.events import ControllerSettings, EarlierLives
from ttp.controller.journal import read_events
from ttp.errors import ControllerError
from ttp.proto.messages import Exit, Freeze, Registration, Welcome
from ttp.proto.transport import open_channel

from .conftest import LONG_S, StartController
from .test_server import RawStream, registration


class Other:
    """The controllers that are asked: `answers` says what comes of each request, in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: int | None) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.found: list[EarlierLives] = []
        self.all_came = threading.Event()
        self._answers = list(answers)
        monkeypatch.setattr(program, "look_for_controller", partial(self._take, "look"))
        monkeypatch.setattr(program, "request_shutdown", partial(self._take, "order"))
        monkeypatch.setattr(program, "LOOK_AGAIN_S", 0.0)
        self.predecessors = program.Predecessors(ControllerSettings("job", 3, 4, lease_s=6.0), self._find)

    def _take(self, what: str, address: str, **named: Any) -> int:
        self.requests.append((what, {"address": address, **named}))
        answer = self._answers.pop(0)
        if answer is None:
            raise ControllerError("it does not answer")
        return answer

    def _find(self, event: EarlierLives) -> None:
        self.found.append(event)
        self.all_came.set()


def test_the_order_names_the_term_and_the_generation_and_is_given_up_after_a_third_of_a_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = Other(monkeypatch, 0, 4)
    other.predecessors.supersede("a:1", 7, 5)
    assert other.all_came.wait(LONG_S)
    (what, named), *_ = other.requests
    assert what == "order" and named["timeout_s"] == pytest.approx(2.0)
    assert [named[name] for name in ("address", "job_id", "term", "generation", "look")] == ["a:1", "job", 3, 7, 5]


def test_a_controller_is_looked_for_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC gives up a connection to a process that is stopped sooner than this one does."""
    other = Other(monkeypatch, None, None, 4)
    other.predecessors.look_for("a:1")
    assert other.all_came.wait(LONG_S)
    assert other.found == [EarlierLives("a:1", 4, 3)] and [what for what, _ in other.requests] == ["look"] * 3
    assert [named["look"] for _, named in other.requests] == [1, 2, 3]
    assert {(named["address"], named["term"]) for _, named in other.requests} == {("a:1", 3)}


@pytest.mark.parametrize("taken", [None, 0])
def test_one_that_was_ordered_to_end_is_looked_for_again(monkeypatch: pytest.MonkeyPatch, taken: int | None) -> None:
    """It may not have received the order, or not have obeyed."""
    other = Other(monkeypatch, taken, None, 4)
    other.predecessors.supersede("a:1", 7, 5)
    assert other.all_came.wait(LONG_S)
    assert other.found == [EarlierLives("a:1", 4, 2)]
    assert [what for what, _ in other.requests] == ["order", "look", "look"]


def test_one_that_is_gone_is_not_looked_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "LOOK_TIMEOUT_S", -1.0)
    other = Other(monkeypatch)
    other.predecessors._look("a:1")
    assert not other.found and not other.requests


def test_a_controller_that_lives_is_found_and_ended_and_its_ranks_come(
    new_controller: StartController, tmp_path: Path
) -> None:
    """Two processes: rank 1 has turned to the standby, rank 0 is still with the first one, and comes once that has ended."""
    first = new_controller(world_size=2)
    standby = new_controller(world_size=2, standby=1, term=2, journal=tmp_path / "standby.jsonl")
    known = (first.address, standby.address)

    def coming(rank: int) -> Registration:
        return replace(registration(rank, 2), controllers=known, job_groups=1)

    with open_channel(first.address) as to_first, open_channel(standby.address) as to_standby:
        with_first = RawStream(to_first)
        with_first.say(registration(0, 2), registration(1, 2))
        assert isinstance(with_first.next()[1], Welcome)
        turned = RawStream(to_standby)
        turned.say(coming(1))
        assert first.wait(LONG_S) == 0
        came = RawStream(to_standby)
        came.say(coming(0))
        while not isinstance(came.next()[1], Freeze):
            pass
        until(lambda: takeovers(tmp_path / "standby.jsonl"), "its takeover in the journal")
    (took_over,) = takeovers(tmp_path / "standby.jsonl")
    assert not took_over["absent"] and list(took_over["ranks"]) == [0, 1]


def test_processes_on_a_lost_node_are_turned_away_and_the_standby_is_there_for_those_in_their_places(
    new_controller: StartController, tmp_path: Path
) -> None:
    """Two controllers: the first one leads generation 1. Rank 1's earlier process comes to the standby; later the first controller is killed."""
    first = new_controller(world_size=2, standby=1, term=2)
    standby = new_controller(world_size=2, standby=2, term=3, journal=tmp_path / "standby.jsonl")

    def coming(rank: int, generation: int) -> Registration:
        known = (first.address, standby.address)
        return replace(
            registration(rank, 2), controllers=known, job_groups=1, generation=generation, regrouped=generation
        )

    with open_channel(first.address) as to_first, open_channel(standby.address) as to_standby:
        with_first = RawStream(to_first)
        with_first.say(coming(0, 1), coming(1, 1))
        while not isinstance(with_first.next()[1], Freeze):
            pass
        lost = RawStream(to_standby)
        lost.say(coming(1, 0))
        while not isinstance(lost.next()[1], Exit):
            pass
        assert request_status(first.address).stage == "freezing" and request_status(standby.address).stage == "standby"
        first.process.kill()
        streams = [RawStream(to_standby) for _ in range(2)]
        for rank, stream in enumerate(streams):
            stream.say(coming(rank, 1))
        while not isinstance(streams[1].next()[1], Freeze):
            pass
        until(lambda: takeovers(tmp_path / "standby.jsonl"), "its takeover in the journal")
    assert list(takeovers(tmp_path / "standby.jsonl")[0]["ranks"]) == [0, 1]


def takeovers(journal: Path) -> list[Any]:
    return [line.fields for line in read_events(journal) if line.event == "took_over"]
