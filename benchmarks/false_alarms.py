"""How often a job that is well is called hung: 10,000 noisy steps through the controller's machine, and its alarms counted.

Steps vary around their mean (log-normal, a third), one in a hundred has a stall besides with a heavy tail (Pareto), and each rank
beats once a second. Every 200 steps rank 0 evaluates while the others wait for it; every 500 all ranks save; both say so by a pause.
Nothing is timed: the clock is the simulation's own. After an alarm a new attempt begins, whose first steps have the start's limits.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from ttp.controller.core import machine
from ttp.controller.core.facts.events import ControllerSettings, Journal, Received, Tick
from ttp.processor.core.step_times import REPORTED_STEPS, StepTimes
from ttp.proto.messages import Heartbeat, Phase, Registration, ShardGroup, Upward

STEPS = 10_000
STALLS = 0.01
"""Part of the steps that have a stall."""
SPREAD = 0.3
EVALUATE_EVERY, SAVE_EVERY = 200, 500
EVALUATION_S, SAVE_S = (20.0, 120.0), (5.0, 60.0)
TAILS = {"none": inf, "moderate": 2.5, "heavy": 1.5}
"""Exponents of the Pareto distribution of stalls; a stall is at least two mean steps long."""
RANKS = 2


@dataclass(frozen=True)
class Places:
    """Where both ranks are for a while."""

    seconds: float
    phases: tuple[Phase, Phase]
    waiting: tuple[bool, bool]
    paused: tuple[bool, bool] = (False, False)


class Attempt:
    """A controller's machine with two ranks that beat, from the start of the job to an alarm or the last step."""

    def __init__(self, settings: ControllerSettings) -> None:
        self.state = machine.initial(settings, 0.0)
        self.now, self.step, self.hung = 0.0, 1, ""
        self.times = [StepTimes() for _ in range(RANKS)]
        self._reported = [0] * RANKS
        self._beat_at = [0.25, 0.75]
        for rank in range(RANKS):
            self._take(Received(_registration(rank)))

    def stay(self, places: Places) -> None:
        """Let this time go by."""
        for rank in range(RANKS):
            if places.paused[rank]:
                self.times[rank].pause(self.now)
        end = self.now + places.seconds
        while not self.hung:
            due = machine.next_deadline(self.state)
            moment = min(end, *self._beat_at, inf if due is None else due)
            self.now = max(self.now, moment)
            if moment == due:
                self._take(Tick())
            elif moment in self._beat_at:
                self._beat(self._beat_at.index(moment), places)
            if moment >= end:
                break
        for times in self.times:
            times.resume(self.now)

    def finish(self) -> None:
        """The step is finished on all ranks."""
        self.step += 1
        for times in self.times:
            times.finish(self.now)

    def _beat(self, rank: int, places: Places) -> None:
        self._beat_at[rank] += 1.0
        steps, times_s = self.times[rank].done
        new = min(steps - self._reported[rank], REPORTED_STEPS, len(times_s))
        self._reported[rank] = steps
        place = (rank, places.phases[rank], self.step, places.waiting[rank], places.paused[rank])
        self._take(Received(Heartbeat(*place, steps=steps, step_times_s=times_s[len(times_s) - new :])))

    def _take(self, event: Received | Tick) -> None:
        self.state, effects = machine.transition(self.state, event, self.now)
        for effect in effects:
            if isinstance(effect, Journal) and effect.event == "hung":
                self.hung = str(effect.fields["text"])


def _registration(rank: int) -> Upward:
    groups = (ShardGroup("g", "all", 1 << 20),)
    return Registration(rank, RANKS, f"host{rank}", 100 + rank, groups, 0, ("/nowhere",), "{}")


def steps(rng: random.Random, mean_s: float, tail: float, unannounced_s: float) -> Iterator[list[Places]]:
    """Yield for each step what its ranks do, one after the other. `unannounced_s`: so long it is not reported that rank 0 evaluates."""
    compute, ready, done = Phase.COMPUTE, Phase.READY, Phase.DONE
    for number in range(1, STEPS + 1):
        seconds = mean_s * rng.lognormvariate(0.0, SPREAD)
        if rng.random() < STALLS and tail < inf:
            seconds += 2.0 * mean_s * rng.paretovariate(tail)
        slow = rng.randrange(RANKS)
        both = min(seconds, mean_s)
        doings = [
            Places(both, (compute, compute), (False, False)),
            Places(seconds - both, (ready, compute) if slow else (compute, ready), (slow == 1, slow == 0)),
            Places(0.02 * mean_s, (Phase.UPDATING, Phase.UPDATING), (False, False)),
        ]
        if number % EVALUATE_EVERY == 0:
            evaluation_s = unannounced_s or rng.uniform(*EVALUATION_S)
            doings.append(Places(evaluation_s, (done, done), (False, True), (not unannounced_s, False)))
        if number % SAVE_EVERY == 0:
            doings.append(Places(rng.uniform(*SAVE_S), (done, done), (False, False), (True, True)))
        yield doings


def alarms(seed: int, mean_s: float, tail: float, unannounced_s: float = 0.0, **settings: float) -> list[str]:
    """Return the alarms in 10,000 steps, as the journal has them."""
    rng, found = random.Random(seed), []
    fixed = ControllerSettings.from_flat({"job_id": "job", "term": 1, "world_size": RANKS} | settings)
    attempt = Attempt(fixed)
    for doings in steps(rng, mean_s, tail, unannounced_s):
        for places in doings:
            attempt.stay(places)
        attempt.finish()
        if attempt.hung:
            found.append(attempt.hung)
            attempt = Attempt(fixed)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="of each kind of job")
    parser.add_argument("--means", type=float, nargs="+", default=[0.02, 0.5, 3.0], help="seconds of a mean step")
    options = parser.parse_args()
    print(f"alarms in {options.seeds} x {STEPS:,} steps, with a floor of 10 s from step 50 on (and of 60 s)")
    for mean_s in options.means:
        for name, tail in TAILS.items():
            counts = [
                sum(len(alarms(seed, mean_s, tail, hang_floor_s=floor_s)) for seed in range(options.seeds))
                for floor_s in (10.0, 60.0)
            ]
            print(f"steps of {mean_s:5.2f} s, {name:8} tail: {counts[0]:3} ({counts[1]})", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
