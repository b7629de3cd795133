"""A rank that becomes slow, and that is not any more: a line each of `ttprun`, and an event each, by what the controllers' journals have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.launch.test_reporter import ending, written
from ttp.launch.report.reporter import AttemptStart, Reporter
from ttp.launch.report.slow_ranks import ENDED, NAMED, NEW_CONTROLLER, OVER, slow_rank_events

ASSEMBLED = {"world_size": 4, "survives": "any 1 of 4 ranks", "standbys": [], "warnings": [], "rows": []}
SLOW = {"rank": 2, "host": "b", "ratio": 1.21, "own_s": 0.121, "others_s": 0.1, "since_step": 96, "step": 208}
START = AttemptStart(number=0, begun_unix_s=0.0)


class Journals:
    """Those of an attempt, line by line."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir, self._unix_s = log_dir, 1000.0

    def add(self, event: str, fields: dict[str, Any], file: str = "journal_0") -> None:
        self._unix_s += 1.0
        with (self._log_dir / f"{file}.jsonl").open("a") as out:
            out.write(json.dumps({"unix_s": self._unix_s, "event": event, "fields": fields}) + "\n")


@pytest.fixture
def journals(tmp_path: Path) -> Journals:
    found = Journals(tmp_path)
    found.add("assembled", ASSEMBLED)
    return found


class Reported:
    """A reporter on the node of rank 0 (`here`), and what it gives to the command on events."""

    def __init__(self, log_dir: Path, *, here: bool = True) -> None:
        self._log_dir = log_dir
        self.events: list[dict[str, Any]] = []
        self.reporter = Reporter(on_event=lambda line: self.events.append(json.loads(line)))
        self.reporter.begin(here)

    def look(self) -> list[dict[str, Any]]:
        """Return the events of slow ranks that come with some looks into the journals."""
        before = len(self.events)
        for _ in range(3):
            self.reporter.follow(START, self._log_dir)
        return [event for event in self.events[before:] if event["event"] in (NAMED, OVER)]


def test_one_line_and_one_event_when_a_rank_becomes_slow_and_when_it_is_over(
    journals: Journals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = Reported(tmp_path)
    assert here.look() == []
    journals.add("straggler", SLOW)
    (named,) = here.look()
    assert {name: named[name] for name in SLOW} == SLOW and (named["event"], named["start"]) == ("straggler", 0)
    journals.add("saved", {})
    assert here.look() == []
    journals.add("straggler_over", {**SLOW, "step": 368, "why": "as fast as the others again"})
    (over,) = here.look()
    assert (over["event"], over["rank"], over["step"]) == ("straggler_over", 2, 368)
    here.reporter.end(START, ending(tmp_path))
    slow = [line for line in capsys.readouterr().err.splitlines() if line.startswith("slow")]
    assert slow == [
        "slow    rank 2 on node b: 1.21 times the others' own time of a step (0.121 s, theirs 0.1 s) since step 96; they wait for it",
        "slow    rank 2 on node b: over at step 368: as fast as the others again",
    ]
    lines = written(tmp_path / "story.jsonl")
    assert [line["event"] for line in lines] == ["start", "straggler", "straggler_over"] and lines[1:] == [named, over]


def test_every_begin_has_an_end_whatever_becomes_of_the_controller(journals: Journals, tmp_path: Path) -> None:
    """Another controller measures anew, and so does another attempt: what it names then is named again."""
    here = Reported(tmp_path)
    journals.add("straggler", SLOW)
    journals.add("took_over", {}, "standby_0_1")
    assert [(event["event"], event.get("why")) for event in here.look()] == [(NAMED, None), (OVER, NEW_CONTROLLER)]
    journals.add("straggler", {**SLOW, "step": 500}, "standby_0_1")
    assert [(event["event"], event["step"]) for event in here.look()] == [(NAMED, 500)]
    here.reporter.end(START, ending(tmp_path))
    (over,) = [event for event in here.events if event.get("why") == ENDED]
    assert (over["event"], over["rank"]) == (OVER, 2) and here.events.count(over) == 1
    here.reporter.begin(True)
    (tmp_path / "journal_1.jsonl").write_text((tmp_path / "journal_0.jsonl").read_text())
    later = AttemptStart(number=1, begun_unix_s=0.0)
    for _ in range(2):
        here.reporter.follow(later, tmp_path)
    assert (here.events[-1]["event"], here.events[-1]["start"]) == (NAMED, 1)


def test_a_short_attempt_is_reported_at_its_end(journals: Journals, tmp_path: Path) -> None:
    here = Reported(tmp_path)
    journals.add("straggler", SLOW)
    here.reporter.end(START, ending(tmp_path))
    assert [event["event"] for event in here.events] == ["start", NAMED, OVER]


def test_what_another_node_reports_is_not_an_event_here(journals: Journals, tmp_path: Path) -> None:
    """Its agent has done so: also where that node is lost, and this one reports the attempt in its place."""
    journals.add("straggler", SLOW)
    elsewhere = Reported(tmp_path, here=False)
    elsewhere.reporter.end(START, ending(tmp_path))
    elsewhere.reporter.begin(True)
    assert [event["event"] for event in elsewhere.events if event["event"] in (NAMED, OVER)] == []
    assert elsewhere.reporter._reported == {0}


def test_a_standby_that_led_from_another_nodes_own_disk_is_not_an_event_there(tmp_path: Path) -> None:
    """That node's agent reports the fault, which nothing else has; what was slow before is over then."""
    own = Journals(tmp_path)
    own.add("takeover_began", {}, "standby_0_1")
    own.add("straggler", SLOW, "standby_0_1")
    elsewhere = Reported(tmp_path, here=False)
    elsewhere.reporter.end(START, ending(tmp_path))
    assert elsewhere.reporter._reported == {0}
    assert [event["event"] for event in elsewhere.events if event["event"] in (NAMED, OVER)] == []


def test_an_end_without_a_begin_is_none() -> None:
    """A journal whose first lines were lost."""
    line = {"unix_s": 1.0, "event": OVER, "fields": {**SLOW, "why": "x"}, "controller": 0}
    assert slow_rank_events(0, [line], ended=True) == []


def test_what_a_takeover_has_ended_does_not_end_again() -> None:
    events = [(NAMED, SLOW), ("took_over", {}), (OVER, {**SLOW, "why": "x"})]
    lines = [{"unix_s": 1.0, "event": event, "fields": fields, "controller": 0} for event, fields in events]
    assert [event for event, _ in slow_rank_events(0, lines, ended=True)] == [NAMED, OVER]
