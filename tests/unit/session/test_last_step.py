"""Where training ended reaches the agent, and a session that ends without its last step on disk says so."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import ttp
from ttp.config import Settings
from ttp.exchange import last_step
from ttp.exchange.last_step import LastStep


def trained(folder: Path, steps: int, enable: bool = True) -> ttp.Session:
    model = torch.nn.Linear(8, 4)
    optimizer = ttp.TTPReplicaOptimizer(model.named_parameters(), replicas=1, lr=0.05)
    session = ttp.start(optimizer, save_dirs=[folder], settings=Settings(enable=enable))
    session.resume()
    for step in range(optimizer.current_step + 1, optimizer.current_step + steps + 1):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().mean().backward()
        session.set_step_state(step, {})
        optimizer.step()
    return session


@pytest.mark.parametrize("enable", [True, False])
def test_a_session_that_ends_without_a_save_says_which_step_is_on_no_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, enable: bool
) -> None:
    """As `ttp.protect` does; once; and not to one that has saved, nor to one that has trained nothing."""
    session = trained(tmp_path, 3, enable)
    session.close()
    session.close()
    said = caplog.text
    assert said.count("TTP has no checkpoint of step 3, the last one: none was written") == 1
    assert "call session.save() as the last line of train, on all ranks" in said
    session = trained(tmp_path, 3, enable)
    session.save()
    session.close()
    trained(tmp_path, 0, enable).close()
    assert caplog.text.count("TTP has no checkpoint") == 1
    session = trained(tmp_path, 2, enable)
    session.close()
    assert "no checkpoint of step 5, the last one: the newest is of step 3." in caplog.text


def test_after_an_exception_the_controller_knows_what_became_of_the_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = trained(tmp_path, 3, enable=False)
    session.raised = True
    session.close()
    assert "TTP has no checkpoint" not in caplog.text


def test_the_agent_reads_where_training_ended(tmp_path: Path) -> None:
    session = trained(tmp_path, 2)
    log_dir = session.log_dir
    session.save()
    session.hold_until_all_finish()
    assert last_step.read(log_dir, 0, 0.0) == LastStep(2, 2)
    session.close()
    trained(tmp_path, 2).close()
    assert last_step.read(log_dir, 0, 0.0) == LastStep(4, 2)


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{", '{"step": "x", "saved_step": 1, "unix_s": 9}', '{"step": 1}', "[" * 4000),
        *('{"step": -1, "saved_step": 1, "unix_s": 9}', '{"step": 7, "saved_step": true, "unix_s": 9}'),
        *('{"step": 7, "saved_step": 7, "unix_s": NaN}', '{"step": 7, "saved_step": 7, "unix_s": 9}' + " " * 5000),
    ],
)
def test_a_file_that_is_not_of_this_attempt_or_cannot_be_read_is_none(tmp_path: Path, content: str) -> None:
    last_step.write(tmp_path, 3, LastStep(7, 7))
    written = json.loads(last_step.path_of(tmp_path, 3).read_text())
    assert last_step.read(tmp_path, 3, written["unix_s"]) == LastStep(7, 7)
    assert last_step.read(tmp_path, 3, written["unix_s"] + 1.0) is None, "an earlier job's"
    assert last_step.read(tmp_path, 4, 0.0) is None
    last_step.path_of(tmp_path, 3).write_text(content)
    assert last_step.read(tmp_path, 3, 0.0) is None


def test_a_pipe_in_place_of_the_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(last_step.path_of(tmp_path, 3))
    assert last_step.read(tmp_path, 3, 0.0) is None
