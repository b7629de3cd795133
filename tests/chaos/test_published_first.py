"""TTP_GASP=always: a rank dies, the step is on disk first, and then the others go on in place."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.chaos.conftest import RunJob, run_to_end
from tests.chaos.test_in_place import checkpoints, console
from tests.chaos.test_kills import assert_equal
from ttp.chaos.observed.training_job import TrainingJob

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="watches /proc")

ON = {"TTP_IN_PLACE": "True", "TTP_IN_PLACE_S": "30", "TTP_GASP": "always"}


def order(job: TrainingJob) -> list[str]:
    seen = ("published", "regroup_sent", "regrouped")
    return [line["event"] for journal in job.journals() for line in journal if line["event"] in seen]


def fault_lines(job: TrainingJob) -> list[dict[str, object]]:
    lines = (job.output_dir / "log" / "story.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == "recovered"]


def test_the_step_is_on_disk_and_the_others_keep_their_processes(tmp_path: Path, whole_job: RunJob) -> None:
    """Twice, in different steps."""
    faults = "kill:rank=1,step=9,point=record;kill:rank=0,step=15,point=backward"
    job = run_to_end(tmp_path / "job", 2, faults=faults, environ=ON)
    assert len(job.starts()) == 1 and order(job) == 2 * ["published", "regroup_sent", "regrouped"]
    assert_equal(job, whole_job(2))
    assert "once the newest step is on disk (TTP_GASP=always)" in console(job)
    assert console(job).count("no restart was needed") == 2
    first, second = fault_lines(job)
    steps = [line["saved"]["step"] for line in (first, second)]  # type: ignore[index]
    assert checkpoints(job)[:2] == [f"iter_{step:07d}" for step in steps]
    assert steps[0] in (8, 9) and steps[1] in (13, 14), "the step in flight is finished, or given up"
    assert all(line["took_ms"]["published"] > 0 and line["took_ms"]["regrouped"] > 0 for line in (first, second))  # type: ignore[index]


@pytest.mark.long
def test_a_new_process_that_dies_costs_a_restart_from_what_is_on_disk(tmp_path: Path, whole_job: RunJob) -> None:
    """Nothing is written a second time."""
    faults = "kill:rank=1,step=9,point=ready;kill:rank=1,point=protected,again=1"
    job = run_to_end(tmp_path / "job", 2, faults=faults, environ=ON)
    assert_equal(job, whole_job(2))
    assert len(job.starts()) == 2 and order(job) == ["published", "regroup_sent"]
    assert "no step lost" in console(job)
