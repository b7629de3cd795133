"""Which lines of a story.jsonl belong to the current job, and what they add."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ttp.launch.report.merge import earlier, of_this_job
from ttp.launch.report.reporter import AttemptStart, Reporter

from .test_reporter import KILLED_AT_S, ending, put, written


def line(unix_s: float, event: str, start: int, **fields: object) -> dict[str, Any]:
    return {"unix_s": unix_s, "event": event, "start": start, "began_unix_s": unix_s, **fields}


END: dict[str, Any] = {"unix_s": 9.0, "event": "end"}


def test_an_earlier_job_in_the_same_file_is_left_out() -> None:
    """It may have ended, or all its launchers may have been killed; its attempts had the same numbers."""
    mine = [line(10.0, "start", 0), line(12.0, "fault", 0), line(15.0, "start", 1)]
    ended = [line(1.0, "start", 0), line(2.0, "fault", 0), END]
    killed = [[line(1.0, "start", 0), line(2.0, "fault", 0), line(3.0, "start", 1)], [line(1.0, "start", 0)]]
    for before in (ended, *killed):
        assert of_this_job([*before, *mine], 1) == mine
    assert of_this_job([*ended, *mine[1:]], 1) == mine[1:], "an attempt that ended before its table was reported"
    assert of_this_job([line(1.0, "fault", 0), END], 0) == []


def test_the_job_of_a_launcher_that_left_goes_on() -> None:
    """Its summary stands in the middle."""
    lines = [line(1.0, "start", 0), line(2.0, "fault", 0), END, line(5.0, "start", 1)]
    assert of_this_job(lines, 1) == [lines[0], lines[1], lines[3]]
    held = [{"unix_s": 1.5, "event": event, "start": 0} for event in ("hold", "held", "again")]
    assert of_this_job([lines[0], *held, *lines[1:]], 1) == [lines[0], lines[1], lines[3]]


def test_faults_that_others_reported_count_until_the_next_attempt() -> None:
    """Not those that were reported here."""
    lines = [line(1.0, "start", 0), line(2.0, "fault", 0), line(5.0, "start", 1), line(7.0, "fault", 1)]
    found = earlier(lines, own={1}, last=1)
    assert found.faults == (lines[1],) and found.lost_s == 3.0 and found.begun_unix_s == 1.0
    assert earlier(lines[2:], own={1}, last=1).begun_unix_s is None


def test_a_step_that_was_saved_from_copies_corrects_the_fault_that_another_reported() -> None:
    fault = line(2.0, "fault", 0, steps_lost=20)
    lines = [line(1.0, "start", 0), fault, line(4.0, "copies", 0, steps_lost=1), line(5.0, "start", 1)]
    assert earlier(lines, own={1}, last=1).faults == ({**fault, "steps_lost": 1},)


def test_steps_that_others_saw_trained_again_are_added_up() -> None:
    """Those of this job, and not those that were reported here."""
    before = [line(0.1, "start", 0), line(0.2, "again", 0, steps=100), END]
    lines = [line(1.0, "start", 0), line(2.0, "fault", 0), line(5.0, "start", 1), line(6.0, "again", 1, steps=3)]
    assert earlier([*before, *lines], own={2}, last=2).again == {1: 3}
    assert earlier([*before, *lines], own={1}, last=1).again == {}
    assert earlier([], own=(), last=0).again == {}


def test_repeated_steps_count_once_where_the_end_of_their_attempt_is_not_known(tmp_path: Path) -> None:
    """It went back, its journal is lost and no node has reported it: the file is read for the others' reports, and has our own line."""
    reporter = Reporter(clock=lambda: KILLED_AT_S + 2.0)
    reporter.begin(here=True)
    reporter.end(put("killed", tmp_path), replace(ending(tmp_path, rank_2="signal SIGKILL"), first_step=1))
    reporter.begin(here=True)
    unknown = replace(ending(tmp_path), first_step=1, elsewhere=None)
    reporter.end(AttemptStart(number=1, begun_unix_s=KILLED_AT_S + 1.0), unknown)
    reporter.finish("failed")
    end = written(tmp_path / "story.jsonl")[-1]
    assert (end["untold_starts"], end["steps_again"], end["steps_lost"]) == ([1], 7, 7)
