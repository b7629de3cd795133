"""The share of a job's time in which new steps were trained (PURE).

Owns the arithmetic, and what counts as lost: the start of each attempt until all its ranks have come, each fault until training continues, and
steps that were trained again. What the ranks do between that (compiling, evaluations, periodic saves) counts as training.
"""

from __future__ import annotations

from collections.abc import Sequence

from ttp.status.answer import FaultRow
from ttp.status.history import FALSE_ALARM, IN_PLACE, History, PastAttempt


def goodput(history: History, now_unix_s: float, step_s: float | None, fault_s: float = 0.0) -> float | None:
    """Return it for the time from the job's first rank until now, between 0 and 1. `step_s`: a step's time, where it is known. `fault_s`: how
    long a fault has lasted that is handled now. None: the job's beginning is not known here, or steps were lost whose time is not."""
    attempts, until_unix_s = history.attempts, now_unix_s - fault_s
    if not attempts or attempts[0].number != 0 or now_unix_s <= attempts[0].begun_unix_s:
        return None
    trained_s = sum(_trained(history, place, until_unix_s) for place in range(len(attempts)))
    lost = sum(fault.steps_lost or 0 for fault in history.faults if fault.attempt < attempts[-1].number)
    if lost:
        step_s = step_s or _step_time(history, until_unix_s)
        if step_s is None:
            return None
        trained_s -= lost * step_s
    return min(1.0, max(0.0, trained_s / (now_unix_s - attempts[0].begun_unix_s)))


def _trained(history: History, place: int, until_unix_s: float) -> float:
    """Return how long an attempt has trained: from its last rank's coming, without what its faults took."""
    attempt = history.attempts[place]
    if attempt.assembled_unix_s is None:
        return 0.0
    following = history.attempts[place + 1].begun_unix_s if place + 1 < len(history.attempts) else until_unix_s
    own = _faults_of(history, attempt)
    end = min([min(following, until_unix_s), *(fault.unix_s for fault in own if not _continued(fault))])
    pauses = sum(fault.took_s or 0.0 for fault in own if _continued(fault) and fault.unix_s < end)
    return max(0.0, end - attempt.assembled_unix_s - pauses)


def _faults_of(history: History, attempt: PastAttempt) -> Sequence[FaultRow]:
    return [fault for fault in history.faults if fault.attempt == attempt.number]


def _continued(fault: FaultRow) -> bool:
    return fault.outcome in (IN_PLACE, FALSE_ALARM)


def _step_time(history: History, until_unix_s: float) -> float | None:
    """Estimate a step's time from the longest attempt of which both ends are known; None: there is none."""
    longest, found = 0, None
    for place, attempt in enumerate(history.attempts[1:], 1):
        before = [fault.step for fault in history.faults if fault.attempt == history.attempts[place - 1].number]
        last = attempt.last_step if place + 1 < len(history.attempts) else (history.last_step or 0)
        steps = last - (before[-1] or 0) if before and before[-1] is not None else 0
        if steps > longest:
            longest, found = steps, _trained(history, place, until_unix_s) / steps
    return found
