"""Starts that were for nothing: a job that dies again and again before its first new step waits, and then stops.

Owns the count and the rule, and the key under which a rank says that a step was finished. No clock, no waiting.
"""

from __future__ import annotations

from dataclasses import dataclass

FUTILE_STARTS = 3
"""Default of --ttp-futile-starts."""
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0
SHORT_START_S = 60.0
"""A start that lasted longer without a controller is not judged: a script without a session never says that it got on."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do after a start has failed."""

    stop: bool
    wait_s: float
    text: str
    """Why; empty when the start got on."""


class FutileStarts:
    """Judges one job's failed starts, one after the other. `most`: how many futile ones in a row end the job; 0: no number."""

    def __init__(self, most: int = FUTILE_STARTS) -> None:
        self._most = most
        self._in_a_row = 0

    def ended(self, *, new_step: bool | None, lasted_s: float, protected: bool) -> Verdict:
        """Judge a start that has failed.

        `new_step`: whether a rank said that it finished a step; None: it cannot be known any more. `protected`: the start had a
        controller, so that ranks would have said so.
        """
        if new_step is not False or (not protected and lasted_s >= SHORT_START_S):
            self._in_a_row = 0
            return Verdict(False, 0.0, "")
        self._in_a_row += 1
        count = "this start" if self._in_a_row == 1 else f"{self._in_a_row} starts in a row"
        text = f"{count} ended before a first new step was told of"
        if self._most and self._in_a_row >= self._most:
            return Verdict(True, 0.0, f"{text}: another one would end the same way (--ttp-futile-starts {self._most})")
        return Verdict(False, min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (self._in_a_row - 1)), text)
