"""A recovery in place that goes wrong on its way: what a new process is given is altered, or the controller dies that has ordered it. No step is lost."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.conftest import JOB_S, SMALL, RunJob, arguments, run_to_end
from tests.chaos.test_kills import assert_equal
from ttp.chaos.observed.training_job import TrainingJob

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="watches /proc")

ON = {"TTP_IN_PLACE": "True", "TTP_IN_PLACE_S": "30"}  # a loaded machine
SPOILING = """
import os
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist

real, marker = dist.batch_isend_irecv, Path(sys.argv.pop(1))

def spoiled(transfers):
    sent = [transfer for transfer in transfers if transfer.op is dist.isend]
    if sent and not marker.exists():
        marker.touch()
        altered = sent[len(sent) // 2].tensor.clone()
        altered.view(-1).view(torch.uint8)[altered.nbytes // 2] ^= 1
        sent[len(sent) // 2].tensor = altered
    return real(transfers)

dist.batch_isend_irecv = spoiled
runpy.run_module("ttp.trainer", run_name="__main__", alter_sys=True)
"""
"""The bundled trainer, which alters one bit of the first state that it sends to a new process."""


def events_of(job: TrainingJob) -> list[dict[str, Any]]:
    return [line for journal in job.journals() for line in journal]


@pytest.mark.long
def test_a_bit_that_is_altered_on_its_way_is_found_and_the_step_is_written(tmp_path: Path, whole_job: RunJob) -> None:
    """By the comparison that follows the transfer: the rank that stays still has the state, and is what is written."""
    script = tmp_path / "spoiling.py"
    script.write_text(SPOILING)
    (tmp_path / "job").mkdir()
    environ = {"TTP_FAULTS": "kill:rank=1,step=9,point=record", **ON}
    program = [str(script), str(tmp_path / "altered")]
    with TrainingJob(tmp_path / "job", ranks=2, overrides=arguments(), environ=environ, program=program) as job:
        assert job.wait(JOB_S) == 0, job.console_tail(80)
    assert (tmp_path / "altered").exists() and job.leftovers() == []
    failed = [line["reason"] for line in events_of(job) if line["event"] == "regroup_failed"]
    assert failed and "replicas differ after they were filled" in failed[0], failed
    text = (job.output_dir / "console.log").read_text(errors="replace")
    assert len(job.starts()) == 2 and "training continues after step" not in text and "no step lost" in text
    assert_equal(job, whole_job(2))


@pytest.mark.long
def test_a_controller_that_dies_after_its_order_costs_no_step(tmp_path: Path, whole_job: RunJob) -> None:
    """While the new process begins. The one that takes over finds a rank half way, and has the step written."""
    killed: list[int] = []

    def kill_the_controller(job: TrainingJob) -> None:
        def ordered() -> bool:
            return any(line["event"] == "regroup_sent" for line in events_of(job))

        job.wait_for(ordered, "the order to regroup", JOB_S)
        killed.append(job.controller_pids()[0])
        os.kill(killed[0], signal.SIGKILL)

    faults = "kill:rank=1,step=9,point=backward;slow:rank=1,point=start,again=1,for=2"
    job = run_to_end(tmp_path / "job", 2, faults=faults, environ=ON, meanwhile=kill_the_controller)
    assert killed and len(job.starts()) == 2 and "no step lost" in (job.output_dir / "console.log").read_text()
    [reason] = [line["reason"] for line in events_of(job) if line["event"] == "not_in_place"]
    # The new controller writes: rank 0 has left its groups. Where the new process is slow to begin, its silence is the reason that is found first.
    assert reason in ("rank 0 has a gate that cannot open again", "a fault of kind silent")
    assert_equal(job, whole_job(2))


EDITED = """
import runpy

import part

runpy.run_module("ttp.trainer", run_name="__main__", alter_sys=True)
"""
"""The bundled trainer with a module beside it."""


@pytest.mark.long
def test_a_module_that_is_edited_during_the_run_is_seen_and_the_step_is_written(tmp_path: Path) -> None:
    """The new process would train with other code than the others; after the restart all have the new one."""
    (tmp_path / "edited.py").write_text(EDITED)
    (tmp_path / "part.py").write_text("LOSS = 1\n")
    (tmp_path / "job").mkdir()
    program, steps = [str(tmp_path / "edited.py")], (*SMALL, "--training_config.training_iters=300")
    with TrainingJob(tmp_path / "job", ranks=2, overrides=steps, environ=ON, program=program) as job:
        job.wait_for_step(4)
        (tmp_path / "part.py").write_text("LOSS = 2\n")
        job.kill(1)
        assert job.wait(JOB_S) == 0, job.console_tail(80)
    text = (job.output_dir / "console.log").read_text(errors="replace")
    assert "changed on this node since the job began (script)" in text
    assert len(job.starts()) == 2 and "training continues after step" not in text and "no step lost" in text
    assert job.leftovers() == []
