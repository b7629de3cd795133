"""What a job has lost, in one line of its summary.

Pure: facts in, a string out. Never claims that nothing was lost unless the job was protected and its last step is on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ttp.last_step import LastStep
from ttp.wording import counted, ranks_text

NOT_PROTECTED = "not protected: no rank has called ttp.start"


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """All that decides on the line."""

    protected: bool
    """A rank has called `ttp.start` in some attempt."""
    faults: int
    """Preemption notices included."""
    notices: int
    steps_lost: int
    """`steps_again` included."""
    steps_again: int
    unknown_losses: int
    """Faults after which it is not known how many steps were lost."""
    untold_starts: Sequence[int]
    """Attempts of which it is not known here how they ended."""
    ended_in_fault: bool
    """The last attempt ended in a fault or a notice, which is counted above."""
    last: LastStep | None
    """Where the last attempt ended if that was no fault; None: it was, or no rank has reported it."""
    without_training: str = ""
    """`31.2 s`: from each fault's first sign until training went on."""


def lost_text(known: Losses) -> str:
    """Say what was lost: `nothing`, `3 steps`, `not protected`, `no checkpoint on disk`, `unknown`, or what of them is true."""
    if not known.protected:
        return NOT_PROTECTED
    if known.untold_starts:
        return f"unknown: how {ranks_text(known.untold_starts).replace('rank', 'start', 1)} ended is not known on this node"
    end = "" if known.ended_in_fault else _end(known.last)
    counts = [_steps(known)] if known.steps_lost or (known.faults and not known.unknown_losses and not end) else []
    if known.unknown_losses:
        which = "fault" if known.faults > known.notices else "notice"
        counts.append(f"unknown after {counted(known.unknown_losses, which)}")
    text = ", and ".join([*counts, *([end] if end else [])]) or "nothing"
    return f"{text}; {known.without_training} without training" if known.faults else text


def _steps(known: Losses) -> str:
    again = f" ({known.steps_again:,} to train again behind a checkpoint that was broken or not taken)"
    return counted(known.steps_lost, "step") + (again if known.steps_again else "")


def _end(last: LastStep | None) -> str:
    """Say why the last step may be lost though the job ended without a fault; empty: it is on disk."""
    if last is None:
        return "unknown: no rank has reported its last step"
    if last.saved_step is None:
        return f"unknown: the trainer writes its own checkpoints, its last step is {last.step}"
    if last.saved_step >= last.step:
        return ""
    missing = counted(last.step - last.saved_step, "step")
    newest = f"the newest is of step {last.saved_step}" if last.saved_step else "TTP wrote none"
    return f"no checkpoint on disk of the last {missing}, up to step {last.step} ({newest})"
