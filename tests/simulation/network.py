"""Simulated streams: FIFO within one, no order between two, and ways to break, to stand still and to say things twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from tests.simulation.scheduler import Scheduler
from ttp.processor.handler import Closed, Incoming, Opened
from ttp.proto.codec import DownwardParcel
from ttp.proto.fence import Fence
from ttp.proto.messages import KeepAlive, Registration, Upward

if TYPE_CHECKING:
    from tests.simulation.controllers import Controller
    from tests.simulation.rank import Rank

UP, DOWN = "up", "down"
"""From a rank to its controller, and back."""


class Route:
    """The network of one process, whatever streams it opens. What is held arrives later, all of it and in order."""

    def __init__(self) -> None:
        self.held_until = {UP: 0.0, DOWN: 0.0}
        """A one-way partition holds one of the ways."""
        self.beside: frozenset[int] = frozenset()
        """Places of the controllers that are reached all the same."""
        self.twice_until = 0.0
        """Until then everything arrives twice."""
        self.loses: type | None = None
        """The next message of this kind is lost, on a stream that lives."""
        self.rejects = False
        """Whatever it dials from now on is refused, as by a firewall."""
        self.slowest_s = 0.0
        """Longest delay of a message, where it is longer than the job's."""

    def hold(self, way: str, until: float) -> None:
        self.held_until[way] = max(self.held_until[way], until)


class Stream:
    """One rank's bidirectional stream to a controller."""

    def __init__(
        self,
        rank: int,
        scheduler: Scheduler,
        rng: random.Random,
        slowest_s: float,
        controller: Controller,
        route: Route,
    ) -> None:
        self.rank, self.controller = rank, controller
        self.link = controller.link_of(self)
        """The controller's end."""
        self._scheduler = scheduler
        self._random = rng.random
        self._slowest_s = slowest_s
        self._route = route
        self._last = {UP: 0.0, DOWN: 0.0}
        self._held_until = 0.0
        self.broken = False
        self.up = False
        """Its rank's end is open: what is sent there is carried."""
        self.losing = False
        """What is sent from now on is lost: the stream is about to break."""

    def carry(self, way: str, deliver: Callable[[Stream, Any], None], message: object) -> None:
        """Deliver after a random delay, behind what was sent before; lost when the stream breaks first."""
        if self.broken or self.losing:
            return
        route, last, now, held = self._route, self._last, self._scheduler.now, self.held(way)
        if route.loses is type(message):
            route.loses = None
            return
        slowest_s = self._slowest_s if self._slowest_s > route.slowest_s else route.slowest_s
        moment = (now if now > held else held) + 0.0001 + self._random() * slowest_s
        last[way] = moment = moment if moment > last[way] else last[way]
        self._scheduler.at(moment, partial(self._arrive, way, deliver, message))
        if now < route.twice_until:
            # Both arrive within the network's time: a line that grew with every word that comes twice would be slower than any.
            last[way] = moment = max(moment, (now if now > held else held) + 0.0001 + self._random() * slowest_s)
            self._scheduler.at(moment, partial(self._arrive, way, deliver, message))

    def _arrive(self, way: str, deliver: Callable[[Stream, Any], None], message: object) -> None:
        if self.broken:
            return
        held = self.held(way)
        if held > self._scheduler.now:  # held while under way
            self._last[way] = max(self._last[way], held)
            self._scheduler.at(held, partial(self._arrive, way, deliver, message))
        else:
            deliver(self, message)

    def held(self, way: str) -> float:
        """Return until when nothing arrives at the end of this way."""
        controller = self.controller
        both_ways = self._held_until if self._held_until > controller.cut_until else controller.cut_until
        there = controller.route.held_until[way]
        here = 0.0 if controller.place in self._route.beside else self._route.held_until[way]
        one_way = here if here > there else there
        return both_ways if both_ways > one_way else one_way

    def hold(self, seconds: float) -> None:
        """Nothing arrives for a while, and then all of it (a route that flaps)."""
        self._held_until = max(self._held_until, self._scheduler.now + seconds)
        for way in self._last:
            self._last[way] = max(self._last[way], self._held_until)


class RankStream(Stream):
    """A stream as the shipped handler of a rank has it: it is asked for, opens or is refused, and closes."""

    def __init__(self, process: Rank, controller: Controller, fence: int) -> None:
        job = process.job
        super().__init__(process.rank, job.scheduler, job.rng, job.slowest_s, controller, process.route)
        self.process, self._fence = process, Fence("sim", fence)
        self._gone = False
        job.streams.append(self)

    @property
    def term(self) -> int:
        return self._fence.term

    @property
    def refused(self) -> bool:
        return self._gone or self._fence.refused

    @cached_property
    def beat(self) -> Incoming:
        """The item that comes most often."""
        return self.incoming(KeepAlive())

    def incoming(self, message: Any) -> Incoming:
        return Incoming(self, DownwardParcel("sim", self.controller.term, (self.rank,), message))

    def send(self, message: Upward) -> None:
        process = self.process
        process.job.send_up(process, message)
        if type(message) is Registration:
            process.job.happened("registers", self.rank)

    def close(self, drain_s: float = 0.0) -> None:
        self.process.job.abandon_stream(self)

    def dial(self) -> None:
        """The connection is asked for."""
        process, controller = self.process, self.controller
        if process.handler.stream is not self:
            return  # it was given up meanwhile
        if controller.gone or self._route.rejects:
            answered = max(self._route.held_until.values())
            if answered > self._scheduler.now:
                process.later(answered - self._scheduler.now, self._refuse)
            else:
                self._refuse()
            return
        self.up = True

        def answer() -> None:
            self.carry(DOWN, lambda *_: process.run_beside(self._greeted), None)

        self.carry(UP, lambda *_: controller.when_running(answer), None)

    def _refuse(self) -> None:
        """Nothing listens there."""
        self._gone = True
        self.process.put(Closed(self, "connection refused"))

    def _greeted(self) -> None:
        if self.term:
            return  # the greeting comes twice
        if refusal := self._fence.refusal(f"c{self.controller.place}", "sim", self.controller.term):
            self.close()
            self.process.put(Closed(self, refusal))
        else:
            self.process.put(Opened(self))
