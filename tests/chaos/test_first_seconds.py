"""A fault right after the first step of the first attempt, on a host whose agent has had no answer from the workers' store."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.conftest import JOB_S, SMALL
from tests.shown import ROOT


@pytest.mark.long
def test_a_fault_in_the_first_second_is_reported_from_the_journal_without_the_store(tmp_path: Path) -> None:
    """Rank 1 is killed while it updates step 1. The agent finds the controller in the file of its ranks, and reports what the journal
    holds."""
    command = [sys.executable, "-m", "tests.chaos.silent_store", "--nproc-per-node", "2", "-m", "ttp.trainer"]
    command += ["--config", "gpt_tiny", "--training_config.output_dir", str(tmp_path / "job"), *SMALL]
    environ = {
        "OMP_NUM_THREADS": "1",
        "TTP_FAULTS": "kill:rank=1,step=1,point=updating",
        "TMPDIR": str(tmp_path / "tmp"),
    }
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(
        [*command, "--training_config.training_iters=4"],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=JOB_S,
        check=False,
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert "cannot determine whether the ranks have a controller" not in text
    assert re.search(r"^saved +step 1 in .*/iter_0000001 .*; no step lost", text, re.M), text
    assert re.search(r"^lost +0 steps;", text, re.M) and "1 fault" in text, text
    assert not list((tmp_path / "tmp").glob("ttp_attempt_*")), "the directory of an attempt is removed at its end"
