"""What `make` runs as a whole, in small: the recipes themselves, with the sizes that their variables take."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import names
from tests.chaos.conftest import JOB_S
from tests.shown import ROOT

SIZES = {
    "benchmarks.death_watch": "--mib 0 --kills 2 --minutes 1 --poll 0.002 0.01",
    "benchmarks.dump": "--quick",
    "benchmarks.false_alarms": "--seeds 1 --means 0.02",
    "benchmarks.gate": "--runs 2 --calls 50",
    "benchmarks.gradient_accumulation": "--layers 1 --width 64 --length 8 --rounds 2",
    "benchmarks.lost_node": "--times 1 --cases spare --against .",
    "benchmarks.messages": "",
    "benchmarks.peers": "--runs 1 --rank-0-runs 0 --kills 1 --systems ttp_in_place,ttp,torchrun",
    "benchmarks.recovery": "--ranks 2 --megabytes 1 --kills 2",
    "benchmarks.restart": "--ranks 2 --jobs 1 --kills-a-job 1",
    "benchmarks.scale": "--ranks 16 --core-ranks 100 --faults 1 --seconds 0.5",
    "benchmarks.simulation": "--batches 1 --runs 3",
    "benchmarks.snapshot": "--megabytes 8 --turns 3 --jobs 1 --steps 16 --saves 4",
    "benchmarks.split_models": "--width 64 --length 8 --batch 1 --micro-batches 2",
    "benchmarks.step_time": "--world 2x1 --alone --layers 1 --width 64 --length 8 --rounds 2 --steps 1",
    "benchmarks.stragglers": "--seeds 1 --steps 200 --ranks 2 --cost 100",
    "benchmarks.tls": "--ranks 16 --ranks-per-node 1 --heartbeat-s 2 --turns 1 --seconds 0.5",
}
"""A few seconds of each benchmark."""
QUICK = ("benchmarks.gate", "benchmarks.simulation")


def run(*command: str, folder: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **own, **environ}, capture_output=True, text=True, timeout=JOB_S,
        check=False,
    )  # fmt: skip


def make(*words: str, folder: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `make` in the folder with this Python; the checkout's environment remains as it is."""
    options = ("-f", str(ROOT / "Makefile"), "-o", ".venv/.installed", f"PY={sys.executable}")
    return run("make", *options, *words, folder=folder, **environ)


def test_a_benchmark_reports_whether_its_limit_was_kept() -> None:
    """One of them, alone; on a loaded machine the limit may be missed, and that is reported, too."""
    done = make("bench", "BENCH=gate")
    assert done.returncode in (0, 2) and "== gate" in done.stdout, done.stdout + done.stderr
    missed = done.returncode != 0
    assert f"limits kept: {int(not missed)}, missed: {'gate' if missed else 'none'}" in done.stdout


def test_every_benchmark_has_its_small_size() -> None:
    """One that is new is not run."""
    assert sorted(SIZES) == [f"benchmarks.{name}" for name in names()]


def test_a_benchmark_on_request_runs_only_when_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It installs what the others do not need."""
    main = importlib.import_module("benchmarks.__main__")
    started: list[str] = []

    def record(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        started.append(command[-1])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", record)
    assert main.main([]) == 0 and "benchmarks.peers" not in started and len(started) == len(names()) - 1
    assert main.main(["peers"]) == 0 and started[-1] == "benchmarks.peers"


@pytest.mark.parametrize(
    "module", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in SIZES]
)
def test_every_benchmark_runs_small(module: str) -> None:
    """So little measures nothing: whether the limit was kept is not asked."""
    done = run(sys.executable, "-m", module, *SIZES[module].split())
    assert done.returncode in (0, 1) and done.stdout and "Traceback" not in done.stderr, done.stdout + done.stderr


@pytest.mark.long
def test_the_peers_are_compared_with_ttp_in_place_and_by_restart() -> None:
    """One program: in the first row the others keep their processes, in the second all have other ones; the step after the kill is a new one in both."""
    small = ("--runs", "1", "--rank-0-runs", "1", "--kills", "1", "--seed", "8")
    done = run(sys.executable, "-m", "benchmarks.peers", *small, "--systems", "ttp_in_place,ttp")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((ROOT / "output" / "peers" / "8.json").read_text())
    kills = {
        name: [kill for job in found["jobs"] if job["system"] == name for kill in job["kills"]]
        for name in ("ttp_in_place", "ttp")
    }
    assert [kill["stayed"] for kill in kills["ttp_in_place"]] == [True, True], done.stdout
    assert [kill["stayed"] for kill in kills["ttp"]] == [False, False], done.stdout
    for kill in (*kills["ttp_in_place"], *kills["ttp"]):
        back = kill["recovery"]
        assert back["lost"] == 0 and back["back_s"] == back["new_s"] == back["full_s"], kill


@pytest.mark.long
def test_soak_is_jobs_by_seed_and_pairs_of_faults_and_kills(tmp_path: Path) -> None:
    """All of them, one after the other, pairs and kills by restart and in place, and `make` ends well."""
    done = make(
        "soak",
        "SEED=5",
        "COUNT=20",
        "KILLS=1",
        "PAIRS_ARGS=--most 300 raise+kill",
        "FUZZ_ARGS=1 test_processor.py",
        "DEVICE_FAULTS=2",
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for reported in (
        "seeds 5 to 24: 20 jobs",
        "left at 300 situations: kill + raise",
        "fuzz: seed 5, 1 cases a test",
        "2 faults on the device",
        "1 kills, 1 without a lost step",
    ):
        assert reported in done.stdout, done.stdout
    for twice in ("left at 300 situations: kill + raise", "1 kills, 1 without a lost step"):
        assert done.stdout.count(twice) == 2, done.stdout
    assert "in place: 1 of 1" in done.stdout, done.stdout
