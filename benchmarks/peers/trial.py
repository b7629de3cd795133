"""One job of one system: started, a rank killed once or more often, everything that it started ended.

Owns the processes and their end: each carries the job's mark in its environment, and none remains when the trial is over.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.environments import last_line
from benchmarks.peers.steps import Recovery, StepFiles, Steps, recovery, stayed, step_times
from benchmarks.peers.systems import Job, System
from ttp.chaos.observed.training_job import marked

START_S, AWAY_S, REFILL_S, JOB_S = 60.0, 45.0, 20.0, 150.0
"""Limits: to the first steps of all ranks; from a kill to a new step; from there to as many ranks as before; for the whole job."""
POLL_S = 0.05
FIRST_STEPS, NEXT_STEPS = (120, 160), (30, 70)
"""A kill comes after so many steps, at random: of the start, and of what came before."""
STEP_S = 0.02
"""A kill comes at a random moment of so long."""
DLROVER_SOCKETS = Path("/tmp/ckpt_sock")


@dataclass(slots=True)
class Kill:
    rank: int
    ranks: int
    """How many there were before."""
    place: int
    """0 for the job's first."""
    recovery: Recovery
    ended: bool
    """Whether the job ended instead."""
    stayed: bool | None
    """Whether the other ranks kept their processes."""


@dataclass(slots=True)
class Result:
    system: str
    victim: str
    kills: list[Kill] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    """From step to step, before the first kill."""
    error: str = ""
    """Why the job did not begin."""


def shared_memory(pid: int) -> list[Path]:
    """Return the files in shared memory that a process has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []  # ended meanwhile
    return [Path(line.split()[5]) for line in lines if " /dev/shm/" in line and not line.endswith("(deleted)")]


class Trial:
    """The processes of one job. Leaving it as a context manager ends them all."""

    def __init__(self, system: System, python: Path, ranks: int, folder: Path, save_every: int) -> None:
        folder.mkdir(parents=True)
        self.system, self.folder = system, folder
        self.mark = f"peers:{folder}"
        self._job = Job(python, ranks, folder)
        self._save_every = save_every
        self._files = StepFiles(folder)
        self._began = time.monotonic()
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        common = {
            "OMP_NUM_THREADS": "1", "TTP_TEST_MARK": self.mark, "PEERS_FOLDER": str(self.folder),
            "PEERS_SAVE_EVERY": str(self._save_every), "PEERS_LAST_STEP": "1000000", "PYTHONPATH": "",
            **self.system.environ,
        }  # fmt: skip
        with open(self.folder / "console.log", "ab") as output:
            for process in self.system.start(self._job):
                environ = {**os.environ, **common, **process.environ}
                self._processes.append(
                    subprocess.Popen(
                        process.command,
                        env=environ,
                        cwd=self.folder,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *exc: object) -> None:
        """Kill all by pid until none has the job's mark; remove the shared memory and the sockets that they had."""
        deadline = time.monotonic() + 20.0
        shared = set()
        while left := list(marked(self.mark)):
            shared |= {path for pid, _ in left for path in shared_memory(pid)}
            for pid, _ in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self._processes:
                process.poll()
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes remain: {left}")
        for process in self._processes:
            process.wait()
        for path in shared:
            path.unlink(missing_ok=True)
        shutil.rmtree(DLROVER_SOCKETS / self.folder.name, ignore_errors=True)

    def seconds_left(self) -> float:
        return self._began + JOB_S - time.monotonic()

    def look(self) -> Steps:
        return self._files.look()

    @property
    def steps(self) -> Steps:
        return self._files.steps

    def wait_for(self, condition: Callable[[Steps], bool], limit_s: float) -> bool:
        """Look at the steps until a condition holds; False when the time is over or the job has ended."""
        deadline = time.monotonic() + min(limit_s, self.seconds_left())
        while not condition(self.look()):
            if time.monotonic() > deadline or self.ended():
                return condition(self.look())
            time.sleep(POLL_S)
        return True

    def wait_for_more(self, count: int, ranks: int, limit_s: float) -> bool:
        """Wait for so many more steps of so many ranks."""

        def reached(steps: Steps) -> bool:
            return sum(step.ranks == ranks for step in steps.finished[before:]) >= count

        before = len(self.look().finished)
        return self.wait_for(reached, limit_s)

    def kill(self, rank: int, ranks: int, place: int) -> Kill:
        """Kill a rank and wait for a step beyond those finished before, and, where ranks come back, for one of as many ranks."""
        pid = self.look().pids[rank]
        killed_s = time.time()
        os.kill(pid, signal.SIGKILL)

        def back() -> Recovery:
            return recovery(self.steps.finished, killed_s, pid, ranks)

        self.wait_for(lambda _: back().new_s is not None, AWAY_S)
        if self.system.refills and back().new_s is not None:
            self.wait_for(lambda _: back().full_s is not None, REFILL_S)
        return Kill(rank, ranks, place, back(), self.ended(), stayed(self.steps.finished, killed_s, pid))

    def ended(self) -> bool:
        """True when every process that was started has ended."""
        return all(process.poll() is not None for process in self._processes)

    def console_error(self) -> str:
        """Return the last line that names an error, else the last line."""
        lines = (self.folder / "console.log").read_text(encoding="utf-8", errors="replace").splitlines()
        return last_line("\n".join([line for line in lines if "Error" in line][-1:] or lines))


def run(
    name: str, system: System, python: Path, ranks: int, kills: int, victim: str, save_every: int, folder: Path, draw: random.Random
) -> Result:  # fmt: skip
    """Run one job with so many kills, of rank 0 or of `others`; stop at the first that it does not survive."""
    result = Result(name, victim)
    with Trial(system, python, ranks, folder, save_every) as trial:
        trial.start()
        if not trial.wait_for_more(draw.randrange(*FIRST_STEPS), ranks, START_S):
            result.error = trial.console_error()
            return result
        result.step_s = step_times(trial.steps.finished, time.time(), ranks)
        for place in range(kills):
            time.sleep(draw.random() * STEP_S)
            now = trial.look().finished[-1].ranks
            if now == 1 or trial.seconds_left() < AWAY_S:
                break  # the only one left; too late to see what follows
            rank = 0 if victim == "0" else draw.randrange(1, now)
            try:
                kill = trial.kill(rank, now, place)
            except ProcessLookupError:
                break  # the rank had ended by itself
            result.kills.append(kill)
            left = now if system.refills else now - 1
            if kill.recovery.new_s is None or place == kills - 1:
                break
            trial.wait_for_more(draw.randrange(*NEXT_STEPS), left, REFILL_S)
    return result
