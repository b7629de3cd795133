"""Situations that faults drawn one by one seldom lead to, and which part of the random jobs each is.

A mistake in how long a controller waits, whom it takes for silent, or what it does when a roll forward fails shows only where several things
come together. Everything about them is drawn but that they do: who, when, for how long, what else. Owns the table of weights.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.simulation.handed_on import THREE_REPLICAS
from tests.simulation.in_place import LIMIT_S
from tests.simulation.job import Job
from tests.simulation.lost_in_turn import LONG_STEPS, lose_controllers
from tests.simulation.noticed import STEPS as NOTICED_STEPS
from tests.simulation.noticed import cut_some_off_and_notify, lose_all_and_notify
from tests.simulation.settings import Times
from tests.simulation.situations_in_place import regroups
from tests.simulation.situations_of_loss import (
    aborted_collectives,
    away_for_about_a_lease,
    controllers_change,
    controllers_take_turns,
    disks_fail,
    late_reports,
    lost_in_a_dump,
    lost_in_a_false_alarm,
    next_controller_hangs,
    no_disk_takes_the_step,
    places_fail,
    ranks_come_late,
    rolled_before_a_takeover,
    words_come_again,
    work_is_handed_on,
)
from tests.simulation.situations_of_time import (
    about_a_lease,
    about_the_hang_limit,
    compiles,
    deaf_controller,
    rolls_fail,
    rolls_follow_a_slow_update,
    silent_for_good,
    total_time,
    work_goes_on,
)
from tests.simulation.training import Layout, Training, even, pipeline, ring

WATCHED = Times(heartbeat_s=0.05, hang_floor_s=0.5, hang_factor=5.0, hang_start_s=2.0)
"""Hangs are looked for: the job learns its own pace."""
WATCHED_STEPS = 40


@dataclass(frozen=True)
class Situation:
    """What is put into a job, and what the job is like then; what is not said here is as its seed draws it."""

    share: float
    """Part of the random jobs."""
    put_in: Callable[[Job, random.Random], list[str]]
    """Returns what it has put in, for the reader of a replay."""
    harmless: bool = False
    layouts: tuple[Layout, ...] = ()
    steps: int = 0
    standbys: tuple[int, ...] = ()
    agents: bool = False
    """Launchers are there for certain."""
    times: Times = field(default_factory=Times)
    local_copy: bool | None = None
    own: bool = False
    """Each of several hosts has directories of its own."""

    def fitted(self, training: Training, standbys: int, rng: random.Random) -> tuple[Training, int]:
        """Return how a job trains, and its standbys, given what its seed draws."""
        layout = rng.choice(self.layouts or (training.layout,))
        local_copy = training.local_copy if self.local_copy is None else self.local_copy
        return Training(layout, self.steps or training.steps, local_copy), rng.choice(self.standbys or (standbys,))


_LED = (1, 1, 2)
_FEW_RANKS = (even(2), even(4), ring(3), ring(4, replicas=3), even(4, on_one_host=4))
"""For jobs that last: a second of more ranks takes longer to simulate."""
_SEVERAL_HOSTS = (even(4), even(8), ring(3), ring(4, replicas=3), pipeline(8, 2))
SITUATIONS = (
    # Patience, and the time that a fault may take.
    Situation(0.022, work_goes_on, layouts=_FEW_RANKS),
    Situation(0.006, total_time, layouts=_FEW_RANKS),
    # Roll forwards that fail.
    Situation(0.025, rolls_fail),
    Situation(0.015, rolls_follow_a_slow_update, local_copy=False),
    # Deafness and leases.
    Situation(0.025, deaf_controller),
    Situation(0.03, about_a_lease, layouts=_FEW_RANKS, steps=35, standbys=_LED),
    Situation(0.015, compiles, harmless=True, layouts=_FEW_RANKS, steps=30, standbys=_LED, agents=True),
    Situation(0.01, silent_for_good, steps=30),
    Situation(0.008, about_the_hang_limit, harmless=True, layouts=_FEW_RANKS, steps=WATCHED_STEPS, times=WATCHED),
    # Messages that are lost, late, or come again.
    Situation(0.02, lost_in_a_false_alarm, harmless=True),
    Situation(0.02, lost_in_a_dump),
    Situation(0.018, late_reports, layouts=_FEW_RANKS, steps=20),
    Situation(0.02, words_come_again),
    # Disks and collectives.
    Situation(0.02, disks_fail),
    Situation(0.012, no_disk_takes_the_step, local_copy=True),
    Situation(0.02, places_fail, layouts=_SEVERAL_HOSTS, standbys=_LED, own=True),
    Situation(0.01, aborted_collectives),
    Situation(0.03, work_is_handed_on, layouts=THREE_REPLICAS),
    # Controllers that are lost, or away.
    Situation(0.03, controllers_change, standbys=_LED),
    Situation(0.01, rolled_before_a_takeover, standbys=_LED),
    Situation(0.015, away_for_about_a_lease, harmless=True, steps=20, standbys=_LED),
    Situation(0.01, controllers_take_turns, layouts=_FEW_RANKS, steps=40, standbys=(2,)),
    Situation(0.005, lose_controllers, harmless=True, layouts=_FEW_RANKS, steps=LONG_STEPS, standbys=_LED),
    Situation(0.015, lose_all_and_notify, layouts=_FEW_RANKS, steps=NOTICED_STEPS, standbys=(0, 0, 1, 2)),
    Situation(0.006, cut_some_off_and_notify, layouts=_FEW_RANKS, steps=NOTICED_STEPS, standbys=_LED),
    # Recoveries without a checkpoint.
    Situation(
        0.06,
        regroups,
        layouts=_FEW_RANKS,
        steps=8,
        standbys=(0, 1, 1, 2),
        agents=True,
        times=Times(in_place_s=LIMIT_S),
        local_copy=False,
    ),
    # Ranks that come to a controller which has begun without them.
    Situation(0.02, ranks_come_late, standbys=_LED),
    # A controller that neither answers nor refuses.
    Situation(0.0025, next_controller_hangs, steps=40, standbys=(2, 2, 3)),
)
"""With their weights. All other jobs mix single faults (`scenario`)."""


def drawn(seed: int) -> tuple[Situation, random.Random] | None:
    """Return a seed's situation, and what it is drawn from; None: it has none."""
    rng = random.Random(f"situation {seed}")
    left = rng.random()
    for situation in SITUATIONS:
        left -= situation.share
        if left < 0:
            return situation, rng
    return None
