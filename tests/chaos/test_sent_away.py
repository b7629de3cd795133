"""What becomes of ranks that the controller has sent away and that are still here: some stand still for good, others have work of
their own."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.chaos.launching import Launch
from tests.chaos.test_endings import alive
from tests.chaos.two_launchers import train_on_two

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="watches /proc"), pytest.mark.long]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_a_node_whose_ranks_are_stopped_ends_with_a_job_that_has_failed_on_another(
    tmp_path: Path, backend: str
) -> None:
    """Nothing dies there, no rank waits to be taken in, and the controller's word reaches no rank: only the launcher receives it."""
    with contextlib.ExitStack() as stack:
        first, second, pids = train_on_two(stack, tmp_path, "--max-restarts", "0", backend=backend)
        for pid in pids[2:]:
            os.kill(pid, signal.SIGSTOP)
        os.kill(pids[0], signal.SIGKILL)

        assert [first.wait(), second.wait()] == [1, 1], first.text + second.text
        assert not any(map(alive, pids))
        assert "killed ranks 2-3 (stopped): these ranks have nothing more to save" in second.text
        for job in (first, second):
            job.assert_nothing_left()


STOPS_EARLY = """
import torch
import torch.distributed as dist
import ttp
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = ttp.TTPReplicaOptimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-3, clip=ttp.ClipNorm(1.0))
session = ttp.start(optimizer, save_dirs=[str(out / "checkpoints")])
session.resume()

@ttp.ttp_to_persist
def train():
    for step in range(1, 40):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        session.set_step_state(step, {})
        optimizer.step(sums=[0.0])
    dist.barrier()  # else the one that leaves first may find the other still in its last step
    sys.exit(0)

try:
    train()
except SystemExit:
    note("sent", os.getpid())
    time.sleep(20)
    note("done")
session.close()
"""
"""Leaves training by an exception, as scripts with a time limit do, and then saves and evaluates in its own way."""


def test_ranks_that_were_sent_away_may_take_their_time_for_work_of_their_own(tmp_path: Path) -> None:
    """Longer than ranks have to leave where one has left: no rank here has, and none stalls."""
    with Launch(tmp_path, STOPS_EARLY, "--nproc-per-node", "2", "--max-restarts", "0") as job:
        assert job.wait() == 0, job.text
        assert "the ranks leave" in job.text, "the controller has not sent anybody away"
        assert job.notes("done") == ["done-0-0", "done-1-0"], job.text
        job.assert_nothing_left()
