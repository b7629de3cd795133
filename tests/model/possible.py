"""What may happen in a situation: what will sooner or later, what need not, and what may go wrong."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from tests.model.controller import Controller
from tests.model.disk import Disk
from tests.model.rank import Rank
from tests.model.shape import Shape
from tests.model.situation import SUPERSEDED, Action, Draft, Numbers, Situation, View, view
from ttp.controller.core.facts.state import ControllerState


class Possibilities:
    """Owns the numbering of parts, and the rules of what is possible; `World` says what it does."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.of_ranks, self.of_controllers, self.of_disks, self.of_messages = (Numbers() for _ in range(4))
        for marker in ("closed", "hello", "greeting"):
            self.of_messages.of(marker)
        self._steps: dict[Hashable, tuple[int, tuple[Any, ...]]] = {}
        self.views: list[View] = []
        """What the search asks of a rank most often, by the rank's number."""

    # --- parts ---

    def _rank_number(self, rank: Rank) -> int:
        number = self.of_ranks.of(rank)
        if number == len(self.views):
            self.views.append(view(rank, self.shape.kinds))
        return number

    def rank(self, situation: Situation | Draft, rank: int) -> Rank:
        found: Rank = self.of_ranks.values[situation.ranks[rank]]
        return found

    def controller(self, situation: Situation | Draft, place: int) -> Controller:
        found: Controller = self.of_controllers.values[situation.controllers[place]]
        return found

    def disk(self, situation: Situation | Draft) -> Disk:
        found: Disk = self.of_disks.values[situation.disk]
        return found

    # --- what is possible ---

    def ordinary(self, situation: Situation) -> list[Action]:
        """Return what will happen sooner or later if nothing else does: none of it waits for time."""
        found: list[Action] = []
        if not self.anybody(situation):
            return found
        for rank in range(self.shape.world_size):
            found += self.of_rank(situation, rank)
        for place in range(len(situation.controllers)):
            found += self.of_controller(situation, place)
        return found

    def of_rank(self, situation: Situation, rank: int) -> list[Action]:
        """Return the ordinary actions of one rank."""
        view = self.views[situation.ranks[rank]]
        if not view.running:
            return []
        found: list[Action] = []
        if view.link >= 0 and situation.down[rank * len(situation.controllers) + view.link]:
            found.append(("receive", rank))
        if view.work:
            found.append((view.work, rank))
        if view.training and (view.needs is None or self._all_came(situation, *view.needs)):
            found.append((view.training, rank))
        return found

    def waits_for_others(self, situation: Situation, rank: int) -> bool:
        """True while a rank's training thread may be woken by what other ranks do: by their coming to a collective."""
        view = self.views[situation.ranks[rank]]
        if view.shut or view.needs is None:
            return False
        which, step = view.needs
        missing = [other for number in situation.ranks if (other := self.views[number]).came[which] < step]
        return bool(missing) and not any(other.never_comes for other in missing)

    def of_controller(self, situation: Situation, place: int) -> list[Action]:
        it, places = self.controller(situation, place), len(situation.controllers)
        if not it.running:
            return []
        found: list[Action] = [
            ("deliver", place, rank) for rank in range(self.shape.world_size) if situation.up[rank * places + place]
        ]
        attached = not any(self.controller(situation, earlier).running for earlier in range(place))
        found += [
            ("exit", to, rank) for to, rank in situation.exits if to == place and (attached or rank == SUPERSEDED)
        ]
        return found

    def possible(self, situation: Situation) -> list[Action]:
        """Return what may happen at any time and need not: a stopped process goes on, a late update ends, a
        collective raises."""
        ranks = [self.views[number] for number in situation.ranks]
        lost = situation.peer_errors_left and not all(it.alive for it in ranks)
        found: list[Action] = []
        for rank, it in enumerate(ranks):
            if it.stopped:
                found.append(("resume", rank))
            elif it.late:
                found.append(("late end", rank))
            elif lost and it.may_raise and self._is_news(situation, it.link):
                found.append(("peer error", rank))
        for place, number in enumerate(situation.controllers):
            if self.of_controllers.values[number].stopped:
                found.append(("controller resume", place))
        return found

    def _is_news(self, situation: Situation, link: int) -> bool:
        """True where a collective's error is news to the rank's controller; later it would only be one more line."""
        return link < 0 or not _has_causes(self.controller(situation, link).state)

    def faults(self, situation: Situation) -> list[Action]:
        """Return what may go wrong now."""
        if not situation.faults_left or not self.anybody(situation):
            return []
        found: list[Action] = []
        for rank in range(self.shape.world_size):
            found += self.faults_of(situation, rank)
        for place in range(len(situation.controllers)):
            found += self.faults_of_controller(situation, place)
        if self._may_come(situation, "full disk"):
            root = self.shape.roots[0]
            if root not in self.disk(situation).full:
                found.append(("full disk", root))
        return found

    def faults_of(self, situation: Situation, rank: int) -> list[Action]:
        if not situation.faults_left:
            return []
        faults = self.views[situation.ranks[rank]].faults
        return [(kind, rank) for kind in faults if not situation.spent & self.shape.spent_by(kind)]

    def faults_of_controller(self, situation: Situation, place: int) -> list[Action]:
        if not situation.faults_left or not self.controller(situation, place).running:
            return []
        return [(kind, place) for kind in ("controller kill", "controller stop") if self._may_come(situation, kind)]

    def _may_come(self, situation: Situation, kind: str) -> bool:
        return kind in self.shape.kinds and not situation.spent & self.shape.spent_by(kind)

    def _all_came(self, situation: Situation, which: int, step: int) -> bool:
        return all(self.views[number].came[which] >= step for number in situation.ranks)

    def anybody(self, situation: Situation) -> bool:
        """True while a rank's process lives: nothing that controllers do without ranks changes anything."""
        return any(self.views[number].alive for number in situation.ranks)


def _has_causes(state: ControllerState) -> bool:
    return state.fault is not None and bool(state.fault.causes)
