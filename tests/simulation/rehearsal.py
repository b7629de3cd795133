"""How a simulated rank's training thread gives a step up before its update, with all others, and computes it again (TTP_REHEARSE)."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.job import Job
    from tests.simulation.rank import Rank

REHEARSED = 0.12
"""Part of the jobs that rehearse some of their steps."""


class Rehearsal:
    """One rank's part. The shipped gate takes the step back."""

    def __init__(self, process: Rank) -> None:
        self._process = process
        self.steps: set[int] = set()
        """Those that are computed twice, the same on every rank."""
        self._given_up: set[int] = set()

    def begin_anew(self, steps: set[int]) -> None:
        """Its process trains on in another generation of groups, or is new: all ranks agree again on what they compute twice."""
        self.steps, self._given_up = steps, set()

    def collective(self, step: int) -> str:
        """Return the name of the spanning collective that this rank enters: the record of the first try commits nothing."""
        return "norm tried" if self._due(step) else "norm"

    def instead_of(self, step: int, update: Callable[[], None]) -> Callable[[], None]:
        """Return what a rank does that has the record of `step`."""
        if not self._due(step):
            return update
        return partial(self._process.pass_gate, partial(self._step_back, step), partial(self._compute_again, step))

    def _due(self, step: int) -> bool:
        return step in self.steps and step not in self._given_up

    def _step_back(self, step: int) -> None:
        if not self._process.main_raised:
            self._process.gate.step_back(step)

    def _compute_again(self, step: int) -> None:
        """The groups are made again: all ranks meet, and none can while one is dead."""
        process = self._process
        if process.main_raised:
            return
        self._given_up.add(step)
        process.replica.step_back(step)
        process.job.happened(f"given up {step}", process.rank)
        again = partial(process.run, self._enter_train)
        process.enter("groups made again", step, process.job.everybody, again)

    def _enter_train(self) -> None:
        if not self._process.main_raised:
            self._process._compute()


def rehearse(job: Job, rng: random.Random) -> None:
    """Have some jobs compute some of their steps twice. None that is about a hang: such a step takes twice as long."""
    if rng.random() >= REHEARSED:
        return
    steps = {step for step in range(1, job.training.steps + 1) if rng.random() < 0.6}
    for process in job.ranks:
        process.rehearsal.steps = steps
    job.note(f"no fault: steps {sorted(steps)} are computed twice")
