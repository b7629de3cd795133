"""The self-test on the device of threads, and mistakes that it must see."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.chaos.conftest import SMALL
from tests.device import claims_selftest, ranks
from tests.device.autoload import autoloading
from tests.device.build import extension
from ttp.selftest.jobs import DUMP, KILLED, ON_CPU, READY, REPLICAS, Jobs
from ttp.selftest.report import FAILED, PASSED


@pytest.mark.parametrize("claim", ranks.claims_of(claims_selftest))
def test_selftest_judges_the_device(claim: str, tmp_path: Path) -> None:
    """Each in a process of its own."""
    ranks.run(getattr(claims_selftest, claim), 1, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [1, 2])
def test_selftest_passes_on_a_hostile_device(count: int, tmp_path: Path) -> None:
    """The whole command. One rank alone has copies in memory."""
    extension()
    environ = autoloading(
        tmp_path / "plugin", os.environ, delay_us=50, poison=1, late_release=1, alloc_syncs=1, remote_hangs=1
    )
    command = [
        sys.executable,
        "-m",
        "ttp.selftest",
        "--device",
        "sim",
        "--ranks",
        str(count),
        "--kills",
        "2",
        "--minutes",
        "25",
    ]
    command += ["--output", str(tmp_path / "out"), *SMALL]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    found = {check["name"]: check["status"] for check in report["checks"]}
    assert report["device"]["type"] == "sim" and found[DUMP] == found[READY] == found[KILLED] == found[ON_CPU] == PASSED
    assert found[REPLICAS] == (PASSED if count == 2 else "not applicable")


MISTAKES = {
    "dump_on_the_compute_stream": {DUMP: "it has waited for it"},
    "ready_without_the_device": {READY: "was READY while a kernel ran"},
    "weight_changed_after_resume": {KILLED: "final weights_sha256", ON_CPU: "are not the bits that the device had"},
    "comparison_sees_nothing": {REPLICAS: "did not see weights that were altered"},
}
"""Each with the checks that must fail, and their reasons."""


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_selftest_sees_a_planted_mistake(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In jobs with one kill; no other check fails."""
    extension()
    environ = autoloading(tmp_path / "plugin", os.environ, f"tests.device.selftest_mutants:{mistake}")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    jobs = Jobs(tmp_path / "jobs", "plugin", 2, 1, 7, SMALL, Console(file=io.StringIO()))
    found = {check.name: check for _, _, run in jobs.parts()[:3] for check in run()}
    failed = {name: check.reason for name, check in found.items() if check.status == FAILED}
    expected = MISTAKES[mistake]
    if mistake == "weight_changed_after_resume":  # the blocked job resumes, too
        failed.pop(DUMP)
    assert set(failed) == set(expected), failed
    assert all(reason in failed[name] for name, reason in expected.items()), failed
