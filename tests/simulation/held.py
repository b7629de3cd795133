"""Ranks, and steps of their work, that stand still until the job comes to a chosen place.

A disk, a scheduler or a debugger may hold a process up for any time. Where a fault must meet work that outlives its stage,
chance alone takes millions of jobs to hit the milliseconds in question; a hold ends exactly then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ttp.proto.messages import Progress

if TYPE_CHECKING:
    from tests.simulation.rank import Rank

LONGEST_S = 4.0
"""A hold ends by itself: long after its rank was found stuck or dead, long before a fault must be over."""


def nothing(rank: int) -> None:
    """Nothing else happens."""


@dataclass(frozen=True)
class Hold:
    """Whoever it is put on stands still until `until` happens in the job, and for `longest_s` at most."""

    until: str = ""
    longest_s: float = LONGEST_S
    began: Callable[[int], None] = field(default=nothing)
    """Called with the rank as soon as it stands still."""
    ends: Callable[[int], None] = field(default=nothing)
    """Called with the rank right before it goes on."""
    progresses: bool = False
    """The rank reports with every heartbeat that its work progresses."""

    def begin(self, process: Rank, step: str, go_on: Callable[[], None]) -> None:
        """Hold a rank up before a step; `go_on` does it."""
        job, waiting = process.job, [True]
        process.was_stopped = True
        until = f"until '{self.until}'" if self.until else "a while"
        job.note(f"rank {process.rank} is held up before {step}, {until}")

        def end() -> None:
            if waiting:
                waiting.clear()
                self.ends(process.rank)
                job.scheduler.after(0.0, go_on)

        if self.until:
            job.hook(self.until, 1, lambda _: job.scheduler.after(0.0, end))
        job.scheduler.after(self.longest_s, end)

        def say() -> None:
            if waiting:
                job.send_up(process, Progress(process.rank, process.gate.freeze_id))
                process.later(job.times.heartbeat_s, say)

        if self.progresses:
            say()
        self.began(process.rank)


def stand_still(process: Rank, hold: Hold) -> None:
    """SIGSTOP, and SIGCONT at the end of the hold."""
    if not process.alive or process.stopped:
        return
    process.stopped = True
    process.job.scheduler.look = True
    hold.begin(process, "anything", partial(_resume, process))


def _resume(process: Rank) -> None:
    if process.alive:
        process.resume()
