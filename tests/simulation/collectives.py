"""Simulated collectives: they finish only after every member has come, and may then reach some members and not others."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from tests.simulation.scheduler import Scheduler

_Key = tuple[str, int, tuple[int, ...]]
"""(name, step, members)."""


@dataclass
class _Meeting:
    members: tuple[int, ...]
    waiting: dict[int, tuple[Callable[[], None], Callable[[], None]]] = field(default_factory=dict)
    came: set[int] = field(default_factory=set)


class Collectives:
    """All collectives of a job. A failed one never heals: its ranks get an error sooner or later, or hang."""

    def __init__(self, scheduler: Scheduler, rng: random.Random, hang_chance: float) -> None:
        self._scheduler = scheduler
        self._rng = rng
        self._hang_chance = hang_chance
        self._meetings: dict[_Key, _Meeting] = {}
        self._dead: set[int] = set()
        self.finished: set[tuple[str, int]] = set()
        """(name, step) that at least one rank got the result of."""

    def enter(
        self,
        name: str,
        step: int,
        members: tuple[int, ...],
        rank: int,
        done: Callable[[], None],
        fail: Callable[[], None],
    ) -> None:
        key = (name, step, members)
        meeting = self._meetings.get(key)
        if meeting is None:
            meeting = self._meetings[key] = _Meeting(members)
        meeting.waiting[rank] = (done, fail)
        meeting.came.add(rank)
        if len(meeting.came) == len(members):
            after, uniform = self._scheduler.after, self._rng.uniform
            for member in members:
                after(uniform(0.0002, 0.004), partial(self._finish, meeting, member, key))
        elif self._dead and not self._dead.isdisjoint(members):
            self._break(meeting, rank)

    def _finish(self, meeting: _Meeting, rank: int, key: _Key) -> None:
        calls = meeting.waiting.pop(rank, None)
        if not meeting.waiting:
            self._meetings.pop(key, None)  # all have come, and nobody waits any more
        if calls is not None and rank not in self._dead:
            self.finished.add(key[:2])
            calls[0]()

    def _break(self, meeting: _Meeting, rank: int) -> None:
        """A member is dead: this rank gets an error, or waits for ever."""
        calls = meeting.waiting.pop(rank, None)
        if calls is not None and self._rng.random() >= self._hang_chance:
            self._scheduler.after(self._rng.uniform(0.001, 0.1), calls[1])

    def rank_gone(self, rank: int, surely: bool) -> None:
        """A rank died, or left. Half-finished collectives may still reach the others. `surely`: nobody hangs."""
        self._dead.add(rank)
        if surely:
            self._hang_chance = 0.0
        for key in sorted(self._meetings):
            meeting = self._meetings[key]
            meeting.waiting.pop(rank, None)
            if rank not in meeting.members:
                continue
            whole = len(meeting.came) == len(meeting.members)
            for other in sorted(meeting.waiting):
                if not whole or self._rng.random() < 0.5:
                    self._break(meeting, other)
