"""Simulated collectives: they finish only after every member has come, and may then reach some members and not others. One that was
aborted raises, hangs, or returns without an error what happens to be in memory, as an accelerator's may."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from tests.simulation.scheduler import Scheduler
from ttp.optim.step_agreement.participation import NUMBERS, Contribution

_Key = tuple[str, int, tuple[int, ...], int]
"""(name, step, members, generation)."""
Returned = Callable[[Sequence[float]], None]
"""Takes the numbers by which a rank knows whether every rank contributed."""
ATTEMPT = 7
"""Number of the simulated attempt."""


@dataclass
class _Meeting:
    members: tuple[int, ...]
    waiting: dict[int, tuple[Callable[[], None], Callable[[], None], Returned | None]] = field(default_factory=dict)
    came: set[int] = field(default_factory=set)


class Collectives:
    """All collectives of a job. A failed one never heals: its ranks get an error sooner or later, or hang."""

    def __init__(self, scheduler: Scheduler, rng: random.Random, hang_chance: float) -> None:
        self._scheduler = scheduler
        self._rng = rng
        self.hang_chance = hang_chance
        self._meetings: dict[_Key, _Meeting] = {}
        self._left: dict[int, int] = {}
        """By rank, the newest generation of groups in which it is dead, or which it has left."""
        self.garbage: random.Random | None = None
        """Of what aborted collectives return in place of raising; None: they raise."""
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
        returned: Returned | None = None,
        generation: int = 0,
    ) -> None:
        """`returned`: called in place of `fail` by an aborted collective that raises nothing."""
        key = (name, step, members, generation)
        meeting = self._meetings.get(key)
        if meeting is None:
            meeting = self._meetings[key] = _Meeting(members)
        meeting.waiting[rank] = (done, fail, returned)
        meeting.came.add(rank)
        if len(meeting.came) == len(members):
            after, uniform = self._scheduler.after, self._rng.uniform
            for member in members:
                after(uniform(0.0002, 0.004), partial(self._finish, meeting, member, key))
        elif self._left and any(self._is_gone(member, generation) for member in members):
            self._break(meeting, rank, step)

    def _finish(self, meeting: _Meeting, rank: int, key: _Key) -> None:
        calls = meeting.waiting.pop(rank, None)
        if not meeting.waiting:
            self._meetings.pop(key, None)  # all have come, and none waits any more
        if calls is not None and not self._is_gone(rank, key[3]):
            self.finished.add(key[:2])
            calls[0]()

    def _break(self, meeting: _Meeting, rank: int, step: int) -> None:
        """A member is dead: this rank gets an error, or garbage, or waits for ever."""
        calls = meeting.waiting.pop(rank, None)
        if calls is not None and self._rng.random() >= self.hang_chance:
            _, fail, returned = calls
            if returned is not None and self.garbage is not None and self.garbage.random() < 0.7:
                fail = partial(returned, self._garbage(self.garbage, meeting, step))
            self._scheduler.after(self._rng.uniform(0.001, 0.1), fail)

    @staticmethod
    def _garbage(rng: random.Random, meeting: _Meeting, step: int) -> Sequence[float]:
        """Return what an aborted collective leaves: some ranks' sum, the whole result of an earlier step, or anything."""
        own, size = Contribution(ATTEMPT, step), len(meeting.members)
        match rng.choice(("some", "earlier", "earlier", "anything")):
            case "some":
                return [rng.randint(1, max(1, size - 1)) * number for number in own.numbers]
            case "earlier":
                return [size * number for number in Contribution(ATTEMPT, step - 1).numbers]
            case _:
                return [rng.choice((0.0, float("nan"), rng.uniform(-1e9, 1e9))) for _ in range(NUMBERS)]

    def _is_gone(self, rank: int, generation: int) -> bool:
        return self._left.get(rank, -1) >= generation

    def leave(self, rank: int, generation: int) -> None:
        """A rank gives its groups up: nothing of them reaches it any more."""
        for key, meeting in self._meetings.items():
            if key[3] <= generation:
                meeting.waiting.pop(rank, None)
        self.rank_gone(rank, False, generation)

    def rank_gone(self, rank: int, surely: bool, generation: int) -> None:
        """A rank died, or left. Half-finished collectives may still reach the others. `surely`: no rank hangs."""
        self._left[rank] = max(generation, self._left.get(rank, -1))
        if surely:
            self.hang_chance = 0.0
        for key in sorted(key for key in self._meetings if key[3] <= generation):
            meeting = self._meetings[key]
            meeting.waiting.pop(rank, None)
            if rank not in meeting.members:
                continue
            whole = len(meeting.came) == len(meeting.members)
            for other in sorted(meeting.waiting):
                if not whole or self._rng.random() < 0.5:
                    self._break(meeting, other, key[1])
