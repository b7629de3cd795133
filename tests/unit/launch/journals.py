"""Real journals of small jobs (paths shortened), for the tests of what is told of them."""

from __future__ import annotations

import json
from pathlib import Path

from ttp.launch.fault_story import FaultStory, Line, fault_of

JOURNALS = Path(__file__).parent / "journals"


def journal(name: str) -> list[Line]:
    """Return the lines of a journal whose start had one controller."""
    text = (JOURNALS / f"{name}.jsonl").read_text(encoding="utf-8")
    return [{**json.loads(line), "controller": 0} for line in text.splitlines()]


def story(name: str, exits: dict[int, str] | None = None) -> FaultStory:
    told = fault_of(0, journal(name), exits or {})
    assert told is not None
    return told
