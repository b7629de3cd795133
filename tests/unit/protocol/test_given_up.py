"""Which nodes are given up for a spare one: each condition alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.protocol.test_known_at import changed
from tests.unit.protocol.test_seats import LEASE_S, seated
from ttp.controller.core.dump.lost_nodes import LostNode, lost_nodes
from ttp.controller.core.facts.state import AttachedAgent, Ordered, StateAt, is_ordered
from ttp.proto.messages import Cause, CauseKind

NOW = 100.0
LONG_AGO = NOW - 10 * LEASE_S
LOST = (LostNode("b", (2, 3), "c"),)


def silent(*ranks: int, **of: Any) -> StateAt[Ordered]:
    """Return the state of a job of two nodes, "a" and "b", and a spare "c", in which these ranks and their agent fell silent long ago."""
    state: Any = seated().state
    members = replace(state.members, leases_renewed_at=LONG_AGO)
    state = replace(state, members=members, agents=(AttachedAgent("c", (), 2),))
    for rank in ranks:
        dead = Cause(CauseKind.SILENT, (rank,), "silent")
        member = {"dead": dead, "attached": False, "received_at": LONG_AGO, "named_at": LONG_AGO}
        state = changed(state, rank, **member | of)
    assert is_ordered(state)
    return state


def ended(rank: int, kind: CauseKind = CauseKind.EXITED) -> Cause:
    return Cause(kind, (rank,), "ended")


def test_a_node_that_is_silent_whole_is_given_up() -> None:
    assert lost_nodes(silent(2, 3), NOW) == LOST


@pytest.mark.parametrize(
    ("of_rank_3", "lost"),
    [
        ({"dead": None}, False),
        ({"received_at": NOW - LEASE_S + 0.1}, False),
        ({"received_at": NOW - LEASE_S}, True),
        ({"named_at": NOW - LEASE_S + 0.1}, False),
        ({"named_at": NOW - LEASE_S}, True),
        ({"named_at": float("-inf")}, False),
        ({"dead": ended(3)}, True),
        ({"dead": ended(3), "received_at": NOW}, True),
        ({"dead": ended(3), "named_at": NOW - LEASE_S + 0.1}, False),
        ({"dead": ended(3), "attached": True}, False),
        ({"dead": ended(3, CauseKind.EXCEPTION)}, False),
        ({"attached": True}, True),
    ],
)
def test_every_rank_of_it_has_ended_or_is_silent_for_a_lease_and_so_is_their_agent(
    of_rank_3: dict[str, Any], lost: bool
) -> None:
    """What a rank that has ended sent before its end does not count, one whose stream is open may be there."""
    assert lost_nodes(changed(silent(2, 3), 3, **of_rank_3), NOW) == (LOST if lost else ())  # type: ignore[arg-type]


@pytest.mark.parametrize(("ago_s", "lost"), [(LEASE_S - 0.1, False), (LEASE_S, True)])
def test_silence_before_leases_began_anew_does_not_count(ago_s: float, lost: bool) -> None:
    state = silent(2, 3)
    state = replace(state, members=replace(state.members, leases_renewed_at=NOW - ago_s))
    assert lost_nodes(state, NOW) == (LOST if lost else ())


@pytest.mark.parametrize(("rank", "lost"), [(2, False), (0, True)])
def test_a_rank_that_was_ordered_to_publish_may_be_at_it(rank: int, lost: bool) -> None:
    state = silent(2, 3)
    dump = replace(state.at.dump, asked=frozenset({(rank, "temporary")}))
    assert lost_nodes(replace(state, at=replace(state.at, dump=dump)), NOW) == (LOST if lost else ())


def on_node(host: str, state: StateAt[Ordered], rank: int) -> StateAt[Ordered]:
    registered = state.members.table[rank].registration
    assert registered is not None
    return changed(state, rank, registration=replace(registered, host=host))  # type: ignore[return-value]


def test_any_node_but_rank_0s_may_be_given_up() -> None:
    """That of rank 1 as well, if rank 0 is elsewhere."""
    spare = (AttachedAgent("c", (), 3),)
    of_three = replace(on_node("b", silent(1, 2, 3), 1), agents=spare)
    assert lost_nodes(of_three, NOW) == (LostNode("b", (1, 2, 3), "c"),)
    of_rank_0 = replace(on_node("b", silent(0, 2, 3), 0), agents=spare)
    assert not lost_nodes(of_rank_0, NOW)


def test_ranks_that_no_process_has_registered_are_on_no_node() -> None:
    assert not lost_nodes(silent(2, 3, registration=None), NOW)


def test_a_spare_takes_one_node() -> None:
    """And a lost one without a spare of its size stays."""
    state = on_node("e", on_node("d", silent(1, 2, 3), 3), 1)
    spare = AttachedAgent("c", (), 1)
    assert lost_nodes(replace(state, agents=(spare,)), NOW) == (LostNode("e", (1,), "c"),)
    assert len(lost_nodes(replace(state, agents=(spare, replace(spare, host="f"))), NOW)) == 2
