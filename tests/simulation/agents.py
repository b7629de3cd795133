"""The launchers of a simulated job, one a host: who has died, to whichever controller is active."""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import TYPE_CHECKING, cast

from tests.simulation.controllers import AgentLink
from tests.simulation.in_place import Replacements
from tests.simulation.network import DOWN, UP
from ttp.controller.core.facts import events as ev
from ttp.controller.core.ranks.generations import ENDS
from ttp.proto.fence import Fence
from ttp.proto.messages import (
    NO_PROCESS,
    AgentHello,
    Downward,
    Exit,
    Replace,
    ReplaceFailed,
    StandbyList,
    TakePlaces,
    Upward,
    Vouch,
    WorkerExit,
)

if TYPE_CHECKING:
    from tests.simulation.controllers import Controller
    from tests.simulation.job import Job
    from tests.simulation.rank import Rank

KNOWN_WITHIN_S = 0.3
"""What a controller that is not away says to a launcher has come by then."""


class Agent:
    """Knows the first controller, and later those that it learns of. Checks now and then whether its controller is there;
    goes on to the next one when none listens or a lease has passed in silence, and reports everything to that one again."""

    def __init__(self, job: Job, node: int) -> None:
        self.job, self.node, self.host = job, node, f"host{node}"
        self.came_s = 0.0
        """When it attaches for the first time."""
        self.processes = {process.rank: process for process in job.ranks if process.node == node}
        """Those that it has started, the newest of each rank."""
        self.places = 0 if self.processes else max(Counter(job.nodes).values())
        self.cut_until = 0.0
        """Nothing that it says arrives before, and nothing comes to it."""
        self.addresses = ["c0"]
        self.lost = False
        self.replacements = Replacements(self)
        self.place = 0
        self._link: AgentLink | None = None
        """Its stream to the controller in its place."""
        self._of_place: Controller | None = None
        """The controller in its place, once it was looked for."""
        self._lease_s = inf
        self._exits: list[WorkerExit] = []
        self._received_at = 0.0
        self._fence = 0
        """The highest term of a controller that has said something."""
        self._fenced = False
        """The controller in its place has a lower one."""
        job.scheduler.at(0.0, self._come)
        job.scheduler.after(job.times.heartbeat_s, self._vouch)
        self._look()

    @property
    def controller(self) -> Controller:
        """The one in its place."""
        if self._of_place is None:
            self._of_place = self.job.controller_at(self.addresses[self.place])
        return self._of_place

    def tell(self, report: WorkerExit) -> None:
        process = self.processes.get(report.rank)
        if self.lost or process is None or report.pid != process.pid:
            return  # its place is another process's
        self._exits.append(report)
        if self._link is not None:
            self._say(report)

    def report(self, failure: ReplaceFailed) -> None:
        if not self.lost and self._link is not None:
            self._say(failure)

    def replaced(self, process: Rank) -> None:
        """It has started this one. What was seen of an earlier one of this rank is over: the next controller is not to take it for the new one's."""
        self.processes[process.rank], self.places = process, 0
        self._exits = [report for report in self._exits if report.rank != process.rank]

    def leave(self, delay_s: float) -> None:
        """It ends."""
        self.lost = True
        self.job.scheduler.after(delay_s, self._detach)

    def _vouch(self) -> None:
        """Say which processes it sees alive and running."""
        pids = (process.pid if process.runs else NO_PROCESS for process in self.processes.values())
        if self._link is not None and not self.lost and self.processes:
            self._say(Vouch(tuple(self.processes), tuple(pids)))
        if not self.lost:
            self.job.scheduler.after(self.job.times.heartbeat_s, self._vouch)

    def take_in(self, controller: Controller, message: Downward) -> None:
        """A message of the controller comes when the network carries it, and while the agent is still there."""

        def learn() -> None:
            if self.lost or self.controller is not controller or self._link is None:
                return
            if isinstance(message, StandbyList):
                self._lease_s = message.lease_s
                self.addresses += [address for address in message.addresses if address not in self.addresses]
            elif isinstance(message, Replace):
                self.replacements.take(message)
            elif isinstance(message, TakePlaces):
                self.replacements.sit(message)
            elif isinstance(message, Exit) and message.reason == ENDS:
                if self.processes:  # it may be said on two streams
                    self._become_spare()
            elif isinstance(message, Exit):
                self.replacements.over = True

        held = max(controller.cut_until, controller.route.held_until[DOWN], self.cut_until)
        moment = max(self.job.now, held) + self.job.slowest_s
        self.job.scheduler.at(moment, learn)

    def _become_spare(self) -> None:
        """Its node was given up: it ends its processes, and has room for others."""
        for process in self.processes.values():
            if process.alive:
                self.job.process_gone(process, "signal SIGKILL")
        self.places, self.processes, self._exits = len(self.processes), {}, []
        self.attach_again()

    def attach_again(self) -> None:
        """On another stream: it has other ranks now."""
        if not self.lost:
            self._detach()
            self._attach()

    def _say(self, message: Upward) -> None:
        controller, link = self.controller, self._link
        assert link is not None
        self.job.scheduler.at(self._arrival(), lambda: controller.receive_from_agent(link, message))

    def _arrival(self) -> float:
        controller = self.controller
        return max(self.job.scheduler.now, controller.cut_until, controller.route.held_until[UP], self.cut_until)

    def _come(self) -> None:
        if self.job.now < self.came_s:
            self.job.scheduler.at(self.came_s, self._come)
        else:
            self._attach()

    def _attach(self) -> None:
        if self.lost or self.controller.gone:
            return
        self._fenced = bool(Fence("sim", self._fence).refusal(self.addresses[self.place], "sim", self.controller.term))
        if self._fenced:
            return
        self._link = AgentLink(self, self.controller)
        pids = tuple(process.pid for process in self.processes.values())
        self._say(AgentHello(self.host, tuple(self.processes), pids, self.places))
        for report in self._exits:
            self._say(report)

    def _detach(self) -> None:
        if self._link is not None:
            link, self._link = self._link, None
            controller = self.controller
            self.job.scheduler.at(self._arrival(), lambda: controller.agent_gone(link))

    def _look(self) -> None:
        controller, now = self.controller, self.job.scheduler.now
        if controller.sends and not self._fenced and now >= self.cut_until:
            self._received_at, self._fence = now, max(self._fence, controller.term if self._link is not None else 0)
        elif now >= self.came_s and (controller.gone or self._fenced or now >= self._received_at + self._lease_s):
            self._detach()
            self.addresses += [address for address in self.job.standbys.listed if address not in self.addresses]
            self.place, self._of_place = (self.place + 1) % len(self.addresses), None
            self._received_at = now
            self._attach()
        if not self.lost:
            self.job.scheduler.after(self.job.rng.uniform(0.05, 0.15), self._look)

    def unknown_standbys(self) -> tuple[str, ...]:
        """Return the standbys that the first controller knew a while before its last line, and that this launcher does not know."""
        first = self.job.controllers[0]
        if self.lost or self.cut_until or first.absences or not first.journal:
            return ()
        known_until_s = first.journal[-1][0] - KNOWN_WITHIN_S
        lines = [line for at, line in first.journal if max(at, self.came_s) <= known_until_s]
        known = [address for line in lines for address in _standbys_in(line)]
        return tuple(address for address in known if address not in self.addresses)


def _standbys_in(line: ev.Journal) -> tuple[str, ...]:
    """Return the standbys that are known from a line of a journal on."""
    if line.event == "assembled":
        return tuple(map(str, cast("tuple[str, ...]", line.fields["standbys"])))
    return (str(line.fields["address"]),) if line.event == "standby_started" else ()
