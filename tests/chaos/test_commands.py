"""The commands that the README shows do what it says, on a small model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.conftest import JOB_S, SMALL
from tests.chaos.test_make import make
from ttp.checkpoint.cli.main import main as ckpt

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=JOB_S,
        check=False,
    )


@pytest.mark.long
def test_the_demo_survives_the_death_of_rank_0(tmp_path: Path) -> None:
    """`make demo KILL_RANK=0`, in place and by a restart: times, steps lost, processes, what was written, plot, verdict."""
    small = f"DEMO_ARGS=--steps 18 --output {tmp_path} {' '.join(SMALL)}"
    done = make("demo", "KILL_RANK=0", "SEED=5", small)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("demo seed 5", "in place: SIGKILL sent to rank 0", "by restart: SIGKILL sent to rank 0", "\nEQUAL: "):
        assert words in done.stdout, done.stdout
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if line.count("│") == 4
    ]
    found = {label: values for label, *values in rows}
    assert found["committed steps lost"] == ["0", "0"] and found["bits of the baseline run"] == ["EQUAL", "EQUAL"]
    assert found["processes replaced"] == ["1 of 4", "4 of 4"], done.stdout
    assert found["written"][0] == "nothing" and re.fullmatch(r"checkpoint of step \d+", found["written"][1])
    assert all(re.fullmatch(r"\d+\.\d\d s", value) for value in found["kill to next step"])
    assert (tmp_path / "loss.png").stat().st_size > 1000


@pytest.mark.long
def test_random_kills_find_nothing(tmp_path: Path) -> None:
    """What `make chaos` runs, with a fresh seed each time; the seed is printed."""
    done = run("-m", "ttp.chaos.kills", "--kills", "3", "--ranks", "3", "--output", str(tmp_path), *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"3 kills, 3 without a lost step; \d+ steps compared: EQUAL \(seed \d+\)", done.stdout), (
        done.stdout
    )


@pytest.mark.long
def test_random_kills_in_place_find_nothing(tmp_path: Path) -> None:
    """Two of four kills hit the process that comes for the one before, too; what was not in place has its reason in the summary. Limits that a loaded machine keeps."""
    options = ("--in-place", "--kills", "4", "--ranks", "2", "--twice", "2", "--output", str(tmp_path))
    limits = ("--median-s", "60", "--p99-s", "60", "--least-in-place", "0.5")
    done = run("-m", "ttp.chaos.kills", *options, *limits, *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"4 kills, 4 without a lost step; \d+ steps compared: EQUAL \(seed \d+\)", done.stdout), (
        done.stdout
    )
    content = json.loads((tmp_path / "kills.json").read_text())
    assert [len(fault["ranks"]) for fault in content["faults"]] == [1, 2, 1, 2] and content["wrong"] == []
    single = [fault["ending"] for fault in content["faults"] if len(fault["ranks"]) == 1]
    assert [one["how"] for one in single] == ["in place", "in place"], done.stdout
    assert [one["kept"] for one in content["limits"]] == [True] * 3 and done.stdout.count("kept: ") == 3
    assert f"in place: {sum(fault['ending']['how'] == 'in place' for fault in content['faults'])} of 4" in done.stdout


def test_ones_own_trainer_is_protected(tmp_path: Path) -> None:
    """The example of the README: killed in an update, it prints the losses that a baseline run prints."""
    example = str(ROOT / "examples" / "own_trainer" / "train.py")
    outputs = []
    for name, faults in (("whole", ""), ("faulted", "kill:rank=1,step=50,point=updating")):
        launch = ("-m", "ttp.launch", "--nproc-per-node", "2", example, "--steps", "80")
        done = run(*launch, "--save-dir", str(tmp_path / name), TTP_FAULTS=faults)
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(dict(re.findall(r"step (\d+): loss ([\d.]+)", done.stdout)))
        assert ("resumed at step" in done.stdout) == bool(faults)
    assert outputs[0] == outputs[1] and sorted(map(int, outputs[0])) == [20, 40, 60, 80]


def test_ones_own_trainer_trains_alone_without_a_launcher(tmp_path: Path) -> None:
    """`python train.py` works as one rank, and says that its death costs steps."""
    example = str(ROOT / "examples" / "own_trainer" / "train.py")
    done = run(example, "--steps", "40", "--save-dir", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"step (\d+): loss", done.stdout) == ["20", "40"]
    assert "held by rank 0 only: its death loses the step" in done.stderr


@pytest.mark.long
def test_text_is_prepared_once_and_trained_on(tmp_path: Path) -> None:
    """The two commands of docs/trainer.md, with bytes as tokens."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("to be or not to be " * 300)
    corpus = str(tmp_path / "corpus")
    done = run("-m", "ttp.trainer.prepare", str(tmp_path / "texts"), corpus)
    assert done.returncode == 0, done.stdout + done.stderr
    job = ("-m", "ttp.launch", "--nproc-per-node", "2", "-m", "ttp.trainer", "--config", "gpt_tiny", *SMALL)
    arguments = ("--training_config.training_iters=3", f"--training_config.output_dir={tmp_path / 'run'}")
    done = run(*job, *arguments, "--dataset_config.dataset_dir", corpus)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_checkpoints_can_be_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """list, inspect and verify of a real run's, and a broken one is reported by exit status 1; diff, export and prune take them as well."""
    output = tmp_path / "run"
    arguments = ("--training_config.output_dir", str(output), "--training_config.training_iters=4")
    done = run("-m", "ttp.trainer", "--config", "gpt_tiny", *SMALL, *arguments, "--training_config.save_interval=2")
    assert done.returncode == 0, done.stdout + done.stderr
    for what in ("list", "inspect", "verify"):
        assert ckpt([what, str(output / "checkpoints")]) == 0 and "4" in capsys.readouterr().out
    at_2, at_4 = (output / "checkpoints" / f"iter_000000{step}" for step in (2, 4))
    assert [ckpt(["diff", str(at_4), str(other)]) for other in (output, at_2)] == [0, 1]
    assert ckpt(["export", str(output), str(tmp_path / "hf"), "--to", "hf"]) == 0
    assert ckpt(["prune", str(output), "--keep", "2", "--yes"]) == 0 and at_2.is_dir()
    next((output / "checkpoints" / "iter_0000004").glob("*.distcp")).unlink()
    looked = run("-m", "ttp.checkpoint", str(output / "checkpoints" / "iter_0000004"), "verify")
    assert looked.returncode == 1 and "missing" in looked.stdout + looked.stderr
