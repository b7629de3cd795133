"""What a campaign prints while it runs, and what a test that has the fixture shows at its end."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.unit.chaos.test_judge import campaign, good_run
from ttp.chaos import cli, fixture
from ttp.chaos.cli import main
from ttp.chaos.fixture import RunChaos, chaos
from ttp.chaos.observed.recorder import Record
from ttp.chaos.report.terminal import Screen, incident_line, show_summary
from ttp.chaos.run.campaign import Campaign, JobRun, Soak
from ttp.chaos.verdict.invariants import VIOLATED, judge

__all__ = ["chaos"]

PRINTED = "fault 1: kill of rank 1: saved step 5, 0 steps lost (published after 200 ms, first new step after 5,000 ms)"


def print_on(console: Console, made: Campaign) -> None:
    """Follow a campaign's incidents, each of them looked at twice."""
    incidents = made.incidents
    harness: Any = SimpleNamespace(incidents=incidents, record=made.runs[0].run.record)
    with Screen(console) as screen:
        for incident in (None, *incidents, *incidents):
            screen.on_progress(harness, incident)


def wrong_bits(record: Record) -> None:
    record.steps[-1] = replace(record.steps[-1], grad_norm=(1.5).hex())


def test_a_file_gets_a_line_a_fault_and_each_once(tmp_path: Path) -> None:
    """With what became of it, what was lost, and when."""
    file = io.StringIO()
    made = campaign(tmp_path)
    print_on(Console(file=file, width=200), made)
    assert file.getvalue().splitlines() == [PRINTED, "fault 2: kill of rank random: not reached"]
    assert incident_line(made.incidents[0]) == PRINTED


def test_a_terminal_gets_a_table_that_grows_and_where_the_job_stands(tmp_path: Path) -> None:
    """The stages of each fault, and below the step that the job has reached."""
    file = io.StringIO()
    print_on(Console(file=file, width=160, force_terminal=True, color_system=None), campaign(tmp_path))
    text = file.getvalue()
    for words in (
        "first new step",
        "kill of rank 1",
        "saved",
        "200 ms",
        "not reached",
        "training; step 8; 2 attempts of 2",
    ):
        assert words in text, text


def test_the_summary_has_every_fault_and_the_runs_that_are_not_good(tmp_path: Path) -> None:
    """Of good runs the last one's verdicts."""
    made = campaign(tmp_path)
    bad = good_run(wrong_bits)
    made.runs.append(JobRun(1, tmp_path, bad, judge(bad), 1.0))
    good = good_run()
    made.runs.append(JobRun(2, tmp_path, good, judge(good), 1.0))
    file = io.StringIO()
    show_summary(Console(file=file, width=200), made)
    text = file.getvalue()
    assert text.count("kill of rank 1") == 3 and "run 1: " in text and VIOLATED in text
    assert "run 0: " not in text and "run 2: " not in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, ["did not happen: kill of rank random: 0 of 1 injections", "did not happen: kill of rank 1: 1 of 2"]),
        (wrong_bits, ["did not happen: kill of rank random", "I3 same bytes: step 8, rank 1: grad norm 0x1.8"]),
    ],
)
def test_the_fixture_fails_a_test_whose_job_lost_something_with_its_seed_and_output(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chaos: RunChaos,
    change: Callable[[Record], None] | None,
    words: list[str],
) -> None:
    """A fault that did not happen proves nothing, and fails as well."""
    made = campaign(tmp_path)
    made.incidents[0].planned = 2
    (tmp_path / "console.log").write_text("the job's last words")
    if change is not None:
        bad = good_run(change)
        made.runs.append(JobRun(1, tmp_path, bad, judge(bad), 1.0))
    asked: list[Any] = []

    def run_campaign(scenario: Any, command: Any, output: Path) -> list[Campaign]:
        asked.append((scenario.seed, [fault.kind for fault in scenario.faults], list(command)))
        return [made]

    monkeypatch.setattr(fixture, "run_campaign", run_campaign)
    with pytest.raises(pytest.fail.Exception) as failed:
        chaos(["ttprun", "train.py"], [{"fault": "kill"}], seed=7)
    assert asked == [(7, ["kill"], ["ttprun", "train.py"])]
    for text in ("seed 7", *words, "the job's last words"):
        assert text in str(failed.value)


@pytest.mark.parametrize(
    ("reached", "planned", "change", "status", "words"),
    [
        (True, 1, None, 0, "HELD: 1 faults, 1 injections"),
        (False, 1, None, 3, "1 of 2 faults did not happen"),
        (True, 2, None, 3, "1 of 1 faults did not happen, or not with all injections"),
        (False, 2, None, 3, "2 of 2 faults did not happen"),
        (False, 1, wrong_bits, 1, "VIOLATED (seed 7)"),
    ],
)
def test_the_exit_status_says_whether_all_held_and_all_happened(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reached: bool,
    planned: int,
    change: Callable[[Record], None] | None,
    status: int,
    words: str,
) -> None:
    """A violation goes before a fault that did not happen; in each case there are a result and a report. A soak is an hour's sixty faults."""
    made = campaign(tmp_path)
    run = good_run(change) if change else made.runs[0].run
    run.incidents[0].planned = planned
    incidents = run.incidents[:1] if reached else made.runs[0].run.incidents
    run = replace(run, incidents=incidents)
    made.runs[:] = [JobRun(0, tmp_path, run, judge(run), 1.0)]
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text("{seed: 7, faults: [{fault: kill}]}")
    output = tmp_path / "out"
    output.mkdir()
    asked: list[Any] = []

    def run_campaign(*words: Any, soak: Soak | None, **more: Any) -> list[Campaign]:
        asked.append(soak)
        return [replace(made, output=output)]

    monkeypatch.setattr(cli, "run_campaign", run_campaign)
    given = ["run", str(scenario), "--output", str(output), "--duration", "30m", "--", "ttprun", "train.py"]
    assert main(given) == status
    assert asked == [Soak(1800.0, 60.0)]
    assert words in capsys.readouterr().out
    assert (output / "result.json").exists() and (output / "report.html").exists()


def test_the_kinds_are_listed_with_their_points_and_outcomes(capsys: pytest.CaptureFixture[str]) -> None:
    """A line of the table each."""
    assert main(["faults"]) == 0
    output = capsys.readouterr().out
    (row,) = [line for line in output.splitlines() if "slowdisk" in line]
    assert "write publish" in row and "unharmed or saved" in row and "events for `then`: suspect" in output
