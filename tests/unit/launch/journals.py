"""Real journals of small jobs (paths shortened), for the tests of what is reported of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ttp.launch.report.incident import AttemptEnd, Report, report_of
from ttp.launch.report.journals import Line

JOURNALS = Path(__file__).parent / "journals"
NOTHING = AttemptEnd(log_dir=None, exits={}, first_exit_unix_s=None, next="", pids={})


def journal(name: str) -> list[Line]:
    """Return the lines of a journal whose attempt had one controller."""
    text = (JOURNALS / f"{name}.jsonl").read_text(encoding="utf-8")
    return [{**json.loads(line), "controller": 0} for line in text.splitlines()]


def reported(lines: list[Line], start: int = 0, **known: Any) -> Report:
    """Return the report of an attempt's lines. known: fields of Ending."""
    report = report_of(start, lines, replace(NOTHING, **known))
    assert report is not None
    return report


def unended(name: str) -> list[Line]:
    """Return a journal's lines as they are when its controllers were lost before the fault's end."""
    lines = journal(name)
    return lines[: next(number for number, one in enumerate(lines) if one["event"] == "decided")]
