"""What the model knows of a job under one strategy to survive faults: its saves, its faults, what each costs (PURE).

Owns the terms that closed form and simulation share. Faults come at random (Poisson), also while the job is down. A *covered* fault costs the work since
the last moment that survivors hold; one that is not covers the work since the last persistent checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FaultRate:
    """One kind of fault of the job as a whole."""

    kind: str
    per_s: float
    down_s: float
    """From the fault until training continues where it was set back to."""
    covered: bool
    """Survivors hold the state: no more is lost than the work since the last held moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One strategy to survive faults, in seconds."""

    name: str
    faults: tuple[FaultRate, ...]
    held_s: float
    """Work between two moments that survivors hold: a step, or the interval of copies in memory."""
    hold_s: float = 0.0
    """How long training waits at each of them."""
    held_count: int | None = None
    """So many of them between two persistent checkpoints; None: there are no persistent checkpoints."""
    save_s: float = 0.0
    """How long training waits for a persistent checkpoint."""
    slowdown: float = 0.0
    """Steps take longer by this share of their time, always."""

    @property
    def interval_s(self) -> float:
        """Work between two persistent checkpoints."""
        return math.inf if self.held_count is None else self.held_count * self.held_s

    @property
    def fault_rate(self) -> float:
        return sum(fault.per_s for fault in self.faults)

    @property
    def uncovered_rate(self) -> float:
        return sum(fault.per_s for fault in self.faults if not fault.covered)


@dataclass(frozen=True, slots=True)
class Split:
    """Shares of a job's time, which add up to 1."""

    steps: float
    saves: float
    """Training waits for checkpoints and copies, and the slowdown of steps."""
    again: float
    """Work that is done again, and work that a fault breaks off."""
    down: float


def young(save_s: float, mean_time_between_s: float) -> float:
    """Return Young's interval: work between two checkpoints, to first order (Young 1974, doi 10.1145/361147.361115)."""
    return math.sqrt(2.0 * save_s * mean_time_between_s)


def daly(save_s: float, mean_time_between_s: float) -> float:
    """Return Daly's interval, of higher order (Daly 2006, eq. 37, doi 10.1016/j.future.2004.11.016)."""
    if mean_time_between_s == math.inf:
        return math.inf
    if save_s >= 2.0 * mean_time_between_s:
        return mean_time_between_s
    ratio = save_s / (2.0 * mean_time_between_s)
    return young(save_s, mean_time_between_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - save_s
