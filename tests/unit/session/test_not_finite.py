"""An attempt that resumes a state with NaN or infinity warns with its step, and names the newest checkpoint without."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.unit.session.test_session import OFF, do_steps, new_run


def train(folder: Path, steps: int, bad_from: int) -> None:
    """Save a checkpoint of each step; from step `bad_from` on a weight is NaN."""
    model, optimizer, session = new_run(folder, OFF)
    for step in range(1, steps + 1):
        do_steps(model, optimizer, session, step)
        if step == bad_from:
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] = math.nan
        session.save()
    session.close()


def resume(folder: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Resume the newest checkpoint; return what is said of its numbers."""
    caplog.clear()
    caplog.set_level("WARNING", "ttp")
    _, _, session = new_run(folder, OFF)
    assert session.resume() is not None
    session.close()
    return [record.getMessage() for record in caplog.records if "finite" in record.getMessage()]


def test_resuming_a_state_that_is_not_finite_warns_and_names_the_newest_that_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, 4, bad_from=3)
    (line,) = resume(tmp_path, caplog)
    assert line.startswith(f"resumed step 4 of {tmp_path}/iter_0000004, whose state is not finite: it holds NaN")
    assert f"finite state is {tmp_path}/iter_0000002; move the newer ones away to resume from it" in line


def test_without_a_finite_checkpoint_the_warning_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, 1, bad_from=1)
    (line,) = resume(tmp_path, caplog)
    assert line.endswith("The newest checkpoint with a finite state is none of the others")


def test_a_finite_state_is_resumed_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, 2, bad_from=0)
    assert resume(tmp_path, caplog) == []
