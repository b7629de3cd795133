"""The launchers of a simulated job, one a host: who has died, to whichever controller is active."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.network import UP
from ttp.controller import events as ev
from ttp.proto.messages import AgentHello, WorkerExit

if TYPE_CHECKING:
    from tests.simulation.job import Job


class Agent:
    """Looks now and then whether its controller is there; goes on to the next one when nobody listens or a lease has passed
    in silence, and tells that one everything again."""

    def __init__(self, job: Job, host: int) -> None:
        self.job, self.host = job, host
        self.place = 0
        self.lost = False
        self._exits: list[WorkerExit] = []
        self._heard = 0.0
        self._look()

    def tell(self, report: WorkerExit) -> None:
        if self.lost:
            return
        self._exits.append(report)
        self._say(report)

    def _say(self, message: WorkerExit | AgentHello) -> None:
        controller = self.job.controllers[self.place]
        moment = max(self.job.scheduler.now, controller.cut_until, controller.route.held_until[UP])
        self.job.scheduler.at(moment, lambda: controller.take(ev.Received(message)))

    def _look(self) -> None:
        controller, times = self.job.controllers[self.place], self.job.times
        if controller.heard:
            self._heard = self.job.scheduler.now
        elif controller.gone or self.job.scheduler.now >= self._heard + times.lease_s:
            self.place = (self.place + 1) % len(self.job.controllers)
            self._heard = self.job.scheduler.now
            if not self.job.controllers[self.place].gone:
                ranks = tuple(r for r, host in enumerate(self.job.training.layout.hosts) if host == self.host)
                self._say(AgentHello(f"host{self.host}", ranks, tuple(100 + rank for rank in ranks)))
                for report in self._exits:
                    self._say(report)
        if not self.lost:
            self.job.scheduler.after(self.job.rng.uniform(0.05, 0.15), self._look)
