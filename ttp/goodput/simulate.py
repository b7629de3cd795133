"""The same job as the closed form's, drawn fault by fault (numpy, seeded).

Owns the drawing of faults and what each sets back. Knows no formula of `closed_form.py`: each checks the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ttp.goodput.policy import Policy, Split

CONFIDENCE = 1.96
"""Standard errors on each side of the mean for 95 %."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """The mean of many runs of a job."""

    split: Split
    error: float
    """The standard error of `split.steps`."""
    faults: float
    """Of one run, on average."""
    runs: int

    def interval(self, errors: float = CONFIDENCE) -> tuple[float, float]:
        """Return the confidence interval of the share of new steps."""
        return self.split.steps - errors * self.error, self.split.steps + errors * self.error


def simulate(policy: Policy, lasts_s: float, *, runs: int, seed: int) -> Simulated:
    """Draw `runs` jobs of `lasts_s` seconds. Work that is not held at the end counts, as no fault has taken it."""
    draw = np.random.default_rng(seed)
    rates = np.array([fault.per_s for fault in policy.faults])
    downs = np.array([fault.down_s for fault in policy.faults])
    covered = np.array([fault.covered for fault in policy.faults], dtype=bool)
    rate = float(rates.sum())
    now, place, kept, down_s, faults, saved = (np.zeros(runs) for _ in range(6))
    kind = np.full(runs, -1)  # of the fault that the job is down for; -1: it trains

    while (busy := now < lasts_s).any():
        trains = busy & (kind < 0)
        length = np.full(runs, math.inf) if not rate else draw.exponential(1.0 / rate, runs)
        left = lasts_s - now
        ran = np.minimum(length, left)[trains]
        begun = place[trains]
        end, work, waits = _run(policy, begun, ran)
        now[trains] += ran
        kept[trains] += work
        saved[trains] += waits
        broken = trains & (length < left)
        place[trains] = end

        waits_for = busy & (kind >= 0)
        needs = np.where(waits_for, downs[np.maximum(kind, 0)] if len(downs) else 0.0, 0.0)
        spent = np.minimum(np.minimum(length, needs), left)
        now[waits_for] += spent[waits_for]
        down_s[waits_for] += spent[waits_for]
        again = waits_for & (length < needs) & (length < left)
        kind[waits_for & ~again & (needs <= length)] = -1

        struck = broken | again
        count = int(struck.sum())
        if count:
            faults[struck] += 1
            kind[struck] = draw.choice(len(rates), size=count, p=rates / rate)
            place[struck] = _held(policy, place[struck], covered[kind[struck]])
    done = kept + _work_at(policy, place)
    steps = done / lasts_s / (1.0 + policy.slowdown)
    waited = (saved + _waits_at(policy, place)) / lasts_s + steps * policy.slowdown
    down = down_s / lasts_s
    parts = Split(
        float(steps.mean()), float(waited.mean()), float((1.0 - steps - waited - down).mean()), float(down.mean())
    )
    error = float(steps.std(ddof=1) / math.sqrt(runs)) if runs > 1 else math.inf
    return Simulated(parts, error, float(faults.mean()), runs)


Times = np.ndarray[tuple[int], np.dtype[np.float64]]
Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]


def _cycle(policy: Policy) -> float:
    """Return the running time between two persistent checkpoints' ends; of one piece where there are none."""
    return (policy.held_s + policy.hold_s) * (policy.held_count or 1) + (policy.save_s if policy.held_count else 0.0)


def _run(policy: Policy, place: Times, ran: Times) -> tuple[Times, Times, Times]:
    """Train from these places in the cycle; return the new places, and work and waits of the cycles that have ended."""
    cycles = np.floor((place + ran) / (cycle := _cycle(policy)))
    count = policy.held_count or 1
    waits = policy.hold_s * count + (policy.save_s if policy.held_count else 0.0)
    return place + ran - cycles * cycle, cycles * policy.held_s * count, cycles * waits


def _held(policy: Policy, place: Times, covered: Flags) -> Times:
    """Return where a fault sets the job back to: to the last held moment, or the beginning of the cycle."""
    piece = policy.held_s + policy.hold_s
    pieces = np.minimum(np.floor(place / piece), policy.held_count or 1)
    return np.where(covered, pieces * piece, 0.0)


def _work_at(policy: Policy, place: Times) -> Times:
    piece = policy.held_s + policy.hold_s
    pieces = np.minimum(np.floor(place / piece), policy.held_count or 1)
    part = np.where(pieces < (policy.held_count or 1), np.minimum(place - pieces * piece, policy.held_s), 0.0)
    return pieces * policy.held_s + part


def _waits_at(policy: Policy, place: Times) -> Times:
    return np.minimum(np.floor(place / (policy.held_s + policy.hold_s)), policy.held_count or 1) * policy.hold_s
