"""Times that a job of one's own has measured, from its files.

Owns which of the job's moments stand for which time of the model. The account of them is `ttp.launch.report.time_use`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean

from ttp.errors import ConfigError
from ttp.launch.report.time_use import FAULT, IN_PLACE, AttemptTime, mean_step_s
from ttp.status import find_job, history


@dataclass(frozen=True, slots=True)
class Measured:
    """The mean of some moments of a job."""

    seconds: float
    count: int


def measured(job: str) -> dict[str, Measured]:
    """Return the means by the name of a field of `Times`, those that the job has had. Raises ConfigError: there is no such job, or it has nothing."""
    found = find_job.find(job)
    if found.log_dir is None:
        raise ConfigError(f"--job: got the address {job}, expected a folder: times are read from a job's files")
    known = times_of(history.read(found.log_dir).times)
    if not known:
        raise ConfigError(
            f"--job: {found.log_dir} has no finished step, save or fault with its times. Name the folder of a job that has trained"
        )
    return known


def times_of(attempts: tuple[AttemptTime, ...]) -> dict[str, Measured]:
    """Return the means of attempts' times."""
    samples: dict[str, list[float]] = {}
    for name, seconds in (each for place in range(len(attempts)) for each in _samples(attempts, place)):
        samples.setdefault(name, []).append(max(0.0, seconds))
    found = {name: Measured(mean(values), len(values)) for name, values in samples.items()}
    saves = sum(attempt.saves for attempt in attempts)
    if saves:
        found["save_s"] = Measured(sum(attempt.saves_s for attempt in attempts) / saves, saves)
    return found


def _samples(attempts: tuple[AttemptTime, ...], place: int) -> Iterator[tuple[str, float]]:
    attempt = attempts[place]
    following = attempts[place + 1] if place + 1 < len(attempts) else None
    for pause in attempt.pauses:
        seen_s = pause.took_ms.get("seen", 0.0) / 1e3
        if pause.kind in (FAULT, IN_PLACE):
            yield "detect_s", seen_s
        if pause.kind == IN_PLACE:
            yield "regroup_s", (pause.stepped_unix_s or pause.ended_unix_s) - pause.began_unix_s - seen_s
        if pause.kind == FAULT and "written" in pause.took_ms:
            yield "dump_s", pause.ended_unix_s - pause.began_unix_s - seen_s
        if pause.kind == FAULT and following is not None and following.stepped_unix_s is not None:
            yield "restart_s", following.stepped_unix_s - pause.ended_unix_s
    if (step_s := mean_step_s(attempt)) is not None:
        yield "step_s", step_s
