"""A launcher whose console is lost: the pipe's reader goes, the log's disk is full. By real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.launching import PRELUDE, TTPRUN
from ttp.chaos.observed.training_job import read_jsonl

pytestmark = [pytest.mark.long, pytest.mark.skipif(sys.platform != "linux", reason="watches /proc")]

KILLED = """
note("begun", os.getpid())
if "print" in sys.argv:
    print("rank", rank, "begins", flush=True)
if start == "0":
    await_file("go")
    if "print" in sys.argv:
        print("rank", rank, "goes on", flush=True)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(75)
"""


def shell(tmp_path: Path, line: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a launcher of two workers by a shell's line, in which "$@" is its command."""
    worker = tmp_path / "worker.py"
    worker.write_text(PRELUDE + KILLED)
    command = [sys.executable, *TTPRUN, "--nproc-per-node", "2", "--ttp-story", str(tmp_path / "story.jsonl"),
               str(worker), str(tmp_path), *arguments]  # fmt: skip
    own = ("TORCHELASTIC_", "TTP_", "PET_")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(own)}
    return subprocess.run(
        ["bash", "-c", f"S={tmp_path}/status; {line}", "bash", *command],
        capture_output=True, text=True, timeout=200, env={**clean, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def assert_a_kill_was_survived(tmp_path: Path, reported: str) -> None:
    assert (tmp_path / "status").read_text() == "0\n", reported
    begun = sorted(path.name for path in tmp_path.glob("begun-*"))
    assert begun == ["begun-0-0", "begun-0-1", "begun-1-0", "begun-1-1"], reported
    lines = read_jsonl(tmp_path / "story.jsonl")
    assert [line["event"] for line in lines if line["event"] in ("fault", "end")] == ["fault", "end"]
    assert lines[-1]["result"] == "succeeded" and lines[-1]["faults"] == 1


@pytest.mark.parametrize("arguments", [(), ("print",)], ids=["silent workers", "workers that print"])
def test_a_kill_is_survived_when_nothing_reads_any_more(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """`| head -1` has gone before the fault: restart, report and exit status are as ever. Workers that print fail by it once, and
    their next attempt prints to /dev/null."""
    line = '{ "$@" 2>&1; echo $? >"$S"; } | { head -1; touch "${S%status}go"; }'
    done = shell(tmp_path, line, *arguments)
    assert_a_kill_was_survived(tmp_path, done.stdout + done.stderr)


def test_a_log_on_a_full_disk_costs_the_log_alone(tmp_path: Path) -> None:
    """Nothing that is printed arrives; the job, its restart and its report are as ever."""
    (tmp_path / "go").touch()
    done = shell(tmp_path, '"$@" >/dev/full 2>&1; echo $? >"$S"')
    assert_a_kill_was_survived(tmp_path, done.stdout + done.stderr)


def test_a_launcher_without_any_descriptor_has_a_report(tmp_path: Path) -> None:
    """stdout and stderr were closed before it began: no file of its own takes their numbers."""
    (tmp_path / "go").touch()
    done = shell(tmp_path, '"$@" >&- 2>&-; echo $? >"$S"', "print")
    assert_a_kill_was_survived(tmp_path, done.stdout + done.stderr)
