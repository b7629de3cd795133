"""What ranks of a simulated job do about controllers: they start standbys, enter them in a list that all can read, and see them end.

Owns the list, which outlives every rank and controller as the store of an attempt does. Draws times of its own, so that a job in which no
standby is started is the same job without it.
"""

from __future__ import annotations

import random
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from tests.simulation.controllers import Controller
from tests.simulation.in_place import FIRST_PID
from tests.simulation.network import DOWN, UP
from ttp.processor.core import events as ev
from ttp.processor.core.state import RankMode

if TYPE_CHECKING:
    from tests.simulation.job import Job
    from tests.simulation.rank import Rank

RESTORED_S = 3.0
"""So long a job must have trained undisturbed: a lease, the takeover, and one rank that cannot start a standby."""


class Standbys:
    """The standbys of a job. `unable`: ranks that cannot start one; `mute`: that do not answer when they are asked to."""

    def __init__(self, job: Job, count: int) -> None:
        self.job, self.count = job, count
        self.unable: set[int] = set()
        self.mute: set[int] = set()
        self.unlisted = False
        """No rank can read the list."""
        self._rng = random.Random(f"standbys {count}")
        self.listed = [f"c{place}" for place in range(1, 1 + count)]
        """Addresses, as ranks and launchers find them."""
        last = job.training.layout.world_size - 1
        self._starters = {place: (min(place, last), FIRST_PID + min(place, last)) for place in range(1, 1 + count)}
        """By place, the rank that has started it, and its process."""
        self._unseen: set[str] = set()
        """Standbys whose end no process has seen: the one that had started them was replaced (docs/limits.md)."""
        self._review_at = 0.0
        """When it is looked next whether there are as many as there must be; those that were asked for earlier are void."""
        self.judged = 0
        """How often there had to be as many as at the start."""
        self._review_after(RESTORED_S)

    def first_of(self, rank: int) -> str:
        """Return the standby that a rank starts at the beginning: ranks from 1 on do, in order; empty: none."""
        return f"c{rank}" if 1 <= rank <= self.count else ""

    def carry_out(self, process: Rank, order: ev.StartController | ev.LookForControllers) -> None:
        if isinstance(order, ev.StartController):
            self.start(process, order.known)
        else:
            self.look(process)

    def start(self, process: Rank, known: tuple[str, ...]) -> None:
        """A rank starts one: it listens after a while, and is entered in the list."""
        if process.rank in self.mute:
            return
        process.later(self._rng.uniform(0.05, 0.3), partial(self._started, process, known))

    def _started(self, process: Rank, known: tuple[str, ...]) -> None:
        others = [address for address in self.listed if address not in known] if known else []
        if process.rank in self.unable or others:
            process.put(ev.ControllerStarted("", "others were found" if others else "it has no room"))
            return
        controller = Controller(self.job, len(self.job.controllers))
        self.job.controllers.append(controller)
        self.job.note(f"rank {process.rank} starts c{controller.place}")
        self._starters[controller.place] = process.rank, process.pid
        self.listed.append(f"c{controller.place}")
        process.put(ev.ControllerStarted(f"c{controller.place}"))

    def look(self, process: Rank) -> None:
        if not self.unlisted:
            answer = partial(self._found, process)
            process.later(self._rng.uniform(0.001, 0.05), answer)

    def _found(self, process: Rank) -> None:
        process.put(ev.ControllersFound(tuple(self.listed)))

    def ended(self, controller: Controller) -> None:
        """The rank that started a controller sees it end; a while later there must be as many as before."""
        starter = self._starters.get(controller.place)
        if starter is not None:
            process = self.job.ranks[starter[0]]
            if not process.alive or process.pid != starter[1]:
                self._unseen.add(f"c{controller.place}")
                return
            process.later(
                self._rng.uniform(0.001, 0.02), partial(process.put, ev.ControllerEnded(f"c{controller.place}"))
            )
        self._review_after(RESTORED_S)

    def _review_after(self, seconds: float) -> None:
        moment = self._review_at = self.job.now + seconds
        self.job.scheduler.at(moment, partial(self._review, moment))

    def _review(self, asked_for: float) -> None:
        """Judge the job once it has trained undisturbed for long enough; wait until it has, unless it never will."""
        job = self.job
        if asked_for != self._review_at or not self.count or len(self.unable | self.mute) >= len(job.ranks):
            return
        if not all(rank.alive and not rank.state.finished for rank in job.ranks):
            return
        waits_s = max(0.0, self._calm_since() + RESTORED_S - job.now)
        if waits_s > 0.0:
            self._review_after(min(waits_s, RESTORED_S))
        else:
            self._must_be_restored()

    def _calm_since(self) -> float:
        """Return since when nothing keeps the job from restoring its standbys; inf: something does. What is never asked for is a
        standby during a fault, from the first freeze to the last thaw, nor by ranks that save without a controller."""
        job = self.job
        standing = (
            rank.state.standing is RankMode.TRAINING and not (rank.stopped or rank.hogged or rank.boundary.saving)
            for rank in job.ranks
        )
        if not all(standing):
            return inf
        moments = [job.last_loss_s, *(rank.started_s for rank in job.ranks)]
        moments += [strike.at_s for strike in job.strikes]
        moments += [at for at, line in job.journal if line.event in ("thawed", "assembled")]
        for controller in job.controllers:
            moments += [controller.paused_until, controller.cut_until, *controller.route.held_until.values()]
        for rank in job.ranks:
            moments += [rank.route.twice_until, *rank.route.held_until.values()]
            moments += [rank.stream.held(way) for way in (UP, DOWN)] if rank.stream is not None else []
        return max(moments)

    def _must_be_restored(self) -> None:
        """I13: in a job that trains on undisturbed, as many standbys as before take over from its controller, and every rank knows them."""
        job = self.job
        led_by = (rank.stream.controller for rank in job.ranks if rank.stream is not None)
        leader = max(led_by, key=lambda controller: controller.place, default=job.controller)
        self.judged += 1
        behind = {f"c{c.place}" for c in job.controllers if c.place > leader.place and c.idle and not c.gone}
        known = [
            rank.rank
            for rank in job.ranks
            if len(behind.intersection(rank.state.successors)) + len(self._unseen) < self.count
        ]
        if leader.gone or known:
            standing = "no controller leads" if leader.gone else f"c{leader.place} leads, {sorted(behind)} stand by"
            job.broken(f"I13: after {RESTORED_S:g} s of undisturbed training {standing}; too few for ranks {known}")
