"""Where a job's time went, as agents sum it up at its end and `ttp status` reads it afterwards."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.launch.test_reporter import ending, written
from tests.unit.status.jobs import BEGAN, comes, incident, journal
from ttp.exchange import last_step, time_marks
from ttp.exchange.last_step import LastStep
from ttp.launch.report.reporter import AttemptStart, Reporter
from ttp.status import history
from ttp.status.goodput import job_time

ATTEMPTS = (AttemptStart(number=0, begun_unix_s=BEGAN - 1.0), AttemptStart(number=1, begun_unix_s=BEGAN + 15.0))


class Clock:
    def __init__(self) -> None:
        self.now = BEGAN - 2.0

    def __call__(self) -> float:
        return self.now


def marks(log_dir: Path, attempt: int, *lines: tuple[float, str, int, float]) -> None:
    text = [json.dumps({"unix_s": BEGAN + at, "event": event, "step": step, "took_s": took}) for at, event, step, took in lines]  # fmt: skip
    time_marks.path_of(log_dir, attempt).write_text("".join(f"{line}\n" for line in text))


def files(log_dir: Path) -> None:
    """A rank is killed at 10.5 s, which the controller sees at 11 s; step 41 is the first one of the second attempt, at 22 s, and 200 the last at 54 s."""
    at, event, fields = incident(12.0, 1.0, 40)
    decided = (11.2, "decided", {"freeze_id": 1, "step": 40, "able": [0], "roll_forward": []})
    journal(log_dir, 0, *comes(0.0), decided, (at, event, {**fields, "goes_on_from": fields["saved"]["path"]}))
    marks(log_dir, 0, (2.0, "stepped", 1, 0.0), (6.0, "saved", 20, 1.5))
    journal(log_dir, 1, *comes(19.0), (54.0, "finished", {"ranks": 2}))
    marks(log_dir, 1, (22.0, "stepped", 41, 0.0), (30.0, "saved", 60, 2.0))
    last_step.write(log_dir, 1, LastStep(200, 200))


def first_attempt(reporter: Reporter, clock: Clock, log_dir: Path) -> None:
    reporter.begin(here=True, number=0)
    clock.now = BEGAN + 12.5
    reporter.end(ATTEMPTS[0], replace(ending(log_dir, rank_1="signal SIGKILL"), first_exit_unix_s=BEGAN + 10.5))


def second_attempt(reporter: Reporter, clock: Clock, log_dir: Path, first_step: int | None = None) -> dict[str, Any]:
    """Have it end well, 4 s after training has, and return the last line."""
    reporter.begin(here=True, number=1)
    reporter.end(ATTEMPTS[1], replace(ending(log_dir), succeeded=True, first_step=first_step))
    clock.now = BEGAN + 58.0
    reporter.finish("succeeded")
    end: dict[str, Any] = written(log_dir / "story.jsonl")[-1]
    return end


PARTS = {"start": 4.0, "steps": 7.0 + 30.0, "saves": 3.5, "decide": 1.5, "restart": 10.0, "end": 4.0}
"""In seconds. The incident has no stages: its time, from the agent's first sign on, is all deciding."""


def seconds_of(use: Any, ranks: int = 2) -> dict[str, Any]:
    assert sum(use["rank_s"].values()) == pytest.approx(ranks * use["whole_s"]) and use["ranks"] == ranks
    return {part: pytest.approx(rank_s / ranks) for part, rank_s in use["rank_s"].items() if rank_s}


def test_the_summary_says_where_the_time_went_from_the_agents_beginning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files(tmp_path)
    clock = Clock()
    first_attempt(reporter := Reporter(clock=clock), clock, tmp_path)
    end = second_attempt(reporter, clock, tmp_path)
    assert end["lasted_s"] == end["time_use"]["whole_s"] == 60.0
    assert seconds_of(end["time_use"]) == PARTS
    printed = capsys.readouterr().err
    assert (
        "\ntime    61.7 % of 60.0 s x 2 ranks went into new steps; start 6.7 % (4.0 s), saves 5.8 % (3.5 s), "
        in printed
    )


def test_the_status_of_a_job_that_has_ended_is_its_summary(tmp_path: Path) -> None:
    files(tmp_path)
    clock = Clock()
    first_attempt(reporter := Reporter(clock=clock), clock, tmp_path)
    end = second_attempt(reporter, clock, tmp_path)
    use = job_time(known := history.read(tmp_path), clock.now, None)
    assert known.notes == () and use is not None
    assert (use.whole_s, dict(use.rank_s)) == (60.0, end["time_use"]["rank_s"])
    for path in tmp_path.glob("journal_*"):
        path.unlink()
    assert job_time(history.read(tmp_path), clock.now, None) == use, "as on a node without journals"


def test_of_a_job_that_runs_the_launchers_moments_count_beside_the_journals(tmp_path: Path) -> None:
    """The first attempt is as its agent has reported it, the second as its journal has it."""
    files(tmp_path)
    journal_of_1 = tmp_path / "journal_1.jsonl"
    journal_of_1.write_text("".join(journal_of_1.read_text().splitlines(keepends=True)[:-1]))
    first_attempt(Reporter(clock=(clock := Clock())), clock, tmp_path)
    use = job_time(history.read(tmp_path), BEGAN + 50.0, None)
    assert use is not None and use.whole_s == 52.0
    parts = {"start": 4.0, "steps": 7.0 + 26.0, "saves": 3.5, "decide": 1.5, "restart": 10.0}
    assert {part: pytest.approx(rank_s / 2) for part, rank_s in use.rank_s.items() if rank_s} == parts


def test_without_the_agents_moments_the_journals_and_the_report_of_the_fault_count(tmp_path: Path) -> None:
    """As an earlier version has written the report."""
    files(tmp_path)
    first_attempt(Reporter(clock=(clock := Clock())), clock, tmp_path)
    path = tmp_path / "story.jsonl"
    lines = [{key: value for key, value in line.items() if key != "time"} for line in written(path)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    use = job_time(history.read(tmp_path), BEGAN + 54.0, None)
    assert use is not None and use.whole_s == 54.0, "since the first rank came"
    parts = {"start": 2.0, "steps": 7.0 + 30.0, "saves": 3.5, "decide": 1.5, "restart": 10.0}
    assert {part: pytest.approx(rank_s / 2) for part, rank_s in use.rank_s.items() if rank_s} == parts


def test_what_the_launcher_takes_for_no_fault_costs_no_time(tmp_path: Path) -> None:
    """Workers that exit with code 0 without a word are dead to their controller: no fault is counted."""
    journal(tmp_path, 0, *comes(0.0), incident(12.0, 1.0, None))
    reporter = Reporter(clock=(clock := Clock()))
    reporter.begin(here=True, number=0)
    clock.now = BEGAN + 13.0
    reporter.end(ATTEMPTS[0], replace(ending(tmp_path), succeeded=True, pids={1: 71}))
    reporter.finish("succeeded")
    end = written(tmp_path / "story.jsonl")[-1]
    assert seconds_of(end["time_use"]) == {"start": 3.0, "steps": 12.0}
    lines = [
        {**line, "time_use": None} if line["event"] == "end" else line for line in written(tmp_path / "story.jsonl")
    ]
    (tmp_path / "story.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    use = job_time(history.read(tmp_path), BEGAN + 13.0, None)
    assert use is not None and use.rank_s["steps"] == 24.0


def test_an_agent_that_leads_later_has_the_earlier_attempts_time_from_the_report(tmp_path: Path) -> None:
    files(tmp_path)
    first_attempt(Reporter(clock=(clock := Clock())), clock, tmp_path)
    clock.now = BEGAN + 14.0
    end = second_attempt(Reporter(tmp_path / "story.jsonl", clock), clock, tmp_path)
    assert seconds_of(end["time_use"]) == PARTS and end["lasted_since"] == 0


def test_an_attempt_that_another_agent_has_not_reported_is_not_known(tmp_path: Path) -> None:
    files(tmp_path)
    clock = Clock()
    clock.now = BEGAN + 14.0
    end = second_attempt(Reporter(tmp_path / "story.jsonl", clock), clock, tmp_path)
    assert end["time_use"] is None and end["lasted_since"] == 1


def test_steps_that_were_repeated_though_they_were_saved_count_as_repeated(tmp_path: Path) -> None:
    """The second attempt has begun with step 31, though 40 was saved: 10 steps, of which the first one's time is the restart's."""
    files(tmp_path)
    marks(tmp_path, 1, (22.0, "stepped", 31, 0.0))
    clock = Clock()
    first_attempt(reporter := Reporter(clock=clock), clock, tmp_path)
    end = second_attempt(reporter, clock, tmp_path, first_step=31)
    use = end["time_use"]
    assert (use["steps_again"], use["certain"]) == (10, True)
    assert use["rank_s"]["repeated"] / 2 == pytest.approx(9 * 32.0 / (200 - 31))


def test_of_a_job_without_a_session_nothing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(path := tmp_path / "events.jsonl", clock := Clock())
    reporter.begin(here=True, number=0)
    reporter.end(ATTEMPTS[0], replace(ending(None), succeeded=True))
    clock.now += 9.0
    reporter.finish("succeeded")
    assert written(path)[-1]["time_use"] is None and "\ntime" not in capsys.readouterr().err
