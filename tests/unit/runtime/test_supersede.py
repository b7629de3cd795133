"""The request with which a controller that takes over ends the earlier ones."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ttp.controller import __main__ as program
from ttp.controller.core.facts.events import ControllerSettings


def test_it_names_the_term_and_the_generation_of_the_rank_that_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    done = threading.Event()

    def request(address: str, **named: Any) -> None:
        asked.update(named, address=address)
        done.set()

    monkeypatch.setattr(program, "request_shutdown", request)
    program.supersede(ControllerSettings("job", 3, 4), "a:1", 7)
    assert done.wait(30)
    assert (asked["address"], asked["job_id"], asked["term"], asked["generation"]) == ("a:1", "job", 3, 7)
