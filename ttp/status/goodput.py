"""Where a job's time went, by what its files know (PURE).

Owns what of a history the account is made of. The parts and the arithmetic are `ttp.launch.report.time_use`'s, which `ttprun` uses at the job's end.
"""

from __future__ import annotations

from collections.abc import Sequence

from ttp.launch.report.time_use import AttemptTime, TimeUse, time_use
from ttp.status.history import History


def job_time(history: History, now_unix_s: float, step_s: float | None, fault_s: float = 0.0) -> TimeUse | None:
    """Return where the time from the job's first rank until now went. `step_s`: a step's time, where it is known. `fault_s`: how long a fault has
    lasted that is handled now. None: the job's beginning is not known here. Of a job that has ended it is what its launcher has reported, if it has."""
    if history.use is not None:
        return history.use
    over = history.end is not None
    times: Sequence[AttemptTime] = history.times
    return time_use(times, now_unix_s, losses=history.losses, step_s=step_s, fault_s=fault_s, over=over)
