"""A process that is started in the place of a rank that ended unseen: some schedulers are faster than a lease.

It comes to the controller under the same rank, with nothing but what it loaded, and registers as alive. It does not hold
anything new, and it must not hide that its predecessor is gone.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

from tests.simulation.disk import OLDER_STEP
from tests.simulation.job import Job
from tests.simulation.network import UP, Route, Stream
from ttp.controller.core.facts.state import Stage
from ttp.controller.core.machine import refusal
from ttp.proto.messages import Heartbeat, Phase, Registration

PIDS_APART = 1000


class Newcomer:
    """Registers with the controller that is active now, beats, and leaves when that one says so, or is gone."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        self._controller = job.controller
        self._stream = Stream(rank, job.scheduler, job.rng, job.slowest_s, self._controller, Route())
        before = job.ranks[rank].registration()
        message = replace(before, pid=before.pid + PIDS_APART, state_step=OLDER_STEP, standby="")
        job.note(f"rank {rank} has another process, {message.pid}")
        self._stream.carry(UP, lambda *_: self._controller.when_running(lambda: self._register(message)), None)

    def _register(self, message: Registration) -> None:
        """The controller that knows the earlier process knows from now on that it has ended."""
        known = self._controller.state.members.table[self.rank].registration
        if refusal(self._controller.state, message):
            return  # all have regrouped since it would have begun: it is ordered to exit
        self._controller.receive(self._stream, message)
        now_known = self._controller.state.members.table[self.rank]
        if known is not None and known.pid != message.pid and now_known.dead is None and not self._controller.gone:
            self.job.broken(f"I11: rank {self.rank} has another process, and c{self._controller.place} sees no death")
        self._beat()

    def _beat(self) -> None:
        if self._controller.gone or self._stream.broken:
            return
        if self._controller.state.stage is Stage.EXITING:
            self._stream.broken = True
            self._controller.close_seen(self.rank, self._stream)
            return
        beat = Heartbeat(self.rank, Phase.COMPUTE, OLDER_STEP + 1)
        self._stream.carry(UP, self._controller.receive, beat)
        self.job.scheduler.after(self.job.times.heartbeat_s, self._beat)


def replace_process(job: Job, rng: random.Random, rank: int) -> bool:
    """A rank ends without a word, and another process comes in its place; False where the controller could not tell them apart."""
    known = job.controller.state.members.table[rank].registration
    if job.controller.gone or known is None or not job.ranks[rank].alive:
        return False
    job.kill(rank, quiet=True)
    job.scheduler.after(rng.uniform(0.0, 0.1), partial(_come, job, rank))
    return True


def _come(job: Job, rank: int) -> None:
    Newcomer(job, rank)
