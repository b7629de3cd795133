"""Jobs that several real-process tests share."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from filelock import FileLock

from ttp.chaos.observed.training_job import Observed, TrainingJob
from ttp.launch.watch.processes import is_stopped

SMALL = (
    "--model_config.num_layers=2",
    "--model_config.hidden_size=32",
    "--model_config.ffn_hidden_size=64",
    "--model_config.num_attention_heads=2",
    "--model_config.num_query_groups=1",
    "--model_config.seq_length=32",
    "--dataset_config.batch_size=2",
)
"""A model so small that a test's time is the starting of processes."""

STEPS = 24
ROOT = Path(__file__).resolve().parents[2]

JOB_S = 800.0
"""A job of a few attempts takes a minute; this is for a machine that has ten times as much to do."""
TEST_S = 1800.0
"""A test waits for a job or two of its own, and the first one that asks for it for a job that it shares with others."""

RunJob = Callable[..., "FinishedJob"]


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Give the tests of this folder that say nothing else the time that their processes may need."""
    here = f"{Path(__file__).parent}{os.sep}"
    for item in items:
        if str(item.path).startswith(here) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_S))


class FinishedJob(Observed):
    """A job that has ended well, in this process or in another worker of the tests."""

    def ended(self) -> str:
        return "status 0"

    def console_tail(self, lines: int = 40) -> str:
        return "\n".join((self.output_dir / "console.log").read_text(errors="replace").splitlines()[-lines:])


@pytest.fixture(scope="session")
def whole_job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunJob:
    """Return a function that gives the finished baseline job of so many ranks and overrides, trained once for all workers of a session."""
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if hasattr(request.config, "workerinput") else own) / "whole"
    shared.mkdir(exist_ok=True)

    def run(ranks: int, *overrides: str) -> FinishedJob:
        folder = shared / f"dp{ranks}_{hashlib.sha256(repr(overrides).encode()).hexdigest()[:12]}"
        done = folder.with_suffix(".done")
        with FileLock(folder.with_suffix(".lock")):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a worker for which it failed
                run_to_end(folder, ranks, *overrides)
                done.touch()
        return FinishedJob(folder)

    return run


def arguments(*overrides: str) -> tuple[str, ...]:
    return (*SMALL, f"--training_config.training_iters={STEPS}", *overrides)


def run_to_end(
    output: Path,
    ranks: int,
    *overrides: str,
    faults: str = "",
    status: int = 0,
    restarts: int = 3,
    wait_s: float = JOB_S,
    meanwhile: Callable[[TrainingJob], object] = lambda job: None,
    environ: Mapping[str, str] | None = None,
) -> TrainingJob:
    """Train one job to its end, demand its exit status and that nothing remains, and return it. `meanwhile` is called
    once with the job that has just been started."""
    launcher = ("--max-restarts", str(restarts))
    environ = {"TTP_FAULTS": faults, **(environ or {})}
    with TrainingJob(output, ranks=ranks, overrides=arguments(*overrides), environ=environ, launcher=launcher) as job:
        meanwhile(job)
        got = job.wait(wait_s)
    assert got == status, f"status {got}, expected {status}\n{job.console_tail(80)}"
    assert job.leftovers() == []
    return job


def killed_together(output: Path, ranks: int, victims: Collection[int], step: int, *overrides: str) -> TrainingJob:
    """Train to the end a job in which these ranks die at one moment, all of them READY(step).

    If each killed itself there, the first one's death could break the reductions of the others before they are READY, and
    they would live: so each stops itself, and all are killed when the last has come there. No lease may end before that.
    """

    def kill_all(job: TrainingJob) -> None:
        def all_stopped() -> bool:
            pids = job.pids()
            return all(rank in pids and is_stopped(pids[rank]) for rank in victims)

        job.wait_for(all_stopped, f"ranks {sorted(victims)} stopped at READY({step})", JOB_S)
        for rank in victims:
            job.kill(rank)

    faults = ";".join(f"stop:rank={rank},step={step},point=ready" for rank in victims)
    return run_to_end(output, ranks, *overrides, faults=faults, meanwhile=kill_all, environ={"TTP_LEASE_S": "60"})


@pytest.fixture(autouse=True, scope="session")
def hang_up_is_not_ignored() -> Iterator[None]:
    """Jobs begin with SIGHUP as a terminal has it, also where the tests themselves run under nohup: ttprun heeds the difference."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def install_library(folder: Path, packages: Sequence[str]) -> Path:
    """Install packages without their dependencies into a folder of its own, for PYTHONPATH."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *packages]
    done = subprocess.run(install, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def run_script(ranks: int, *script: str, faults: str = "", launcher: str = "ttp.launch") -> str:
    """Run a script with its arguments to its good end under a launcher; return what all of it printed."""
    done = subprocess.run(
        [sys.executable, "-m", launcher, "--nproc-per-node", str(ranks), *script],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TTP_FAULTS": faults},
        capture_output=True,
        text=True,
        timeout=JOB_S,
        check=False,
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    return text
