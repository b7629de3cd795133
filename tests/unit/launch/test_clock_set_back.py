"""What is reported of an attempt in which the clock was set back: all that was saved."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.unit.launch.journals import journal
from tests.unit.launch.test_reporter import KILLED_AT_S, ending, written
from tests.unit.launch.test_saved_alone_report import STEP, account, published
from ttp.exchange import last_step, saved_alone, time_marks
from ttp.exchange.last_step import LastStep
from ttp.launch.report.journals import read_journals
from ttp.launch.report.reporter import AttemptStart, Reporter

BACK_S = 3600.0
LINES = journal("killed")
BEGUN_S = float(LINES[0]["unix_s"]) - 1.0
FALSE_ALARM = [
    {"unix_s": float(LINES[5]["unix_s"]) + later_s, "event": event, "fields": fields}
    for later_s, event, fields in (
        (0.001, "freeze_sent", {"culprits": [1], "kind": "silent", "text": "nothing was received"}),
        (0.002, "thawed", {}),
    )
]


def write(log_dir: Path, lines: Sequence[Any], name: str = "journal_0.jsonl") -> None:
    with open(log_dir / name, "a") as file:
        file.writelines(json.dumps({**line, "controller": None}) + "\n" for line in lines)


def set_back(lines: Sequence[Any], by_s: float = BACK_S) -> list[dict[str, Any]]:
    return [{**line, "unix_s": line["unix_s"] - by_s} for line in lines]


def fault_of(log_dir: Path, attempt: AttemptStart, *, here: bool = True) -> dict[str, Any]:
    """Report an attempt of which a rank was killed; return the line of its fault."""
    story = log_dir / "story.jsonl"
    story.unlink(missing_ok=True)
    reporter = Reporter(story, clock=lambda: KILLED_AT_S + 2.0)
    reporter.begin(here=here)
    reporter.end(attempt, ending(log_dir, rank_2="signal SIGKILL"))
    (found,) = [line for line in written(story) if line["event"] == "fault"]
    return found


def began_elsewhere(begun_unix_s: float = BEGUN_S, back_s: float = 0.0) -> AttemptStart:
    """An attempt whose rank 0 came from another node: an earlier launch's files may be here. `back_s`: so far was the clock set back since."""
    return AttemptStart(number=0, begun_unix_s=begun_unix_s, clock_s=time.time() - time.monotonic() + back_s)


@pytest.mark.parametrize("place", range(1, len(LINES)))
def test_lines_behind_a_clock_that_was_set_back_are_the_attempts(tmp_path: Path, place: int) -> None:
    """Wherever it was; and what was a false alarm before it does not hide the fault behind it."""
    lines = [*LINES[:6], *FALSE_ALARM, *LINES[6:]]
    write(tmp_path, [*lines[:place], *set_back(lines[place:])])
    read = read_journals(tmp_path, 0, BEGUN_S)
    assert [line["event"] for line in read] == [line["event"] for line in lines]
    assert fault_of(tmp_path, began_elsewhere())["saved"]["step"] == 7


def test_the_times_of_a_controller_go_on_where_its_clock_was_set_back(tmp_path: Path) -> None:
    lines = [{"unix_s": at_s, "event": "suspect", "fields": {}} for at_s in (50.0, 60.0, 20.0, 25.0, 5.0, 70.0)]
    write(tmp_path, lines)
    assert [line["unix_s"] for line in read_journals(tmp_path, 0, 0.0)] == [50.0, 60.0, 60.0, 65.0, 65.0, 130.0]


def test_where_rank_zero_has_begun_the_attempt_all_files_are_the_attempts_by_any_clock(tmp_path: Path) -> None:
    """It has moved an earlier launch's away: also lines that are older than the begin, as the clock was set back at once, are this launch's."""
    start = AttemptStart(number=0, begun_unix_s=KILLED_AT_S + BACK_S, begins_here=True)
    write(tmp_path, LINES)
    assert fault_of(tmp_path, start)["saved"]["step"] == 7
    saved_alone.write(saved_alone.path_of(tmp_path, 0), account(published(tmp_path)))
    assert fault_of(tmp_path, start)["saved"]["step"] == STEP


def test_the_last_step_and_the_times_count_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = AttemptStart(number=0, begun_unix_s=time.time() + BACK_S, begins_here=True)
    write(tmp_path, LINES[:6])
    mark = {"unix_s": KILLED_AT_S, "event": time_marks.SAVED, "step": 3, "took_s": 0.5}
    time_marks.path_of(tmp_path, 0).write_text(json.dumps(mark) + "\n")
    last_step.write(tmp_path, 0, LastStep(9, 9))
    reporter = Reporter(tmp_path / "story.jsonl", clock=count(start.begun_unix_s).__next__)
    reporter.begin(here=True)
    reporter.end(start, replace(ending(tmp_path), succeeded=True))
    reporter.finish("succeeded")
    end = written(tmp_path / "story.jsonl")[-1]
    assert end["last"] == {"step": 9, "saved_step": 9}
    assert "saves 25.0 % (0.500 s)" in capsys.readouterr().err


def test_on_another_node_the_begin_is_by_the_clock_of_now_too(tmp_path: Path) -> None:
    """All lines came after the clock was set back."""
    begun_s = time.time()
    write(tmp_path, set_back(LINES, float(LINES[0]["unix_s"]) - begun_s + BACK_S - 10.0))
    assert fault_of(tmp_path, began_elsewhere(begun_s))["saved"] is None
    assert fault_of(tmp_path, began_elsewhere(begun_s, BACK_S))["saved"]["step"] == 7


def test_on_another_node_a_clock_that_was_set_forward_leaves_no_line_out(tmp_path: Path) -> None:
    write(tmp_path, LINES)
    assert fault_of(tmp_path, began_elsewhere(back_s=-BACK_S))["saved"]["step"] == 7


def test_an_earlier_launch_s_lines_on_another_node_are_not_the_attempts(tmp_path: Path) -> None:
    write(tmp_path, LINES)
    later = [{**LINES[0], "unix_s": KILLED_AT_S + 100.0}]
    write(tmp_path, later)
    assert [line["unix_s"] for line in read_journals(tmp_path, 0, KILLED_AT_S + 99.0)] == [KILLED_AT_S + 100.0]


def test_of_lines_that_were_left_out_the_report_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It does not say that nothing was saved."""
    write(tmp_path, LINES)
    assert fault_of(tmp_path, began_elsewhere(KILLED_AT_S + 50.0))["not_saved"] == (
        f"not known on this node: the journals of attempt 0 in {tmp_path} are from before its begin by this node's clock, and were left out."
        " They may be an earlier launch's. If a clock was set back, read in them what was saved"
    )
    assert "saved   not known on this node: the journals" in capsys.readouterr().err
    (tmp_path / "journal_0.jsonl").unlink()
    nothing = fault_of(tmp_path, began_elsewhere(KILLED_AT_S + 50.0))["not_saved"]
    assert nothing == "no controller on this node led the ranks"
    write(tmp_path, LINES[:6])
    assert fault_of(tmp_path, began_elsewhere())["not_saved"] == "the journal has no fault"


def test_while_the_attempt_runs_its_lines_count_in_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of shards, and what comes after it."""
    start = AttemptStart(number=0, begun_unix_s=KILLED_AT_S + BACK_S, begins_here=True)
    followed: list[int] = []
    monkeypatch.setattr(
        Reporter, "_report_recoveries", lambda self, attempt, lines, log_dir: followed.append(len(lines))
    )
    write(tmp_path, LINES[:6])
    reporter = Reporter(tmp_path / "story.jsonl")
    reporter.begin(here=True)
    for _ in range(2):
        reporter.follow(start, tmp_path)
    assert [line["event"] for line in written(tmp_path / "story.jsonl")] == ["start"] and followed == [6]


def test_a_standby_that_led_on_another_node_is_reported_after_its_clock_was_set_back(tmp_path: Path) -> None:
    begun_s = time.time()
    lines = set_back(LINES, float(LINES[0]["unix_s"]) - begun_s + BACK_S - 10.0)
    took_over = {**lines[0], "event": "took_over", "fields": {}}
    write(tmp_path, [took_over, *lines], "standby_0_1.jsonl")
    assert fault_of(tmp_path, began_elsewhere(begun_s, BACK_S), here=False)["saved"]["step"] == 7
