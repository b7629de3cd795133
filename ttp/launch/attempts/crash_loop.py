"""Crash-loop detection: back off, then stop, when consecutive attempts fail before completing a step or cannot go otherwise.

Owns the count, the rule, and which failures stay as they are until somebody corrects what is wrong. No clock, no waiting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ttp.errors
from ttp.errors import STAY_WRONG, STAY_WRONG_AT_FIRST
from ttp.launch.report.exit_status import Recorded, is_peer_error
from ttp.launch.watch.processes import Lost
from ttp.proto.messages import SAVED_EXIT_CODES

FUTILE_STARTS = 3
"""Default of --ttp-futile-starts."""
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0
USAGE_ERROR = 2
"""The exit status of a program that refuses its command line or configuration (argparse's, and the bundled trainer's)."""
SHORT_START_S = 60.0
"""A start that lasted longer without a controller is not judged: a script without a session never says that it got on."""


@dataclass(frozen=True, slots=True)
class CrashLoopVerdict:
    """What to do after a start has failed."""

    stop: bool
    wait_s: float
    text: str
    """Why; empty when the start got on."""


class CrashLoop:
    """Judges one job's failed starts, one after the other. `most`: how many futile ones in a row end the job; 0: no number."""

    def __init__(self, most: int = FUTILE_STARTS) -> None:
        self._most = most
        self._in_a_row = 0

    def ended(self, *, new_step: bool | None, lasted_s: float, protected: bool) -> CrashLoopVerdict:
        """Judge a start that has failed.

        `new_step`: whether a rank said that it finished a step; None: it cannot be known any more. `protected`: the start had a
        controller, so that ranks would have said so.
        """
        if new_step is not False or (not protected and lasted_s >= SHORT_START_S):
            self._in_a_row = 0
            return CrashLoopVerdict(False, 0.0, "")
        self._in_a_row += 1
        count = "this start" if self._in_a_row == 1 else f"{self._in_a_row} starts in a row"
        text = f"{count} ended before a first new step was told of"
        if self._most and self._in_a_row >= self._most:
            return CrashLoopVerdict(
                True, 0.0, f"{text}: another one would end the same way (--ttp-futile-starts {self._most})"
            )
        return CrashLoopVerdict(False, min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (self._in_a_row - 1)), text)


def refusal(
    statuses: Mapping[int, int | Lost | None], raised: Mapping[int, Recorded], *, first_start: bool = False
) -> str:
    """Say why a restart would end the same way; empty: it may go better.

    So it is when workers have refused (exit code 2, or an exception of STAY_WRONG), and none has failed for a reason of its own.
    `statuses`: of all that failed. `raised`: what they recorded. `first_start`: of the job; errors of STAY_WRONG_AT_FIRST count too.
    """
    reasons = []
    for rank, status in statuses.items():
        told = raised.get(rank)
        if status == USAGE_ERROR:
            reasons.append(f"exit code {USAGE_ERROR} says that the configuration is wrong")
        elif told is not None and stays_wrong(told, first_start):
            reasons.append(f"{told.name} says what must be corrected first")
        elif status not in SAVED_EXIT_CODES and not (told is not None and is_peer_error(told)):
            return ""
    return reasons[0] if reasons else ""


def stays_wrong(told: Recorded, first_start: bool = False) -> bool:
    """Say whether an exception is one of STAY_WRONG; another library's of the same name is not."""
    kind = getattr(ttp.errors, told.name, None)
    final = (*STAY_WRONG, *STAY_WRONG_AT_FIRST) if first_start else STAY_WRONG
    return isinstance(kind, type) and issubclass(kind, final) and f"{kind.__module__}.{told.text}" in told.trace
