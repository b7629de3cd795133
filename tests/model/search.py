"""The search: every situation that can be reached, once, with a reduction that is argued in docs/model.md."""

from __future__ import annotations

import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.model.claims import judge
from tests.model.situation import CLOSED, Action, Situation, is_stale
from tests.model.world import World
from tests.simulation.garbage import seldom_collected
from ttp.controller.core.dump.freeze import has_culprit
from ttp.controller.core.facts.state import ControllerState, Regrouping, Stage
from ttp.errors import ProtocolError
from ttp.proto.messages import (
    CauseKind,
    FaultReport,
    Finished,
    Regrouped,
    Release,
    RolledForward,
    StandbyList,
    StateReport,
    Thaw,
    Welcome,
)

_PEACEFUL = (Thaw, Welcome, StandbyList, Release)


@dataclass
class Found:
    """What a search came to."""

    states: int = 0
    steps: int = 0
    ends: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    endings: set[tuple[object, ...]] = field(default_factory=set)
    """What the ends have in common with none other: outcome, what is published, how each rank ended and with which state."""
    crossings: int = 0
    """Situations from which every order was followed."""
    violation: str = ""
    path: tuple[Action, ...] = ()
    complete: bool = False
    seconds: float = 0.0


class Search:
    """Depth first, so that the way to a violation is what stands on the stack."""

    def __init__(self, world: World, reduced: bool = True) -> None:
        self.world, self.reduced = world, reduced
        self._ids: dict[object, int] = {}
        self._seen: set[bytes] = set()
        size = world.shape.world_size + 1 + world.shape.standbys + 11
        self._reductions = (self._leaving, self._nothing_new, self._one_rank, self._one_answer, self._all_the_same)
        self._pack = struct.Struct(f"{size}i").pack

    def run(self, limit: int = 0, tell: Callable[[Found], None] | None = None) -> Found:
        """Search until all states are seen, a violation is found, or `limit` states were seen (0: no limit)."""
        with seldom_collected():
            return self._run(limit, tell)

    def _run(self, limit: int, tell: Callable[[Found], None] | None) -> Found:
        found, began = Found(), time.monotonic()
        start = self.world.start()
        key = self._key(start)
        self._seen.add(key)
        stack: list[tuple[bytes, Situation, list[Action], Action]] = [
            (key, start, self._steps(start, found), ("start",))
        ]
        found.states = 1
        while stack and not found.violation and not (limit and found.states >= limit):
            key, situation, left, _ = stack[-1]
            if not left:
                stack.pop()
                continue
            action = left.pop()
            found.steps += 1
            try:
                after = self._after(situation, action)
            except ProtocolError as error:
                found.violation = f"{' '.join(map(str, action))}: {error}"
                break
            key = self._key(after)
            if key in self._seen:
                continue
            self._seen.add(key)
            found.states += 1
            steps = self._steps(after, found)
            stack.append((key, after, steps, action))
            if tell is not None and found.states % 20_000 == 0:
                found.seconds = time.monotonic() - began
                tell(found)
        found.complete = not stack
        found.path = tuple(entry[3] for entry in stack)
        found.seconds = time.monotonic() - began
        return found

    def _key(self, situation: Situation) -> bytes:
        number = self._number
        return self._pack(
            *situation.ranks, *situation.controllers, number(situation.up), number(situation.down), number(situation.exits),
            number(situation.replaces), *situation[6:],
        )  # fmt: skip

    def _number(self, value: object) -> int:
        return self._ids.setdefault(value, len(self._ids))

    def _after(self, situation: Situation, action: Action) -> Situation:
        if action[0] == "wait":
            after = self.world.wait(situation)
            assert after is not None
            return after
        return self.world.apply(situation, action)

    def _steps(self, situation: Situation, found: Found) -> list[Action]:
        """Return the actions to follow from here, and judge the situation where it is an end."""
        world = self.world
        broken = next((view.broken for view in map(world.views.__getitem__, situation.ranks) if view.broken), "")
        if broken:
            found.violation = broken
            return []
        if self.reduced:
            for few in self._reductions:
                if (steps := few(situation)) is not None:
                    return steps
        ordinary = world.ordinary(situation)
        found.crossings += 1
        possible = world.possible(situation)
        if self.reduced and ordinary:
            possible = [action for action in possible if not self._can_go_on_later(situation, action)]
        steps = [*world.faults(situation), *possible, *ordinary]
        if not ordinary:
            later = world.wait(situation)
            if later is None:
                found.ends += 1
                outcome, violation = judge(world, situation)
                found.outcomes[outcome] += 1
                states = (world.rank(situation, rank) for rank in range(world.shape.world_size))
                ranks = tuple((it.ended, it.main, it.gate.state) for it in states)
                found.endings.add((outcome, world.disk(situation).published, ranks))
                found.violation = violation
            else:
                steps.append(("wait",))
        return steps

    def _can_go_on_later(self, situation: Situation, action: Action) -> bool:
        """True for a stopped controller's going on that concerns no running rank: none has a stream to it or looks for
        one, and no agent would turn to it with news that another controller waits for."""
        if action[0] != "controller resume" or self.world.shape.in_place_s:
            return False
        place, views = action[1], map(self.world.views.__getitem__, situation.ranks)
        if any(to > place and rank >= 0 for to, rank in situation.exits):
            return False
        return not any(view.running and view.link in (place, -1) for view in views)

    def _leaving(self, situation: Situation) -> list[Action] | None:
        """Return the leaving of a rank that is ordered to regroup, and what may go wrong with that rank before: all others can wait for it."""
        world = self.world
        for rank, number in enumerate(situation.ranks):
            view = world.views[number]
            if view.running and view.training == "leave" and not world.is_replaced(situation, rank):
                return [*world.faults_of(situation, rank), ("leave", rank)]
        return None

    def _nothing_new(self, situation: Situation) -> list[Action] | None:
        """Return the hearing of what the controller knows of already, or the receiving of what changes no gate."""
        world, places = self.world, len(situation.controllers)
        for index, channel in enumerate(situation.up):
            if not channel:
                continue
            rank, place = divmod(index, places)
            controller = world.controller(situation, place)
            if not controller.running:
                continue
            member = controller.state.members.table[rank]
            if channel[0] == CLOSED:
                if member.dead is not None and not member.attached:
                    return [("deliver", place, rank)]
            elif is_stale(controller.state, world.of_messages.values[channel[0]]) and not member.suspect:
                return [("deliver", place, rank)]
        for index, channel in enumerate(situation.down):
            if not channel or not isinstance(world.of_messages.values[channel[0]], Welcome | StandbyList):
                continue
            rank, place = divmod(index, places)
            view = world.views[situation.ranks[rank]]
            if view.running and view.link == place and not world.is_replaced(situation, rank):
                faults = [action for action in world.faults_of(situation, rank) if action[0] in ("break", "stop")]
                return [*faults, ("receive", rank)]
        return None

    def _all_the_same(self, situation: Situation) -> list[Action] | None:
        """Return one action where nothing can go wrong any more and training only continues: its end does not depend on the
        order."""
        world, values = self.world, self.world.of_messages.values
        if situation.faults_left or world.possible(situation):
            return None
        if any(rank < 0 or world.rank(situation, rank).ended != "exit code 0" for _, rank in situation.exits):
            return None
        if any(not isinstance(values[number], Finished) for channel in situation.up for number in channel):
            return None
        if any(not isinstance(values[number], _PEACEFUL) for channel in situation.down for number in channel):
            return None
        controllers = map(world.of_controllers.values.__getitem__, situation.controllers)
        if any(not (it.gone or it.idle or it.state.stage is Stage.RUNNING) for it in controllers):
            return None
        if any(world.views[number].work or world.views[number].regroups for number in situation.ranks):
            return None
        return world.ordinary(situation)[:1] or None

    def _one_rank(self, situation: Situation) -> list[Action] | None:
        """Return the actions of one rank that has something to receive, and whose training thread does not wait: all
        others can wait for them."""
        world, places = self.world, len(situation.controllers)
        for rank, number in enumerate(situation.ranks):
            view = world.views[number]
            if not (view.running and view.link >= 0 and situation.down[rank * places + view.link]):
                continue
            if view.work == "disk" or world.waits_for_others(situation, rank):
                continue
            if world.shape.in_place_s and (view.replaceable or world.is_replaced(situation, rank)):
                continue
            may = [
                action for action in world.possible(situation) if action in (("peer error", rank), ("late end", rank))
            ]
            return [*world.faults_of(situation, rank), *may, *world.of_rank(situation, rank)]
        return None

    def _one_answer(self, situation: Situation) -> list[Action] | None:
        """Return the hearing of one answer that a controller cannot do without, and what else concerns it or its rank."""
        world, places = self.world, len(situation.controllers)
        for index, channel in enumerate(situation.up):
            if not channel or (len(channel) > 1 and CLOSED in channel):
                continue
            rank, place = divmod(index, places)
            view, controller = world.views[situation.ranks[rank]], world.controller(situation, place)
            if not (view.running and view.link == place and controller.running and rank in controller.streams):
                continue
            if (place, rank) in situation.exits or world.is_replaced(situation, rank):
                continue
            message = world.of_messages.values[channel[0]]
            if is_awaited(controller.state, message) and world.changes_no_stage(situation, place, rank, message):
                faults = [*world.faults_of(situation, rank), *world.faults_of_controller(situation, place)]
                return [*faults, ("deliver", place, rank)]
        return None


def is_awaited(state: ControllerState, message: object) -> bool:
    """True for an answer that the controller's next decision waits for, whatever else it receives before."""
    fault, dump = state.fault, state.dump
    if isinstance(message, Finished):
        return state.members.finished < state.settings.world_size - 1
    if fault is None:
        return False
    if isinstance(message, FaultReport):
        return message.cause.kind is CauseKind.PEER_ERROR and has_culprit(fault.causes)
    if isinstance(message, StateReport) and state.stage is Stage.FREEZING and message.freeze_id == state.freeze_id:
        member, rank = state.members.table[message.rank], message.rank
        awaited = fault.reports[rank] is None and rank not in fault.stuck and member.dead is None
        return awaited and fault.round_deadline > 0
    if isinstance(message, RolledForward) and state.stage is Stage.ROLLING and message.freeze_id == state.freeze_id:
        return dump is not None and dump.rolling[message.rank]
    if isinstance(message, Regrouped) and isinstance(state.at, Regrouping) and message.freeze_id == state.freeze_id:
        return message.rank in state.at.pending
    return False
