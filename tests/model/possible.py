"""What may happen in a situation: what will sooner or later, what need not, and what may go wrong."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from tests.model.controller import Controller
from tests.model.disk import Disk
from tests.model.rank import Rank
from tests.model.shape import Shape
from tests.model.situation import LOOKED_FOR, Action, Draft, Numbers, Situation, View, view
from ttp.controller.core.facts.state import ControllerState, Stage
from ttp.proto.messages import Regroup


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
        if view.training and self._goes_on(situation, rank, view):
            found.append((view.training, rank))
        return found

    def _goes_on(self, situation: Situation, rank: int, view: View) -> bool:
        """True where all have come to what its training thread waits in."""
        if view.meets:
            others = map(self.views.__getitem__, situation.ranks)
            whole = all(it.generation == view.generation and it.met >= view.meets for it in others)
            return whole and (view.meets > 1 or self._can_be_filled(situation, rank))
        return view.needs is None or self._all_came(situation, view.generation, *view.needs)

    def _can_be_filled(self, situation: Situation, rank: int) -> bool:
        """True where all its sources live, or have sent all before they died."""
        sources = [self.rank(situation, source) for source in self.sources_of(situation, rank)]
        return all(source.alive or source.met == 2 for source in sources)

    def sources_of(self, situation: Situation | Draft, rank: int) -> tuple[int, ...]:
        """Return the ranks that fill this one as it regroups."""
        order = self.rank(situation, rank).regroup
        assert order is not None
        staying = [[holder for holder in group if holder not in order.replaced] for group in self._groups_of(rank)]
        return tuple(group[0] for group in staying if group) if rank in order.replaced else ()

    def _groups_of(self, rank: int) -> list[tuple[int, ...]]:
        return [holders for holders in self.shape.holders if rank in holders]

    def lacks_a_source(self, situation: Situation | Draft, rank: int) -> bool:
        """True for a replacement of which no rank that stays holds a shard."""
        order = self.rank(situation, rank).regroup
        assert order is not None
        return rank in order.replaced and any(set(group) <= set(order.replaced) for group in self._groups_of(rank))

    def waits_for_others(self, situation: Situation, rank: int) -> bool:
        """True while a rank's training thread may be woken by what other ranks do: by their coming to a collective."""
        view = self.views[situation.ranks[rank]]
        if view.meets and view.training:
            return self._may_be_met(situation, view)
        if view.shut or view.needs is None:
            return False
        which, step = view.needs
        missing = [
            other for number in situation.ranks if _came((other := self.views[number]), view.generation, which) < step
        ]
        return bool(missing) and not any(other.never_comes or other.generation > view.generation for other in missing)

    def _may_be_met(self, situation: Situation, view: View) -> bool:
        """True unless a rank that has not come to this meeting never will: it has no order to, and none comes."""
        missing = [
            other
            for number in situation.ranks
            if (other := self.views[number]).generation != view.generation or other.met < view.meets
        ]
        lost = any(not other.regroups or not other.training for other in missing)
        return not lost or self._may_order_to_regroup(situation)

    def of_controller(self, situation: Situation, place: int) -> list[Action]:
        it, places = self.controller(situation, place), len(situation.controllers)
        if not it.running:
            return []
        found: list[Action] = [
            ("deliver", place, rank) for rank in range(self.shape.world_size) if situation.up[rank * places + place]
        ]
        attached = not any(self.controller(situation, earlier).running for earlier in range(place))
        found += [
            ("exit", to, rank)
            for to, rank in situation.exits
            if to == place and (self.controller(situation, LOOKED_FOR - rank).running if rank < 0 else attached)
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
            elif lost and it.may_raise and (it.meets or self._is_news(situation, it.link)):
                found.append(("peer error", rank))
        for place, number in enumerate(situation.controllers):
            if self.of_controllers.values[number].stopped:
                found.append(("controller resume", place))
        found += [
            ("lose order", to, rank)
            for to, rank in situation.exits
            if rank < 0
            and self.controller(situation, to).running
            and self.controller(situation, LOOKED_FOR - rank).running
        ]
        return found + self._replaces(situation, "replace")

    def _replaces(self, situation: Situation, kind: str) -> list[Action]:
        """Return what agents have been ordered. One that saw its rank leave on order, or was ordered to end, starts no process any more."""
        late = self.shape.late_agents
        if not situation.replaces or not self.anybody(situation):
            return []
        return [
            (kind, *order)
            for order in situation.replaces
            if not self.rank(situation, order[1]).ended.startswith("exit code")
            and not (ordered := self.controller(situation, order[0])).sent_all_away
            and (late or not ordered.running or ordered.state.stage is Stage.REGROUPING)
        ]

    def is_replaced(self, situation: Situation, rank: int) -> bool:
        """True while an agent may end this rank's process to start another one."""
        return any(order[1] == rank for order in situation.replaces)

    def _may_order_to_regroup(self, situation: Situation) -> bool:
        """True while ranks receive such an order, or may."""
        if not self.shape.in_place_s:
            return False
        values = self.of_controllers.values
        return any(values[number].state.stage is Stage.REGROUPING for number in situation.controllers) or any(
            isinstance(self.of_messages.values[number], Regroup) for channel in situation.down for number in channel
        )

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
        if self._may_come(situation, "replace fails"):
            found += self._replaces(situation, "replace fails")
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

    def _all_came(self, situation: Situation, generation: int, which: int, step: int) -> bool:
        return all(_came(self.views[number], generation, which) >= step for number in situation.ranks)

    def anybody(self, situation: Situation) -> bool:
        """True while a rank's process lives: nothing that controllers do without ranks changes anything."""
        return any(self.views[number].alive for number in situation.ranks)


def _came(view: View, generation: int, which: int) -> int:
    """Return the last step at which a rank came to such a collective of that generation's groups."""
    if view.generation == generation:
        return view.came[which]
    return view.left[which] if view.generation > generation else -1


def _has_causes(state: ControllerState) -> bool:
    return state.fault is not None and bool(state.fault.causes)
