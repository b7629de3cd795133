"""The share of the time that is new steps, exactly, for faults that come at random (PURE).

Owns the formulas; `simulate.py` draws the same process. Between two persistent checkpoints there are n pieces of work, each ended by a moment that
survivors hold. With rates c of covered faults and u of the others, t the time that a piece takes with its repetitions and downtimes by covered
faults alone, and F(u) = E[exp(-u t)]:

    a downtime   A = E[exp(-(c+u) L)]: the chance that no fault comes in it         L: its length; a fault in it begins it anew
    a piece      1/F(u) = 1 + u/(c+u) / (1 - c/(c+u) (1 - A)) (exp((c+u) s) - 1)    s: its length
    an interval  P = F(u)^n F_save(u) is the chance that no other fault comes in it
    its time     E = (1/P - 1) (1/u + W)                                            W: the downtime after a fault that is not covered

Without covered faults that is Daly's (eq. 20) E = M exp(R/M) (exp((interval + save)/M) - 1), with M = 1/u.
"""

from __future__ import annotations

import math

from ttp.goodput.policy import Policy, Split

MOST_EXPONENT = 700.0


def split(policy: Policy) -> Split:
    """Return where the time goes in the long run."""
    rate, uncovered = policy.fault_rate, policy.uncovered_rate
    piece_s = policy.held_s + policy.hold_s
    count = policy.held_count
    work_s = policy.held_s * (count or 1)
    waits_s = policy.hold_s * (count or 1) + (policy.save_s if count else 0.0)
    if not rate:
        total_s = work_s + waits_s
    elif not uncovered or count is None:
        saves = [policy.save_s] if count else []
        total_s = sum(
            _covered_time(policy, length) * times
            for length, times in ((piece_s, count or 1), *((each, 1) for each in saves))
        )
    else:
        exponent = _exponent(policy, piece_s) * count + _exponent(policy, policy.save_s)
        total_s = _growth(exponent) * (1.0 / uncovered + _downtime(policy, covered=False))
    if math.isinf(total_s):
        return Split(0.0, 0.0, 1.0 - _down_share(policy), _down_share(policy))
    steps = work_s / total_s
    useful = steps / (1.0 + policy.slowdown)
    saves_share, down = waits_s / total_s + steps - useful, _down_share(policy)
    return Split(useful, saves_share, max(0.0, 1.0 - useful - saves_share - down), down)


def _exponent(policy: Policy, length_s: float) -> float:
    """Return ln(1/F(u)) of a piece."""
    rate, uncovered = policy.fault_rate, policy.uncovered_rate
    covered = [fault for fault in policy.faults if fault.covered]
    broken = sum(fault.per_s / rate * -math.expm1(-rate * fault.down_s) for fault in covered)
    return math.log1p(uncovered / rate / (1.0 - broken) * _growth(rate * length_s))


def _growth(exponent: float) -> float:
    """Return exp(exponent) - 1; infinity where that is too large for a float."""
    return math.expm1(exponent) if exponent < MOST_EXPONENT else math.inf


def _covered_time(policy: Policy, length_s: float) -> float:
    """Return the mean time of a piece where every fault is covered."""
    rate = policy.fault_rate
    return (1.0 / rate + _downtime(policy, covered=True)) * _growth(rate * length_s)


def _downtime(policy: Policy, *, covered: bool) -> float:
    """Return the mean time from a fault of these until training continues, with the faults that come meanwhile."""
    rate = policy.fault_rate

    def no_fault_in(faults: list[tuple[float, float]]) -> float:
        whole = sum(per_s for per_s, _ in faults)
        return sum(per_s / whole * math.exp(-rate * down_s) for per_s, down_s in faults) if whole else 1.0

    anyone = no_fault_in([(fault.per_s, fault.down_s) for fault in policy.faults])
    first = no_fault_in([(fault.per_s, fault.down_s) for fault in policy.faults if fault.covered == covered])
    return (1.0 - first) / rate * (1.0 + (1.0 - anyone) / anyone) if anyone else math.inf


def _down_share(policy: Policy) -> float:
    rate = policy.fault_rate
    if not rate:
        return 0.0
    rates = {
        covered: sum(fault.per_s for fault in policy.faults if fault.covered == covered) for covered in (True, False)
    }
    down = sum(per_s * _downtime(policy, covered=covered) for covered, per_s in rates.items() if per_s)
    return down / (1.0 + down) if not math.isinf(down) else 1.0
