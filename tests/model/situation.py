"""One state of the search, as a small tuple: parts of it are numbers of values that are kept once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from tests.model.rank import Rank
from ttp.controller.core.facts.state import ControllerState, Stage
from ttp.proto.messages import StateReport

CLOSED = 0
"""In a channel: the stream has ended here."""
HELLO = 1
"""In a channel up: a rank asks a controller that does not run for a stream."""
LOOKED_FOR = -1
"""Among the news for a controller, less the newer one's place: that one looks for it."""
GREETING = 2
"""In a channel down: the answer to that."""

Action = tuple[Any, ...]
"""(kind, what it affects, ...)."""


class Situation(NamedTuple):
    """One state of the search. Numbers stand for parts; channels hold numbers of messages, oldest first."""

    ranks: tuple[int, ...]
    controllers: tuple[int, ...]
    up: tuple[tuple[int, ...], ...]
    """Index rank * controllers + controller."""
    down: tuple[tuple[int, ...], ...]
    exits: tuple[tuple[int, int], ...]
    """(controller, rank): an agent will tell that controller of that rank's end. Below zero: see LOOKED_FOR."""
    replaces: tuple[tuple[int, int, int, int], ...]
    """(controller, rank, process, freeze): that controller has ordered an agent to replace that process."""
    disk: int
    faults_left: int
    spent: int
    """Kinds of faults that cannot come any more, one bit each."""
    peer_errors_left: int
    thawed_up_to: int
    committed: int
    """The last step whose commit record any rank ever had."""
    opened: int
    """The newest generation in which a rank has entered its training."""


class Numbers:
    """Gives every distinct value a number."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._known: dict[Hashable, int] = {}

    def of(self, value: Hashable) -> int:
        number = self._known.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


class View(NamedTuple):
    """What a rank can do by itself, worked out once."""

    alive: bool
    running: bool
    stopped: bool
    late: bool
    """Its update may still end."""
    link: int
    fence: int
    shut: bool
    """Nothing wakes its training thread but what it receives."""
    never_comes: bool
    """It comes to no further collective, whatever happens."""
    busy: bool
    training: str
    """The action of its training thread; empty: none."""
    needs: tuple[int, int] | None
    """The collective that has to be complete for it."""
    work: str
    may_raise: bool
    faults: tuple[str, ...]
    came: tuple[int, int]
    broken: str
    generation: int
    left: tuple[int, int]
    met: int
    meets: int
    """Its training thread goes on when all ranks have come to this meeting of its generation; 0: to none."""
    regroups: bool
    """It has been ordered to regroup, and has not yet."""
    replaceable: bool
    """A controller that knows its reports may have its process replaced."""


def view(it: Rank, kinds: tuple[str, ...]) -> View:
    """Return a rank's view."""
    training, needs, meets = "", None, 0
    step = it.gate.step
    if it.regroup is not None:
        training, meets = {"groups": ("fill", 1), "filled": ("regroup done", 2)}.get(it.main, ("leave", 0))
        training = "" if it.stuck else training
    elif it.main == "update":
        training = "end" if it.gate.busy == "update" and not it.hung else ""
    elif it.gate.open:
        training = {"compute": "ready", "norm": "begin", "gather": "gathered", "again": "again"}.get(it.main, "")
        needs = {"norm": (0, step), "gather": (1, step)}.get(it.main)
    work = "end roll" if it.stage == "rolling" else "disk" if it.working_on_disk else ""
    shut = it.gate.barred or it.main in ("raised", "done", "start")
    never_comes = not it.alive or it.main in ("raised", "done")
    meeting = it.main in ("groups", "filled") and not it.stuck
    may_raise = it.running and (meeting or (it.gate.open and it.main in ("norm", "gather")))
    faults = ["kill"]
    if not it.stopped:
        faults.append("stop")
        if meeting or it.main in ("compute", "norm", "update", "gather"):
            faults.append("raise")
        if (it.gate.busy == "update" and not it.hung) or (it.regroup is not None and not it.stuck):
            faults.append("hang")
    if it.link >= 0:
        faults.append("break")
    found = tuple(kind for kind in faults if kind in kinds) if it.alive else ()
    return View(
        it.alive, it.running, it.stopped and it.alive, it.running and it.hung, it.link, it.fence, shut, never_comes, bool(it.gate.busy), training, needs, work, may_raise,
        found, it.came, it.broken, it.generation, it.left, it.met, meets,
        it.regroup is not None,
        it.hung or it.stopped or it.gate.torn or it.main == "raised",
    )  # fmt: skip


class Draft:
    """A situation that is being changed."""

    def __init__(self, situation: Situation) -> None:
        self.ranks, self.controllers = list(situation.ranks), list(situation.controllers)
        self.up, self.down = list(situation.up), list(situation.down)
        self.exits, self.replaces = set(situation.exits), set(situation.replaces)
        self.disk, self.faults_left, self.spent = situation.disk, situation.faults_left, situation.spent
        self.peer_errors_left, self.thawed_up_to = situation.peer_errors_left, situation.thawed_up_to
        self.committed, self.opened = situation.committed, situation.opened

    def done(self) -> Situation:
        return Situation(
            tuple(self.ranks), tuple(self.controllers), tuple(self.up), tuple(self.down), tuple(sorted(self.exits)),
            tuple(sorted(self.replaces)), self.disk, self.faults_left, self.spent, self.peer_errors_left, self.thawed_up_to,
            self.committed, self.opened,
        )  # fmt: skip


def is_stale(state: ControllerState, message: object) -> bool:
    """True for a report of a freeze that is over: whatever it says is not looked at."""
    if not isinstance(message, StateReport):
        return False
    return message.freeze_id < state.freeze_id or (
        message.freeze_id == state.freeze_id and state.stage in (Stage.RUNNING, Stage.EXITING)
    )
