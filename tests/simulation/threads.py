"""The threads of one simulated process, as far as time goes: the training thread, and those beside it, which stand still while it holds the
interpreter. A dead process does nothing; a stopped one's calls wait.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from tests.simulation.waits import Blocked

if TYPE_CHECKING:
    from tests.simulation.job import Job


class Threads:
    """Who runs when. `turn` counts how often the training thread has left its training: what it was at before is not gone on with."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.alive, self.stopped = True, False
        self.back_s = inf
        """It was silent for longer than it may be, and is there again: from then on it counts."""
        self.hogged = False
        """Its training thread holds the interpreter."""
        self.turn = 0
        self._held: list[tuple[bool, Callable[[], None]]] = []
        """What waits until it is not stopped, and (first True) its interpreter is free, in the order in which it came."""
        self._blocked: list[tuple[Callable[[], None], Callable[[], None]]] = []
        """What the training thread would do at the gate, and what it does then."""

    def take_waiting(self) -> None:
        """Take what waits in the processor's queue."""

    def soon(self, delay_s: float, call: Callable[[], None]) -> None:
        self.job.scheduler.after(delay_s, self.in_turn(call))

    def in_turn(self, call: Callable[[], None]) -> Callable[[], None]:
        """Return what does it on the training thread, unless that has left its training by then."""
        return partial(self.run, partial(self._if_in_turn, self.turn, call))

    def _if_in_turn(self, turn: int, call: Callable[[], None]) -> None:
        if turn == self.turn:
            call()

    def leave_training(self) -> None:
        """Whatever the training thread was at is over."""
        self.turn += 1
        self._blocked = []

    def pass_gate(self, enter: Callable[[], None], go_on: Callable[[], None]) -> None:
        """Training thread: call the gate, and go on once that lets it pass."""
        try:
            enter()
        except Blocked:
            self._blocked.append((enter, go_on))
        else:
            go_on()

    def pass_on(self) -> None:
        """The gate may be open, or its lock free: who waits asks again."""
        blocked, self._blocked = self._blocked, []
        for enter, go_on in blocked:
            self.pass_gate(enter, go_on)

    def run(self, call: Callable[[], None]) -> None:
        if not self.alive:
            return
        if self.stopped:
            self._held.append((False, call))
        else:
            call()

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        self.job.scheduler.after(delay_s, partial(self.run_beside, call))

    def run_beside(self, call: Callable[[], None]) -> None:
        """Do it on a thread that stands still while the training thread holds the interpreter."""
        if not self.alive:
            return
        if self.stopped or self.hogged:
            self._held.append((True, call))
        else:
            call()

    def resume(self) -> None:
        self.stopped = False
        self._run_held()

    def let_go(self) -> None:
        """The training thread gives the interpreter back."""
        self.hogged = False
        self._run_held()

    def _run_held(self) -> None:
        """Do what need not wait any more. What comes to one queue stays in its order, whatever held it up and for how long."""
        if not self.stopped and not self.hogged:
            self.take_waiting()
        held, self._held = self._held, []
        for beside, call in held:
            if beside:
                self.run_beside(call)
            else:
                self.run(call)
