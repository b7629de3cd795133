"""How often a rank that is well is named a straggler, how soon one that is slow is, and what naming costs at ten thousand ranks.

Simulated time series, by seed, through the rank's own measuring (`StepTimes`) and the controller's judging (`StragglerWatch`); nothing is timed but the last
part, the clock is the simulation's own. Each rank's own time of a step varies around the job's (log-normal), which varies itself from step to step
(sequences of other lengths). Besides: one step in a hundred of a rank has a stall with a heavy tail (Pareto), every fiftieth a garbage collection; ranks
differ for good and drift for hundreds of steps (an Ornstein-Uhlenbeck process); every 200 steps rank 0 evaluates while the others wait and says nothing
of it; every 500 all ranks save. A rank beats once a second. More ranks do fewer steps and series: `sizes`.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
import time
from dataclasses import dataclass

from ttp.controller.stragglers import WINDOW, Change, StragglerWatch
from ttp.processor.core.step_times import StepTimes

STEPS = 10_000
RANKS = (2, 8, 64, 1024)
MEANS_S = (0.05, 2.0)
"""Of a step: many to a heartbeat, and one to two heartbeats."""
RANK_STEPS = 2_048_000
"""Steps of a series times its ranks, at most: more ranks do fewer steps, so that no row takes more than some minutes."""
SLOWED_AT = 400
"""The step from which on the last rank is slower."""


@dataclass(frozen=True, slots=True)
class Noise:
    """What makes steps uneven; standard deviations as a part of the mean step."""

    step: float
    """Of one rank's time from step to step."""
    common: float = 0.2
    """Of all ranks' alike."""
    drift: float = 0.015
    """Of one rank, for hundreds of steps."""
    lasting: float = 0.01
    """Between ranks, for good."""
    stalls: float = 0.01
    """Part of a rank's steps that have one."""
    tail: float = 1.5
    """Exponent of the stalls' Pareto distribution."""


NOISES = {
    "quiet": Noise(0.02, common=0.05, drift=0.005),
    "usual": Noise(0.05),
    "loud": Noise(0.15, stalls=0.03),
}


class Job:
    """Data-parallel ranks that take steps together, and the controller's watch over them."""

    def __init__(self, seed: int, ranks: int, noise: Noise, mean_s: float) -> None:
        self._rng, self._noise, self._mean_s = random.Random(seed), noise, mean_s
        self._lasting = [1.0 + self._rng.gauss(0.0, noise.lasting) for _ in range(ranks)]
        self._drift = [0.0] * ranks
        self._times = [StepTimes() for _ in range(ranks)]
        self._beats = [(self._rng.random(), rank) for rank in range(ranks)]
        """When each rank sends its next heartbeat: a heap."""
        heapq.heapify(self._beats)
        self.watch = StragglerWatch(1.0)
        for rank in range(ranks):
            self.watch.join(rank, f"node{rank // 8}", 100 + rank, "the model")
        self.now = 0.0

    def step(self, number: int, slowed: float = 1.0) -> list[Change]:
        """Do a step, the last rank `slowed` times as long as it would; return what the watch has found by the end of it."""
        rng, noise, changes = self._rng, self._noise, list[Change]()
        common = rng.lognormvariate(0.0, noise.common)
        own = [self._own(rank, number, common) for rank in range(len(self._times))]
        own[-1] *= slowed
        end = self.now + max(own) + 0.02 * self._mean_s
        for times, own_s in zip(self._times, own, strict=True):
            times.wait(self.now + own_s)
            times.go_on(end)
            times.finish(end)
        if number % 500 == 0:  # all ranks save, and say so
            for times in self._times:
                times.pause(end)
                times.resume(end + 30.0 * self._mean_s)
            end += 30.0 * self._mean_s
        while self._beats[0][0] <= end:
            moment, rank = self._beats[0]
            following = moment + 1.0
            if (shares := self._times[rank].take_shares()) is not None:
                self.watch.take(rank, number, shares[0], moment)
            else:
                while following <= end:  # nor have those until the step's end: nothing new is judged by them
                    following += 1.0
            heapq.heapreplace(self._beats, (following, rank))
            changes += self.watch.look(moment)
        self.now = end
        return changes

    def _own(self, rank: int, number: int, common: float) -> float:
        rng, noise = self._rng, self._noise
        self._drift[rank] += -self._drift[rank] / 300.0 + rng.gauss(0.0, noise.drift * (2.0 / 300.0) ** 0.5)
        own = common * self._lasting[rank] * (1.0 + self._drift[rank]) * rng.lognormvariate(0.0, noise.step)
        if rng.random() < noise.stalls:
            own += rng.paretovariate(noise.tail)
        if (number + 7 * rank) % 50 == 0:
            own += 0.3
        if rank == 0 and number % 200 == 0:
            own += rng.uniform(20.0, 120.0)
        return own * self._mean_s


def false_alarms(seed: int, ranks: int, noise: Noise, mean_s: float, steps: int = STEPS) -> int:
    """Return how often a rank was named in a job in which none is slow."""
    job = Job(seed, ranks, noise, mean_s)
    return sum(not change.over for number in range(1, steps + 1) for change in job.step(number))


def found_after(seed: int, ranks: int, noise: Noise, mean_s: float, slowed: float) -> tuple[int | None, float]:
    """Return after how many steps a rank that is slower from SLOWED_AT on was named (None: not in 1,000), and the ratio it was named with."""
    job = Job(seed, ranks, noise, mean_s)
    for number in range(1, SLOWED_AT + 1001):
        for change in job.step(number, slowed if number > SLOWED_AT else 1.0):
            if not change.over and change.straggler.rank == ranks - 1 and number > SLOWED_AT:
                return number - SLOWED_AT, change.straggler.ratio
    return None, 0.0


def sizes(ranks: int, seeds: int, steps: int) -> tuple[int, int]:
    """Return how many steps a series without a slow rank has, and in how many series a rank becomes slower: as many as asked for, and fewer of many ranks."""
    return min(steps, max(1, RANK_STEPS // ranks)), min(4 * seeds, max(1, RANK_STEPS // (200 * ranks)))


def cost(ranks: int, windows: int = 5) -> tuple[float, float, float]:
    """Return the processor time that a heartbeat's `take` and `look` need, microseconds, that the longest `look` needs, milliseconds, and all of a
    window's of a rank, microseconds."""
    rng = random.Random(1)
    watch = StragglerWatch(1.0)
    for rank in range(ranks):
        watch.join(rank, f"node{rank // 8}", 100 + rank, "the model")
    took, longest = 0.0, 0.0
    for step in range(1, windows * WINDOW + 1):
        own = [rng.lognormvariate(0.0, 0.05) for _ in range(ranks)]
        began = time.process_time()
        for rank, own_s in enumerate(own):
            watch.take(rank, step, own_s, float(step))
            before = time.process_time() if rank == ranks - 1 else 0.0
            watch.look(float(step))
            if before:
                longest = max(longest, time.process_time() - before)
        took += time.process_time() - began
    beats = windows * WINDOW * ranks
    return 1e6 * took / beats, 1e3 * longest, 1e6 * took / windows / ranks


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stragglers", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="of each kind of noise")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[*RANKS])
    parser.add_argument("--cost", type=int, default=10_000, help="ranks of the part that is timed")
    options = parser.parse_args(arguments)
    print("ranks  noise  a step   false alarms                   20 % slower: found after (steps)   ratio")
    for ranks in options.ranks:
        count, series = sizes(ranks, options.seeds, options.steps)
        for name, noise in NOISES.items():
            for mean_s in MEANS_S:
                alarms = [false_alarms(seed, ranks, noise, mean_s, count) for seed in range(options.seeds)]
                found = [found_after(100 + seed, ranks, noise, mean_s, 1.2) for seed in range(series)]
                steps = [after for after, _ in found if after is not None]
                lost = len(found) - len(steps)
                most = f"median {statistics.median(steps):.0f}, most {max(steps)} of {series}" if steps else "never"
                ratios = statistics.median(ratio for after, ratio in found if after is not None) if steps else 0.0
                print(
                    f"{ranks:5}  {name:6} {mean_s:5.2f} s   {sum(alarms):3} in {len(alarms)} x {count:6,} steps      {most}"
                    f"{f', {lost} not found' if lost else ''}      {ratios:.3f}",
                    flush=True,
                )
    beat_us, look_ms, window_us = cost(options.cost)
    print(
        f"{options.cost} ranks: {beat_us:.2f} us a heartbeat, the longest look {look_ms:.1f} ms, a window {window_us:.1f} us a rank"
    )


if __name__ == "__main__":
    main()
