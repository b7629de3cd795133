"""How long a job may go without progress before it counts as hung: what ranks are set to and every controller receives (PURE).

Owns the fields and their defaults; the variables are read in `ttp/config.py`, the limits applied in `controller/core/facts/pace.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HangLimits:
    """Times in seconds. In a controller's arguments and its journal each field's name begins with `hang_`."""

    floor_s: float = 10.0
    """A job in which no rank progresses is not declared hung before this."""
    early_floor_s: float = 60.0
    """In place of `floor_s` before 50 steps are known; the same where TTP_HANG_FLOOR_S is set."""
    start_s: float = 1800.0
    """In place of `floor_s` before enough steps were seen: the first ones compile, load and warm up."""
    factor: float = 10.0
    """Nor is a job declared hung before this many times a slow step of its own."""
