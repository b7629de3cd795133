"""Controllers and agents that are wrong about who is alive, on purpose; undone with the patch."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from tests.simulation.rank import Rank
from ttp.controller.core import stages
from ttp.controller.core import transitions as tables
from ttp.controller.core.dump import roll_forward
from ttp.controller.core.facts import membership
from ttp.controller.core.facts.decision import Refusal
from ttp.controller.core.facts.membership import Member
from ttp.controller.core.ranks import liveness, takeover
from ttp.proto.frozen import replace
from ttp.proto.messages import Vouch

Patch = pytest.MonkeyPatch


def _with_alive_at(patch: Patch, wrong: Any) -> None:
    for module in (membership, roll_forward):
        patch.setattr(module, "alive_at", wrong)


def vouches_are_not_believed(patch: Patch) -> None:
    for table in tables.TABLES.values():
        patch.setitem(table.on, Vouch, lambda state, message, now, out: state)


def only_live_ranks_show_that_a_controller_receives(patch: Patch) -> None:
    """What a rank sends that was taken for dead proves nothing about the controller."""
    sweep = membership.sweep_leases

    def wrong(members: Any, *rest: Any) -> Any:
        return (
            sweep(members, *rest) if members.present else membership.LeaseSweep(replace(members, sweep_at=inf), (), ())
        )

    patch.setattr(stages, "sweep_leases", wrong)


def silent_ranks_are_lost_nodes(patch: Patch) -> None:
    """A controller does not wait at its end for a rank that is silent, whatever its agent reports."""
    patch.setattr(stages, "only_lost_nodes", lambda members, now, settings: not members.present)


def lost_nodes_have_the_time_of_silent_ranks(patch: Patch) -> None:
    """A controller waits at its end for ranks of a node that is lost."""
    patch.setattr(stages, "only_lost_nodes", lambda members, now, settings: not members.attached)


def who_attached_late_is_not_waited_for(patch: Patch) -> None:
    """A round ends when the time of those is over that were there at its beginning."""
    patch.setattr(liveness, "ask_late", lambda state, rank, now: state)


def an_older_step_is_taken_at_once(patch: Patch) -> None:
    """Local copies cover it, while a rank that has the newest step is about to answer."""
    patch.setattr(roll_forward, "_is_less", lambda verdict, fault: isinstance(verdict, Refusal))


def vouches_never_age(patch: Patch) -> None:
    """Whoever was vouched for once has the whole vouched lease, whatever became of its agent."""

    def wrong(member: Member, leases_renewed_at: float, settings: Any, started: bool) -> float:
        since = membership.silent_since(member, leases_renewed_at)
        longer_s: float = membership.vouched_lease(settings, started) - settings.lease_s
        return since + (longer_s if member.vouched > -inf else 0.0)

    _with_alive_at(patch, wrong)


def vouches_count_for_ever(patch: Patch) -> None:
    """An interpreter that is held for good is never given up."""

    def wrong(member: Member, leases_renewed_at: float, settings: Any, started: bool) -> float:
        return max(membership.silent_since(member, leases_renewed_at), member.vouched)

    _with_alive_at(patch, wrong)


def stopped_processes_are_vouched_for(patch: Patch) -> None:
    patch.setattr(Rank, "runs", property(lambda self: self.alive))


def vouched_ranks_are_not_waited_for_after_a_takeover(patch: Patch) -> None:
    patch.setattr(takeover, "_waits_for_vouched", lambda state, absent, now: False)


def a_vouch_is_taken_for_a_word_of_the_rank(patch: Patch) -> None:
    """It renews the lease as a heartbeat does."""

    def wrong(state: Any, message: Any, now: float, out: Any) -> Any:
        members = state.members
        for rank in message.ranks:
            members = membership.note_message(members, rank, now)
        return replace(state, members=members)

    for table in tables.TABLES.values():
        patch.setitem(table.on, Vouch, wrong)
