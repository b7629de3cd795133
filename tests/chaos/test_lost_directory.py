"""The first checkpoint directory dies between two attempts: the job goes on in the second one, and writes its report there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chaos.launching import Launch
from ttp.checkpoint.find import list_checkpoints
from ttp.checkpoint.verify import verify

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

TRAINER = """
import shutil
import torch
import torch.distributed as dist
import ttp

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = ttp.TTPReplicaOptimizer(model.named_parameters(), lr=1e-3)
first, second = out / "first", out / "second"
if (rank, start) == (0, "1"):
    for path in first.glob("iter_*"):
        shutil.move(path, second)
    first.rename(out / "first lost")
    first.touch()
session = ttp.start(optimizer, save_dirs=[first, second])
point = session.resume()
note("resumed", point.path if point else "")

@ttp.ttp_to_persist
def train():
    for step in range(optimizer.current_step + 1, 13):
        optimizer.zero_grad()
        model(torch.ones(2, 8) * (step + rank)).square().mean().backward()
        session.set_step_state(step, {})
        optimizer.step()
    note("saved", session.save())

train()
session.close()
dist.destroy_process_group()
"""
FAULTS = "kill:rank=1,step=5,point=updating;kill:rank=1,step=9,point=updating,round=1"


def test_a_job_whose_first_directory_dies_goes_on_in_the_second(tmp_path: Path) -> None:
    """Controllers start, a dying gasp and a periodic checkpoint are written, and no step is lost; where the dead one was,
    nothing is touched."""
    with Launch(
        tmp_path, TRAINER, "--nproc-per-node", "2", "--max-restarts", "3", environ={"TTP_FAULTS": FAULTS}
    ) as launch:
        assert launch.wait() == 0, launch.text
        launch.assert_nothing_left()
    first, second = tmp_path / "first", tmp_path / "second"
    assert "continuing without a directory" in launch.text and "left alone until the next attempt" in launch.text
    assert first.read_bytes() == b""
    last, *gasps = (verify(path).step for path in list_checkpoints([second]))
    # Whether the survivor had the record of the step in which the other died is a race of the collective: both are right.
    assert last == 12 and gasps in ([9, 5], [8, 5], [9, 4], [8, 4]), launch.text
    assert [launch.read(f"resumed-0-{start}") for start in (2, 1)] == [str(second / f"iter_{g:07d}") for g in gasps]
    assert launch.read("saved-0-2") == str(second / "iter_0000012")
    assert [(second / "ttp_log" / f"journal_{start}.jsonl").exists() for start in (0, 1, 2)] == [False, True, True]
    story = [json.loads(line) for line in (second / "ttp_log" / "story.jsonl").read_text().splitlines()]
    story = [line for line in story if line["event"] not in ("hold", "held")]
    assert [line["event"] for line in story] == ["start", "fault", "start", "end"], launch.text
    assert (story[1]["steps_lost"], story[-1]["faults"], story[-1]["steps_lost"]) == (0, 2, 0)
