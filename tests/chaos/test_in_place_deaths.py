"""Many deaths at random moments of a job that ttp.protect protects, in the middle of messages, too: the next step comes each time."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.launching import Launch
from tests.chaos.test_in_place_protect import LOOP, Ended, assert_equal

pytestmark = [pytest.mark.long, pytest.mark.skipif(sys.platform != "linux", reason="watches /proc")]

RANKS = 3
KILLS = 40
LONGER = LOOP.replace("epochs(3)", "epochs(100)").replace("cap_mb=0.2", "cap_mb=0.2, find_unused_parameters=True")
"""Its buckets are the same after a restart, too."""


class Killer:
    """Kills processes of a running job, each when all ranks have made a step since the one before."""

    def __init__(self, job: Launch, rng: random.Random) -> None:
        self._job, self._rng = job, rng
        self._kills = 0
        self._at = dict.fromkeys(range(RANKS), 0)

    def run(self) -> None:
        while self._kills < KILLS:
            self._job.until(self._recovered, f"step of all ranks after kill {self._kills}")
            time.sleep(self._rng.uniform(0.0, 0.3))  # the moment is what is random
            newest = self._newest()
            self._at = {rank: step for rank, (step, _) in newest.items()}
            os.kill(newest[self._rng.randrange(RANKS)][1], signal.SIGKILL)
            self._kills += 1

    def _recovered(self) -> bool:
        steps = {rank: step for rank, (step, _) in self._newest().items()}
        return recoveries(self._job.text) == self._kills and all(steps[rank] > self._at[rank] for rank in steps)

    def _newest(self) -> dict[int, tuple[int, int]]:
        """Return each rank's newest step, and the process that made it."""
        found = dict.fromkeys(range(RANKS), (0, 0))
        for rank in found:
            with contextlib.suppress(FileNotFoundError, IndexError):
                step, pid, *_ = (self._job.out / f"losses-{rank}").read_text().splitlines()[-1].split()
                found[rank] = int(step), int(pid)
        return found


def recoveries(text: str) -> int:
    return in_place(text) + text.count("] restarting (")


def in_place(text: str) -> int:
    return text.count("training continues after step")


def test_the_next_step_comes_after_every_death(tmp_path: Path) -> None:
    """Seldom after a restart: where DistributedDataParallel waits for a message that was half way, which gloo does not wake."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    job = Ended(tmp_path / "job", RANKS, "", "", LONGER, lambda job: Killer(job, random.Random(seed)).run())
    assert recoveries(job.text) == KILLS and in_place(job.text) >= KILLS - 3, job.text[-4000:]
    whole = Ended(tmp_path / "whole", RANKS, "", "", LONGER)
    assert_equal(job, whole, RANKS)
