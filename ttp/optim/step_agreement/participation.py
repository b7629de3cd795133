"""What shows that a spanning collective's result is the sum of every rank's contribution to this very step, and how the step ends (PURE).

Owns the four numbers that each rank adds to the vector, what their sums must be, and what follows from the counts of preemption notices
and of ranks without a controller. An aborted collective may return without an
error: with this rank's own contribution, with the sum of some ranks', or with memory of an earlier step. A commit record proves
that every rank was READY only if the result is complete, so a result that fails this check commits nothing.
Never touches tensors.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from ttp.errors import AbortedCollective, ProtocolError

NUMBERS = 4
"""Length of `Contribution.numbers` and of what `check` takes."""

_ATTEMPTS = 1 << 20
_PLACES = 1 << 12
"""Steps are compared modulo this: no two ranks are so far apart. Both keep sums over a million ranks exact in FP64."""


class Ending(enum.Enum):
    """What all ranks do when they have finished a step: the same on every rank, as all have read the same sums."""

    GO_ON = "go on"
    WAIT = "wait"
    """Some rank has a preemption notice: all stop behind this step and wait for their controller."""
    SAVE = "save"
    """The same, and no rank has a controller: all save this step together and exit."""


def ending_of(notices: float, unled: float, size: int, world: int) -> Ending:
    """Return how a step ends of whose `size` ranks so many have a preemption notice, and so many no controller.

    `world`: ranks of the job. A collective over fewer of them proves nothing about the others, which would be saved without.
    """
    if not notices:
        return Ending.GO_ON
    return Ending.SAVE if unled == size == world else Ending.WAIT


def attempt_number(name: str) -> int:
    """Return a number for an attempt's name, the same on each of its ranks and most likely another one for another attempt."""
    return zlib.crc32(name.encode()) % _ATTEMPTS


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one rank adds to show that it took part in this step of this attempt."""

    attempt: int
    """See `attempt_number`; 0 before the job is protected."""
    step: int

    @property
    def _place(self) -> int:
        return self.step % _PLACES

    @property
    def numbers(self) -> tuple[float, float, float, float]:
        """1 for this rank, its attempt, and its step's place with the square of it."""
        return 1.0, float(self.attempt), float(self._place), float(self._place**2)

    def check(self, result: Sequence[float], size: int) -> None:
        """Check the sums of `numbers` over the `size` ranks of the collective.

        Raises AbortedCollective when some rank's contribution is missing, or when the result is that of another step or
        attempt; ProtocolError when all ranks contributed and some are at another step than others: the trainer's mistake.
        """
        ranks, attempts, places, squares = result
        if ranks != size:
            raise AbortedCollective(
                f"step {self.step}: the result of the step's all-reduce has contributions of {ranks:g} ranks, expected {size}: the"
                " collective was aborted and nothing of this step is committed; look for the rank that failed first"
            )
        # The sum of squares times the size is the square of the sum exactly when all ranks are at the same step.
        if attempts == size * self.attempt and squares * size != places * places:
            raise ProtocolError(
                f"step {self.step}: other ranks are at another step than this one; call optimizer.step() equally often on every"
                " rank: give all ranks as many batches"
            )
        if attempts != size * self.attempt or places != size * self._place:
            raise AbortedCollective(
                f"step {self.step}: the result of the step's all-reduce is not of this step and attempt (attempt {attempts:g},"
                f" expected {size * self.attempt}; place {places:g}, expected {size * self._place}): the collective was aborted"
                " and nothing of this step is committed; look for the rank that failed first"
            )
