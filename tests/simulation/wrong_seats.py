"""Machines that are wrong on purpose about lost nodes and the spare ones in their places. Undone with the patch."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulation import controllers
from tests.simulation.wrong_controllers import _with_advance
from ttp.controller.core import machine
from ttp.controller.core.dump import freeze, lost_nodes, regroup
from ttp.controller.core.facts.events import EarlierLives, Effect, Supersede
from ttp.controller.core.facts.stage_table import TABLES
from ttp.controller.core.facts.state import ControllerState, Exiting, Freezing, Gathering, Regrouping, Running
from ttp.controller.core.ranks import liveness, takeover
from ttp.controller.handler import Handler, StopAsked
from ttp.proto.frozen import replace

Patch = pytest.MonkeyPatch


def rank_0s_node_is_given_up(patch: Patch) -> None:
    """Like any other that is silent."""

    def wrong(state: Any, now: float) -> dict[str, tuple[int, ...]]:
        nodes: dict[str, list[int]] = {}
        for rank, member in enumerate(state.members.table):
            nodes.setdefault(member.registration.host if member.registration else "", []).append(rank)
        return {
            host: tuple(ranks)
            for host, ranks in nodes.items()
            if host and all(lost_nodes._is_lost(state, rank, state.members.table[rank], now) for rank in ranks)
        }

    patch.setattr(lost_nodes, "_all_lost", wrong)


def rank_that_comes_while_others_write_holds_nothing(patch: Patch) -> None:
    """What it holds is learnt while gates are closed only."""
    patch.setattr(freeze, "with_known_shards", lambda state: state)


def one_spare_node_takes_every_place(patch: Patch) -> None:
    """It is not looked at whether it has another node's ranks already."""
    found_for = lost_nodes.lost_nodes

    def wrong(state: Any, now: float) -> tuple[lost_nodes.LostNode, ...]:
        found: list[lost_nodes.LostNode] = []
        for host, ranks in lost_nodes._all_lost(state, now).items():
            lost_here = {host: ranks}
            with pytest.MonkeyPatch.context() as only_now:
                only_now.setattr(lost_nodes, "_all_lost", lambda *_, one=lost_here: one)
                found += found_for(state, now)
        return tuple(found)

    patch.setattr(regroup, "lost_nodes", wrong)


def node_that_takes_a_place_stays_lost(patch: Patch) -> None:
    """It had been given up before."""
    move = regroup._move

    def wrong(state: Any, nodes: Any, out: Any) -> Any:
        after, moved = move(state, nodes, out)
        return replace(after, lost_hosts=state.lost_hosts), moved

    patch.setattr(regroup, "_move", wrong)


def earlier_processes_are_let_in(patch: Patch) -> None:
    """Whoever registers last has a rank's place."""
    patch.setattr(machine, "refusal", lambda state, message: "")
    patch.setattr(liveness, "refusal", lambda state, message: "")


def earlier_processes_that_came_first_stay(patch: Patch) -> None:
    """A controller that gathers its ranks keeps them, refuses only those that come after the others, and opens all gates together."""
    patch.setattr(takeover, "begun", lambda process: 10**9)

    def wrong(state: Any, message: Any, out: Any) -> Any:
        return replace(state, generation=max(state.generation, message.regrouped))

    patch.setattr(liveness, "note_generation", wrong)


def recovery_leaves_the_generation_as_it_was(patch: Patch) -> None:
    """A controller does not learn from its own recoveries which processes are of an earlier generation."""
    end = regroup.end_regrouping

    def wrong(state: Any, now: float, out: Any) -> Any:
        after = end(state, now, out)
        if not isinstance(after.at, Running):
            return after
        table = after.members.table
        forgotten = {
            rank: replace(member, registration=replace(member.registration, generation=0, vacant=0))
            for rank, member in enumerate(table)
            if member.registration is not None
        }
        return replace(
            after, generation=state.generation, members=replace(after.members, table=table.put_all(forgotten))
        )

    _with_advance(patch, Regrouping, wrong)


def any_controller_of_a_later_term_takes_over(patch: Patch) -> None:
    """It is not looked at which ranks have come to it, nor does it learn that the job has gone on to a later generation."""
    standby_keeps_the_ranks_of_a_lost_node(patch)
    take = Handler.take

    def wrong(self: Handler, item: Any) -> None:
        take(self, StopAsked(item.reason) if isinstance(item, StopAsked) else item)

    patch.setattr(Handler, "take", wrong)


def ranks_of_an_earlier_controller_have_no_time_to_come(patch: Patch) -> None:
    """It is ended, and its ranks are given up a moment later."""
    patch.setitem(TABLES[Gathering].on, EarlierLives, _ends_it)


def one_that_cannot_save_ends_an_earlier_controller(patch: Patch) -> None:
    """Its own ranks do not cover, and it has refused."""
    for stage in (Freezing, Exiting):
        patch.setitem(TABLES[stage].on, EarlierLives, _ends_it)


def orders_to_end_are_obeyed_however_late(patch: Patch) -> None:
    """Whoever gave one may have given the ranks up since."""
    patch.setattr(controllers, "SUPERSEDE_PART", 1000.0)


def standby_keeps_the_ranks_of_a_lost_node(patch: Patch) -> None:
    """It does not learn that the earlier controller leads a later generation."""
    lives = takeover.earlier_lives

    def wrong(state: Any, event: EarlierLives, now: float, out: list[Effect]) -> ControllerState:
        return lives(state, EarlierLives(event.address), now, out)

    patch.setitem(TABLES[Gathering].on, EarlierLives, wrong)


def _ends_it(state: ControllerState, event: EarlierLives, now: float, out: list[Effect]) -> ControllerState:
    out.append(Supersede(event.address, takeover.newest_begun(state)))
    return state
