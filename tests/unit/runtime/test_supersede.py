"""The requests with which a controller that takes over looks for the earlier ones, and ends one that lives."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import until
from ttp.controller import __main__ as program
from ttp.controller.core.facts.events import ControllerSettings, EarlierLives
from ttp.controller.journal import read_events
from ttp.errors import ControllerError
from ttp.proto.messages import Freeze, Registration, Welcome
from ttp.proto.transport import open_channel

from .conftest import LONG_S, StartController
from .test_server import RawStream, registration


def test_it_names_the_term_and_the_generation_of_the_rank_that_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    done = threading.Event()

    def request(address: str, **named: Any) -> None:
        asked.update(named, address=address)
        done.set()

    monkeypatch.setattr(program, "request_shutdown", request)
    program.supersede(ControllerSettings("job", 3, 4, lease_s=6.0), "a:1", 7)
    assert done.wait(30)
    assert (asked["address"], asked["job_id"], asked["term"], asked["generation"]) == ("a:1", "job", 3, 7)
    assert asked["timeout_s"] == pytest.approx(2.0), "it is withdrawn after a third of a lease"


@pytest.mark.parametrize("lives", [True, False])
def test_one_that_answers_is_found(monkeypatch: pytest.MonkeyPatch, lives: bool) -> None:
    found = list[EarlierLives]()

    def look(address: str, **named: Any) -> None:
        assert named == {"job_id": "job", "term": 3, "timeout_s": 30.0}
        if not lives:
            raise ControllerError("it is gone")

    monkeypatch.setattr(program, "look_for_controller", look)
    program.look_for(ControllerSettings("job", 3, 4), "a:1", found.append)
    until(lambda: not any(thread.name == "ttp-supersede" for thread in threading.enumerate()), "its thread has ended")
    assert found == ([EarlierLives("a:1")] if lives else [])


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


def takeovers(journal: Path) -> list[Any]:
    return [line.fields for line in read_events(journal) if line.event == "took_over"]
