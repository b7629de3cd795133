"""What `pip install .` puts in place: as processes, from outside the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_an_installed_copy_has_its_commands(tmp_path: Path) -> None:
    """`ttp` and `ttprun` run from the copy, in a folder that knows nothing of the checkout; presets are in it."""
    left_out = shutil.ignore_patterns(".*", "output", "build", "*.egg-info", "__pycache__", "shared")
    source = shutil.copytree(ROOT, tmp_path / "source", ignore=left_out, symlinks=True)
    target = tmp_path / "target"
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(target)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", ".", *options],
        cwd=source, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shutil.rmtree(source)
    environ = {**os.environ, "PYTHONPATH": str(target)}
    for words, reported in (
        ([str(target / "bin" / "ttp"), "ckpt", "--help"], "ttp ckpt"),
        ([str(target / "bin" / "ttprun"), "--help"], "--ttp-ot"),
        ([sys.executable, "-m", "ttp.trainer", "--help"], "gpt_tiny"),
        ([sys.executable, "-c", "import ttp.controller; print(ttp.controller.__file__)"], str(target)),
    ):
        done = subprocess.run(
            words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0 and reported in done.stdout, (words, done.stdout, done.stderr)
