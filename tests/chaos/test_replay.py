"""The journal of a real job replays. That a job's journals do so whose ranks were killed, `test_kills` tests on its own job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.conftest import run_to_end
from ttp.controller.journal import inputs_path, read_inputs
from ttp.controller.replay import compare, decide_again, main


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
