"""A node whose health check fails after a fault, in a job of one node: its report says what depends on the check."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tests.chaos.launching import Launch
from ttp.launch.endings import REQUEUE_EXIT_CODE

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="watches /proc"), pytest.mark.long]

ALONE = """
import torch, ttp
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
guard = ttp.protect(model, optimizer, save_dirs=[out / "checkpoints"])

@ttp.ttp_to_persist
def train():
    for step in range(guard.step + 1, 9):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if step == 5:
            (out / "sick").write_text("no device answers")
            raise ValueError("once")

train()
"""


def test_a_report_of_a_sick_node_does_not_promise_a_restart(tmp_path: Path) -> None:
    """The check fails beside the fault: the report has it as it is known then, and the node ends with 75."""
    check = shlex.join(["sh", "-c", 'if [ -e "$0" ]; then cat "$0"; exit 3; fi', str(tmp_path / "sick")])
    options = ("--nproc-per-node=1", "--max-restarts=2", "--health-check", check)
    with Launch(tmp_path, ALONE, *options) as launch:
        assert launch.wait() == REQUEUE_EXIT_CODE, launch.text
        text = launch.text
    (following,) = [line for line in text.splitlines() if line.startswith("next ")]
    assert following.startswith("next    restart 1 of 2, from ") and "excluded (exit code 75)" in following, text
    assert "this node is excluded: its health check failed (exit status 3): no device answers" in text
