"""Crash-loop detection: back off, then stop, when consecutive attempts fail before completing a step.

Owns the count, the rule, and which failures are non-retryable: usage, configuration and checkpoint-mismatch errors. Never waits, never reads
a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ttp.errors
from ttp.errors import END_THE_JOB, STAY_WRONG, STAY_WRONG_AT_FIRST
from ttp.launch.report.exit_status import Recorded, is_peer_error
from ttp.launch.watch.processes import Lost
from ttp.proto.messages import SAVED_EXIT_CODES

FUTILE_STARTS = 3
"""Default of --ttp-futile-starts."""
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0
USAGE_ERROR = 2
"""The exit status of a program that rejects its command line or configuration (argparse's, and the bundled trainer's)."""
SHORT_START_S = 60.0
"""An attempt that lasted longer without a controller does not count: a script without a session never reports a step."""


@dataclass(frozen=True, slots=True)
class CrashLoopVerdict:
    """What to do after an attempt has failed."""

    stop: bool
    wait_s: float
    text: str
    """Why; empty when the attempt completed a step."""


class CrashLoop:
    """Counts one job's consecutive attempts without a completed step. `most`: the limit; 0: none."""

    def __init__(self, most: int = FUTILE_STARTS) -> None:
        self._most = most
        self._in_a_row = 0

    def ended(self, *, new_step: bool | None, lasted_s: float, protected: bool) -> CrashLoopVerdict:
        """Return what to do after an attempt has failed.

        `new_step`: whether a rank reported a completed step; None: not known. `protected`: the attempt had a controller, so that ranks would
        have reported it.
        """
        if new_step is not False or (not protected and lasted_s >= SHORT_START_S):
            self._in_a_row = 0
            return CrashLoopVerdict(False, 0.0, "")
        self._in_a_row += 1
        count = "this attempt" if self._in_a_row == 1 else f"{self._in_a_row} attempts in a row"
        text = f"{count} failed before completing a step"
        if self._most and self._in_a_row >= self._most:
            return CrashLoopVerdict(True, 0.0, f"{text}: crash loop (--ttp-futile-starts {self._most})")
        return CrashLoopVerdict(False, min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (self._in_a_row - 1)), text)


def refusal(
    statuses: Mapping[int, int | Lost | None],
    raised: Mapping[int, Recorded],
    *,
    first_start: bool = False,
    new_step: bool = False,
) -> str:
    """Return why a restart would fail the same way; empty: it may succeed.

    It would when workers have rejected their input (exit code 2, or an exception of STAY_WRONG) and none has another failure of its own.
    `statuses`: of all that failed. `raised`: what they recorded. `first_start`: the job's first attempt; STAY_WRONG_AT_FIRST counts too.
    `new_step`: the attempt has made one, and a restart may succeed, except after an exception of END_THE_JOB.
    """
    if ended := next((error for error in raised.values() if _is_one_of(error, END_THE_JOB)), None):
        return f"{ended.name} ends the job: choose where it resumes"
    if new_step:
        return ""
    reasons = []
    for rank, status in statuses.items():
        error = raised.get(rank)
        if status == USAGE_ERROR:
            reasons.append(f"exit code {USAGE_ERROR} means an invalid command line or configuration")
        elif error is not None and stays_wrong(error, first_start):
            reasons.append(f"{error.name} is not retryable: correct its cause first")
        elif status not in SAVED_EXIT_CODES and not (error is not None and is_peer_error(error)):
            return ""
    return reasons[0] if reasons else ""


def stays_wrong(error: Recorded, first_start: bool = False) -> bool:
    """Return whether an exception is one of STAY_WRONG; another library's of the same name is not."""
    return _is_one_of(error, (*STAY_WRONG, *STAY_WRONG_AT_FIRST) if first_start else STAY_WRONG)


def _is_one_of(error: Recorded, kinds: tuple[type[Exception], ...]) -> bool:
    kind = getattr(ttp.errors, error.name, None)
    return isinstance(kind, type) and issubclass(kind, kinds) and f"{kind.__module__}.{error.text}" in error.trace
