"""The journal of a real job, with a real kill, replays: the machine decides the same once more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.conftest import KILLS, run_to_end
from ttp.chaos.job import Job
from ttp.controller.journal import inputs_path, read_inputs
from ttp.controller.replay import compare, decide_again, main

DECISIONS = ["death_seen", "freeze_sent", "frozen", "decided", "write_sent", "publish_sent", "published", "exit_sent"]


def test_journals_of_killed_ranks_replay_to_the_same_decisions(
    killed_job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four ranks, one killed in each start: freeze, step, roll-forward, writers and publisher come out as they did."""
    paths = sorted((killed_job.output_dir / "log").glob("journal_*.jsonl"))
    assert len(paths) == len(KILLS) + 1, "the starts that were hurt, and one that finished"
    for path in paths:
        compared = compare(path)
        assert compared.difference == ""
        assert compared.told, path
    for path in paths[:-1]:
        hurt = [line for line in compare(path).again if line.event in DECISIONS]
        assert [name for name in DECISIONS if name in {line.event for line in hurt}] == DECISIONS
        (decided,) = [line for line in hurt if line.event == "decided"]
        (published,) = [line for line in hurt if line.event == "published"]
        assert decided.fields["step"] == published.fields["step"]
    assert main([str(paths[0]), "--sent"]) == 0
    printed = capsys.readouterr().out
    assert "Freeze to" in printed and "WriteOrder to" in printed and "the replay decides the same" in printed


@pytest.mark.long
def test_replay_without_one_input_decides_otherwise(tmp_path: Path) -> None:
    """The comparison can fail: without the first message of a rank the world never assembles."""
    job = run_to_end(tmp_path / "job", 2, "--training_config.training_iters=3")
    (path,) = sorted((job.output_dir / "log").glob("journal_*.jsonl"))
    assert compare(path).difference == ""
    inputs = inputs_path(path)
    lines = inputs.read_text(encoding="utf-8").splitlines(keepends=True)
    first = next(number for number, line in enumerate(lines[1:], 1) if "messages:Registration" in line)
    inputs.write_text("".join(lines[:first] + lines[first + 1 :]), encoding="utf-8")
    assert compare(path).difference
    assert "assembled" not in [line.event for line in decide_again(read_inputs(inputs))]
    assert main([str(path)]) == 1
    assert main([str(tmp_path / "none.jsonl")]) == 2
