"""What ranks of a simulated job do about controllers: they start standbys, enter them in a list that all can read, and see them end.

Owns the list, which outlives every rank and controller as the store of an attempt does. Draws times of its own, so that a job in which no
standby is started is the same job without it.
"""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

from tests.simulation.controllers import Controller
from ttp.processor import events as ev

if TYPE_CHECKING:
    from tests.simulation.job import Job
    from tests.simulation.rank import Rank

RESTORED_S = 3.0
"""After the loss of a controller in a job that goes on undisturbed: a lease, the takeover, and one rank that cannot start a standby."""


class Standbys:
    """The standbys of a job. `unable`: ranks that cannot start one; `mute`: that do not answer when they are asked to."""

    def __init__(self, job: Job, count: int) -> None:
        self.job, self.count = job, count
        self.unable: set[int] = set()
        self.mute: set[int] = set()
        self.unlisted = False
        """Nobody can read the list."""
        self._rng = random.Random(f"standbys {count}")
        self.listed = [f"c{place}" for place in range(1, 1 + count)]
        """Addresses, as ranks and launchers find them."""
        self._starters = {place: min(place, job.training.layout.world_size - 1) for place in range(1, 1 + count)}

    def first_of(self, rank: int) -> str:
        """Return the standby that a rank starts at the beginning: ranks from 1 on do, in order; empty: none."""
        return f"c{rank}" if 1 <= rank <= self.count else ""

    judged = True
    """Random jobs are not judged yet: some of their faults keep a standby from coming in time (docs/limits.md)."""

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
        self._starters[controller.place] = process.rank
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
            process = self.job.ranks[starter]
            process.later(
                self._rng.uniform(0.001, 0.02), partial(process.put, ev.ControllerEnded(f"c{controller.place}"))
            )
        self.job.scheduler.after(RESTORED_S, partial(self._must_be_restored, self.job.now))

    def _must_be_restored(self, lost_s: float) -> None:
        """I13: in a job that trains on undisturbed, as many standbys as before take over from its controller, and every rank knows them."""
        job, leader = self.job, self.job.controller
        disturbed = any(strike.at_s > lost_s for strike in job.strikes) or job.killed or job.last_loss_s > lost_s
        training = all(rank.alive and rank.started_s < lost_s and not rank.state.finished for rank in job.ranks)
        if (
            not self.judged
            or not self.count
            or disturbed
            or not training
            or len(self.unable | self.mute) >= len(job.ranks)
        ):
            return
        behind = {f"c{c.place}" for c in job.controllers if c.place > leader.place and c.idle and not c.gone}
        known = [rank.rank for rank in job.ranks if len(behind.intersection(rank.state.successors)) < self.count]
        if leader.gone or known:
            standing = "no controller leads" if leader.gone else f"c{leader.place} leads, {sorted(behind)} stand by"
            job.broken(f"I13: {RESTORED_S:g} s after a controller was lost {standing}; too few for ranks {known}")
