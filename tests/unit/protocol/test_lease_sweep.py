"""A look at all leases: who is suspect, who is dead, when the next look is due, and whether it was the controller that was cut off."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

from tests.unit.protocol.test_membership import LEASE_S, SETTINGS, attached, dead
from ttp.controller.core.facts import membership
from ttp.controller.core.facts.membership import LeaseSweep, Membership, cut_off_s, slow_heartbeat_s

QUIET_S = cut_off_s(SETTINGS)


def received(*at: float, attached_ranks: tuple[int, ...] = (0, 1, 2, 3), renewed: float = -inf) -> Membership:
    """Return a membership of four ranks of which these have sent something at these moments; those that are not attached are suspect."""
    members = replace(attached(*range(len(at))), leases_renewed_at=renewed)
    for rank, moment in enumerate(at):
        here = rank in attached_ranks
        known: Any = {"received_at": moment, "attached": here, "suspect": not here}
        members = membership.update(members, rank, replace(members.table[rank], **known))
    return members


def sweep(members: Membership, now: float, welcomed: bool = True) -> LeaseSweep:
    return membership.sweep_leases(members, now, SETTINGS, welcomed, True)


def test_silent_ranks_are_suspect_and_then_dead() -> None:
    assert QUIET_S < 2 / 3 * LEASE_S + 0.5, "they are quiet for long enough here"
    found = sweep(received(10.0, 10.0, 12.5, 12.5), 12.5)
    assert (found.newly_suspect, found.run_out, found.cut_off) == ((0, 1), (), False)
    assert found.members.sweep_at == 13.0 and found.members.suspects == 2
    found = sweep(found.members, 13.0)
    assert (found.newly_suspect, found.run_out, found.cut_off) == ((), (0, 1), False)


def test_the_next_look_is_due_when_the_first_lease_needs_one() -> None:
    """A rank whose stream is broken is suspect already: its lease's end counts."""
    assert sweep(received(10.0, 11.4, attached_ranks=(1,)), 11.5).members.sweep_at == 13.0
    assert sweep(received(10.2, 10.0, attached_ranks=(0,)), 11.5).members.sweep_at == 12.2


def test_where_all_are_quiet_and_no_lease_is_over_leases_stay() -> None:
    found = sweep(received(10.0, 10.0), 10.0 + QUIET_S + 0.5)
    assert (found.newly_suspect, found.run_out, found.cut_off) == ((0, 1), (), False)


def test_where_all_leases_are_over_at_once_the_controller_was_cut_off() -> None:
    found = sweep(received(10.0, 10.0), 13.0)
    assert (found.run_out, found.cut_off, found.members.leases_renewed_at) == ((), True, 13.0)


def test_what_a_rank_has_sent_before_its_stream_broke_shows_that_the_controller_receives() -> None:
    found = sweep(received(10.0, 12.9, attached_ranks=(0,)), 13.0)
    assert (found.run_out, found.cut_off) == ((0,), False)


def test_most_ranks_have_a_lease_more_once() -> None:
    """If any of them has sent something since leases began anew: the others' messages may be under way."""
    found = sweep(received(8.0, 10.0, 10.0, 12.9, renewed=9.0), 13.0)
    assert (found.run_out, found.cut_off) == ((), True)
    found = sweep(received(8.0, 8.0, 8.0, 12.9, renewed=9.0), 13.0)
    assert (found.run_out, found.cut_off) == ((0, 1, 2), False)


def test_before_the_job_has_assembled_broken_streams_are_deaths_however_many() -> None:
    found = sweep(received(10.0, 10.0, 10.0, 12.9, attached_ranks=(3,)), 13.0, welcomed=False)
    assert (found.run_out, found.cut_off) == ((0, 1, 2), False)


def test_where_only_dead_ranks_have_streams_the_last_message_of_these_counts() -> None:
    """After a silence it may be the controller that is cut off: it looks again a heartbeat later."""
    members, now = dead(dead(received(5.0, 10.0), 0), 1), 10.0 + QUIET_S
    assert sweep(members, now).members.sweep_at == inf
    late = now + 0.1
    assert sweep(members, late).members.sweep_at == late + slow_heartbeat_s(SETTINGS)
    broken = dead(dead(received(5.0, 10.0, attached_ranks=(0,)), 0), 1)
    assert sweep(broken, now).members.sweep_at == now + slow_heartbeat_s(SETTINGS)


def test_a_decision_reaches_no_rank_where_none_is_attached_or_all_are_suspect() -> None:
    assert membership.silent(membership.empty(4)) and membership.silent(dead(attached(0), 0))
    assert not membership.silent(attached(0, 1))
    assert not membership.silent(sweep(received(10.0, 12.5, 12.5, 12.5), 12.5).members)
    assert membership.silent(sweep(received(10.0, 10.0, 10.0, 10.0), 12.5).members)
