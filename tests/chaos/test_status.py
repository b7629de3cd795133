"""`ttp status` of a real job: while it trains, while a fault is handled, and after its end."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.conftest import JOB_S, SMALL
from ttp.chaos.observed.training_job import TrainingJob
from ttp.exchange import time_marks
from ttp.launch.watch.processes import is_stopped
from ttp.status import ask, main

LAST = 12
FAULTS = "stop:rank=1,step=8,point=backward;stop:rank=0,step=7,point=write"
"""Rank 1 stops in step 8, and is killed there; rank 0 stops while it writes step 7."""
RUNS = (*SMALL, f"--training_config.training_iters={LAST}")


def status_of(named: object, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    """Return the exit status of `ttp status JOB --json` and what it printed."""
    capsys.readouterr()
    code = main.main([str(named), "--json", *options])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["status"] == code
    return code, found


def test_a_job_shows_its_training_its_fault_and_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"TTP_FAULTS": FAULTS, "TTP_LEASE_S": "60", "TTP_HEARTBEAT_S": "0.2", "TTP_OT": "300"}
    with TrainingJob(tmp_path / "output", ranks=2, overrides=RUNS, environ=environ) as job:
        folder = job.output_dir

        def at_step_8() -> bool:
            pids = job.pids()
            if len(pids) < 2 or not is_stopped(pids[1]):
                return False
            found = status_of(folder, capsys)[1]
            return (found["ranks"][0]["step"], found["phase"]) == (8, "training")

        job.wait_for(at_step_8, "rank 1 stopped in step 8", JOB_S)
        code, found = status_of(folder, capsys)
        assert code == 0, found["notes"]
        assert (found["state"], found["source"], found["phase"]) == ("running", "controller", "training")
        assert (found["step"], found["attempt"], found["world_size"]) == (7, 0, 2)
        assert found["steps_per_s"] == pytest.approx(1 / found["step_s"]) and 0 < found["goodput"] < 1
        assert found["coverage"]["least_holders"] == 2 and found["coverage"]["fatal_rank_count"] == 0
        assert [rank["pid"] for rank in found["ranks"]] == [job.pids()[0], job.pids()[1]]
        assert found["ranks"][0]["step_s"] > 0 and found["ranks"][1]["heartbeat_age_s"] > 0
        assert found["leader"]["pid"] == job.controller_pids()[0] and len(found["standbys"]) == 1
        assert found["faults"] == [] and found["checkpoints"] == [] and found["notes"] == []

        by_address = status_of(found["leader"]["address"].partition("/")[0], capsys)[1]
        assert by_address["job"] == found["job"] and by_address["log_dir"] == str((folder / "log").resolve())

        with monkeypatch.context() as elsewhere:  # as on a node without a process of the job
            elsewhere.setattr(ask, "local_processes", lambda: ())
            code, unknown = status_of(folder, capsys)
            assert code == 1 and (unknown["state"], unknown["source"]) == ("unknown", "files")
            assert [rank["node"] for rank in unknown["ranks"]] == [rank["node"] for rank in found["ranks"]]
            assert "no process of job" in unknown["notes"][0] and "one of the job's nodes" in unknown["notes"][0]

        job.kill(1)
        writer = job.pids()[0]
        job.wait_for(lambda: is_stopped(writer), "rank 0 stopped as it writes", JOB_S)
        code, found = status_of(folder, capsys)
        assert code == 0 and (found["phase"], found["step"]) == ("writing", 7)
        (fault,) = found["faults"]
        assert (fault["kind"], fault["ranks"], fault["outcome"], fault["cause"]) == (
            "exited",
            [1],
            "now",
            "signal SIGKILL",
        )
        assert found["ranks"][1]["state"] == "dead" and found["ranks"][1]["cause"] == "signal SIGKILL"
        assert found["coverage"]["least_holders"] == 1 and found["coverage"]["fatal_ranks"] == [0]

        os.kill(writer, signal.SIGCONT)
        assert job.wait(JOB_S) == 0, job.console_tail()
    code, found = status_of(folder, capsys)
    assert code == 0 and (found["state"], found["source"], found["step"]) == ("ended", "files", LAST)
    assert (found["end"]["result"], found["end"]["saved_step"], found["end"]["lost"]) == ("succeeded", LAST, 0)
    (fault,) = found["faults"]
    assert (fault["outcome"], fault["step"], fault["steps_lost"]) == ("saved", 7, 0) and fault["took_s"] > 0
    assert [*fault["stages_s"]][-1] == "restarted" and fault["stages_s"]["restarted"] > 0
    assert [rank["state"] for rank in found["ranks"]] == ["ended"] * 2 and found["step_s"] > 0
    assert all(rank["node"] and rank["pid"] for rank in found["ranks"])
    assert [each["step"] for each in found["checkpoints"]] == [LAST, 7] and found["notes"] == []
    assert 0 < found["goodput"] < 1
    use = found["time_use"]
    assert sum(use["rank_s"].values()) == pytest.approx(use["ranks"] * use["whole_s"]) and use["ranks"] == 2
    known = [
        part for part in ("steps", "start", "saves", "decide", "dump", "restart", "end") if use["rank_s"][part] > 0
    ]
    assert known == ["steps", "start", "saves", "decide", "dump", "restart", "end"] and use["rank_s"]["unknown"] == 0
    firsts = [
        [mark.step for mark in time_marks.read(folder / "log", attempt, 0.0) if mark.what == time_marks.STEPPED]
        for attempt in (0, 1)
    ]
    assert firsts == [[1], [8]], "a restart lasts until its first finished step"
    assert main.main([str(folder)]) == 0
    text = capsys.readouterr().out
    assert f"last step  {LAST}, saved in {folder}/checkpoints/iter_00000{LAST}; 0 steps lost" in text
    assert "exited: signal SIGKILL" in text and "step 7 saved; 0 steps lost" in text
