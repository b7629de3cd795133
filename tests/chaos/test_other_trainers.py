"""Trainers that were not written for ttp, in real processes: a rank is killed, and what the resumed run prints is what an
unbroken run prints, to the last bit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.test_commands import ROOT

EXAMPLES = ROOT / "examples"


def train(folder: Path, ranks: int, example: str, *arguments: str, faults: str = "") -> str:
    """Run an example to its end under ttprun and return what it printed."""
    command = [sys.executable, "-m", "ttp.launch", "--nproc-per-node", str(ranks), str(EXAMPLES / example), *arguments]
    done = subprocess.run(
        [*command, "--save-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TTP_FAULTS": faults},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert ("restarting (1 of 3 restarts)" in text) == bool(faults), text
    assert not faults or re.search(r"lost +0 steps;", text), text
    return text


def steps_of(text: str) -> dict[int, set[str]]:
    """Return what was printed of each step, once or, where a rank was killed between update and print, twice."""
    told: dict[int, set[str]] = {}
    for step, rest in re.findall(r"step (\d+): (loss.*)", text):
        told.setdefault(int(step), set()).add(rest)
    return told


def compare(whole: str, hurt: str) -> None:
    """Every step that a killed run prints is that of the unbroken one; the step in flight may have no line."""
    wanted, got = steps_of(whole), steps_of(hurt)
    assert wanted and max(wanted) == max(got) and len(wanted) - len(got) <= 1
    for step, lines in got.items():
        assert lines == wanted[step], f"step {step}: {lines}, the unbroken run has {wanted[step]}"
    finals = [re.findall(r"final .*", text) for text in (whole, hurt)]
    assert finals[0] == finals[1]


def test_plain_ddp_survives_the_death_of_rank_0(tmp_path: Path) -> None:
    """With dropout, batch norm, a shuffling sampler and a schedule, killed in the middle of an epoch's step."""
    whole = train(tmp_path / "whole", 2, "ddp/train.py", "--epochs", "3")
    assert "barrier mode" in whole
    compare(
        whole, train(tmp_path / "hurt", 2, "ddp/train.py", "--epochs", "3", faults="kill:rank=0,step=21,point=updating")
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("optimizer", "clip", "rank", "point"),
    [
        ("SGD", "0", 1, "backward"),
        ("AdamW", "0.5", 1, "record"),
        ("Adafactor", "0", 0, "done"),
        ("NAdam", "0", 1, "ready"),
    ],
)
def test_ddp_survives_with_any_optimizer(tmp_path: Path, optimizer: str, clip: str, rank: int, point: str) -> None:
    """Killed at every place of a step; in norm mode survivors repeat the clipping too."""
    arguments = ("--epochs", "2", "--optimizer", optimizer, "--clip", clip)
    whole = train(tmp_path / "whole", 2, "ddp/train.py", *arguments)
    assert ("norm mode" if clip != "0" else "barrier mode") in whole
    faults = f"kill:rank={rank},step=16,point={point}"
    compare(whole, train(tmp_path / "hurt", 2, "ddp/train.py", *arguments, faults=faults))


@pytest.mark.long
@pytest.mark.parametrize(("rank", "point"), [(0, "updating"), (3, "ready"), (2, "backward")])
def test_hsdp_survives_the_death_of_a_rank(tmp_path: Path, rank: int, point: str) -> None:
    """FSDP2 on 2 x 2 ranks: coverage is found from the DTensors, and each shard has one other holder."""
    whole = train(tmp_path / "whole", 4, "hsdp/train.py", "--steps", "14")
    assert re.search(r"any 1 of 4 ranks; 4 of 6 pairs", whole), whole
    faults = f"kill:rank={rank},step=9,point={point}"
    compare(whole, train(tmp_path / "hurt", 4, "hsdp/train.py", "--steps", "14", faults=faults))
