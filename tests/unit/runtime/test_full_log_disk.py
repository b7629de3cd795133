"""A controller and its page whose log is on a full disk: what they say is lost, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.shown import ROOT

ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT), "TTP_TLS": "False"}
LONG_S = 120.0


def test_a_controller_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    """It says so first; then its port is free."""
    command = [sys.executable, "-m", "ttp.controller", "--job-id", "job", "--world-size", "1"]
    with (
        open("/dev/full", "wb") as full,
        subprocess.Popen(
            [*command, "--journal", str(tmp_path / "journal_0.jsonl")],
            env=ENVIRON, stdout=subprocess.PIPE, stderr=full, text=True,
        ) as controller,
    ):  # fmt: skip
        try:
            assert controller.stdout is not None and controller.stdout.readline(), "its address"
            controller.send_signal(signal.SIGUSR1)
            assert controller.wait(LONG_S) == 0
        finally:
            controller.kill()


def test_a_page_that_cannot_be_served_ends_with_its_own_status(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "ttp.status_page", "--parent", str(os.getpid()), "--job-id", "job/0"),
                *("--log-dir", str(tmp_path), "--bind", "192.0.2.1", "--advertise", "192.0.2.1", "--port", "0"),
            ],
            env=ENVIRON, stdout=full, stderr=full, timeout=LONG_S, check=False,
        )  # fmt: skip
    assert done.returncode == 2
