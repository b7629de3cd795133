"""`python -m tests.fuzz`, at its smallest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_fuzz_tests_are_run_with_a_seed() -> None:
    """One case of each test of a file; the seed is printed, and drawn where none is given."""
    command = [sys.executable, "-m", "tests.fuzz", "0", "1", "test_processor.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 cases a test; again: python -m tests.fuzz " in done.stdout and "seed 0" not in done.stdout
