"""What the summary of a job says of its last step, and of steps that were trained again."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.unit.launch.test_reporter import KILLED_AT_S, ending, put, written
from ttp.exchange import last_step
from ttp.exchange.last_step import LastStep
from ttp.launch.report.reporter import AttemptStart, Reporter


def test_the_last_line_is_of_the_step_where_training_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job that ends without a fault has lost nothing only if rank 0 has reported that its last step is on disk."""
    printed = []
    for number, last in enumerate((None, LastStep(9, 0), LastStep(9, 9))):
        folder = tmp_path / str(number)
        folder.mkdir()
        reporter = Reporter(clock=lambda: KILLED_AT_S + 2.0)
        reporter.begin(here=True)
        start, calm = put("killed", folder), folder / "journal_0.jsonl"
        lines = calm.read_text().splitlines(keepends=True)
        assembled = next(place for place, line in enumerate(lines) if '"assembled"' in line)
        calm.write_text("".join(lines[: assembled + 1]))
        if last is not None:
            last_step.write(folder, 0, last)
        reporter.end(start, replace(ending(folder), succeeded=True))
        reporter.finish("succeeded")
        printed.append(capsys.readouterr().err.splitlines()[-1])
        assert written(folder / "story.jsonl")[-1]["last"] == (last and asdict(last))
    assert printed == [
        "lost    unknown: no rank has reported its last step",
        "lost    no checkpoint on disk of the last 9 steps, up to step 9 (TTP wrote none)",
        "lost    nothing",
    ]


def test_steps_that_are_trained_again_after_a_broken_checkpoint_are_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The fault's report had no lost step, and its checkpoint was not usable: the summary corrects that."""
    caplog.set_level(logging.WARNING, "ttp.launch")
    for first_step, lost in ((8, 0), (None, 0), (7, 1), (1, 7)):
        folder = tmp_path / str(first_step)
        folder.mkdir()
        caplog.clear()
        reporter = Reporter(clock=lambda: KILLED_AT_S + 2.0)
        reporter.begin(here=True)
        first = replace(ending(folder, rank_2="signal SIGKILL"), first_step=1)
        reporter.end(put("killed", folder), first)
        assert "no step lost" in capsys.readouterr().err
        reporter.begin(here=True)
        second = AttemptStart(number=1, begun_unix_s=KILLED_AT_S + 1.0)
        last_step.write(folder, 1, LastStep(9, 9))
        reporter.end(second, replace(ending(folder), first_step=first_step, succeeded=True))
        reporter.finish("succeeded")
        again = f" ({lost} repeated: their checkpoint was broken or not used)" if lost else ""
        assert f"lost    {lost} step{'' if lost == 1 else 's'}{again};" in capsys.readouterr().err
        lines = [line for line in written(folder / "story.jsonl") if line["event"] == "again"]
        printed = [(line["start"], line["first_step"], line["kept_step"], line["steps"]) for line in lines]
        assert printed == ([(1, first_step, 7, lost)] if lost else [])
        said = f"attempt 1 resumed at step {first_step}, although step 7 was saved"
        assert (said in caplog.text) == bool(lost)


def test_a_skipped_checkpoint_counts_where_all_earlier_attempts_were_reported_here(tmp_path: Path) -> None:
    """Another node's agent may have reported it already."""
    for number, lost in ((0, 3), (2, 0)):
        reporter = Reporter(path := tmp_path / f"{number}.jsonl")
        reporter.begin(here=True, number=number)
        reporter.end(put("killed", tmp_path, number), replace(ending(tmp_path), first_step=5, skipped="/iter_0000007"))
        reporter.finish("succeeded")
        assert written(path)[-1]["steps_again"] == lost
