"""When leases are looked at, and which word of an agent counts for which process."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from tests.unit.protocol.bench import registration
from ttp.controller.core.facts import membership
from ttp.controller.core.facts.events import ControllerSettings
from ttp.controller.core.facts.membership import Membership
from ttp.proto.messages import Cause, CauseKind, Vouch

LEASE_S = 3.0
SETTINGS = ControllerSettings.from_flat({"job_id": "job", "term": 1, "world_size": 4, "lease_s": LEASE_S})


def attached(*ranks: int, at: float = 10.0) -> Membership:
    members = membership.empty(4)
    for rank in ranks:
        members = membership.attach(members, registration(rank), at, SETTINGS)
    return members


def detached(members: Membership, now: float = 11.0, welcomed: bool = True) -> float:
    """Return when leases are looked at after the stream of rank 0 has broken."""
    return membership.detach(members, 0, now, SETTINGS, welcomed).sweep_at


@pytest.mark.parametrize(("planned", "expected"), [(inf, 12.0), (11.0, 11.0)])
def test_a_rank_that_attaches_is_looked_at_when_it_could_be_suspect(planned: float, expected: float) -> None:
    members = replace(attached(1, 2), sweep_at=planned)
    assert membership.attach(members, registration(0), 10.0, SETTINGS).sweep_at == expected


def test_a_broken_stream_is_looked_at_when_its_lease_ends() -> None:
    """Which began with the last message, or when all leases did, or with the break where no heartbeats are sent yet."""
    members = replace(attached(0, 1), sweep_at=inf, leases_renewed_at=-inf)
    assert detached(members) == 13.0
    assert detached(replace(members, leases_renewed_at=10.5)) == 13.5
    assert detached(replace(members, leases_renewed_at=9.0)) == 13.0
    assert detached(members, welcomed=False) == 14.0
    assert detached(replace(members, sweep_at=12.0)) == 12.0, "another's comes first"


@pytest.mark.parametrize("dead", [False, True])
def test_the_last_stream_of_a_live_rank_leaves_the_job_empty(dead: bool) -> None:
    members = attached(0)
    if dead:
        members = membership.mark_dead(members, 0, Cause(CauseKind.SILENT, (0,), "silent"), False, 10.5)
    after = membership.detach(members, 0, 11.0, SETTINGS, True)
    assert after.empty_since == (10.5 if dead else 11.0)


@pytest.mark.parametrize(("pid", "counts"), [(100, True), (7, False)])
def test_a_vouch_for_a_process_that_has_not_registered_counts_for_that_process(pid: int, counts: bool) -> None:
    members = membership.vouch(membership.empty(4), Vouch((0,), (pid,)), 9.0)
    assert registration(0).pid == 100
    known = membership.attach(members, registration(0), 10.0, SETTINGS).table[0]
    assert known.vouched == (9.0 if counts else -inf) and known.named_at == 9.0


@pytest.mark.parametrize(
    ("kind", "named"), [(None, False), (CauseKind.SILENT, False), (CauseKind.EXITED, True)], ids=str
)
def test_an_agent_that_names_another_process_is_the_ranks_own_where_that_has_exited(
    kind: CauseKind | None, named: bool
) -> None:
    """Else it may be that of a node that was given up."""
    members = attached(0)
    if kind is not None:
        members = membership.mark_dead(members, 0, Cause(kind, (0,), "dead"), True, 10.5)
    known = membership.vouch(members, Vouch((0,), (7,)), 11.0).table[0]
    assert known.vouched == -inf and known.named_at == (11.0 if named else -inf)


def dead(members: Membership, rank: int, kind: CauseKind = CauseKind.SILENT) -> Membership:
    return membership.mark_dead(members, rank, Cause(kind, (rank,), "dead"), False, 10.5)


@pytest.mark.parametrize("alone", [False, True])
def test_a_rank_that_was_only_silent_comes_back(alone: bool) -> None:
    """Where it is the only one, the others have a lease from then to come back as well."""
    members = dead(replace(attached(0) if alone else attached(0, 1), leases_renewed_at=5.0), 0)
    members = membership.update(members, 0, replace(members.table[0], suspect=True))
    assert members.empty_since == (10.5 if alone else inf)
    after = membership.mark_alive(members, 0, 12.0)
    known = after.table[0]
    assert (known.dead, known.suspect, known.received_at) == (None, False, 12.0)
    assert (after.leases_renewed_at, after.empty_since) == (12.0 if alone else 5.0, inf)


def test_a_rank_that_has_ended_or_whose_stream_is_closed_was_not_only_silent() -> None:
    silent = dead(attached(0), 0).table[0]
    assert membership.was_only_silent(silent)
    assert not membership.was_only_silent(replace(silent, attached=False))
    assert not membership.was_only_silent(dead(attached(0), 0, CauseKind.EXITED).table[0])
    assert not membership.was_only_silent(attached(0).table[0])


@pytest.mark.parametrize("recent", ["received_at", "named_at", "leases_renewed_at", "a live rank", ""])
def test_only_lost_nodes_remain_where_nothing_has_come_for_a_lease(recent: str) -> None:
    now = 10.0 + LEASE_S
    members = dead(replace(attached(0, 1), leases_renewed_at=5.0), 0)
    if recent != "a live rank":
        members = dead(members, 1)
    for rank in (0, 1):
        members = membership.update(members, rank, replace(members.table[rank], named_at=10.0))
    if recent == "leases_renewed_at":
        members = replace(members, leases_renewed_at=10.1)
    elif recent in ("received_at", "named_at"):
        members = membership.update(members, 1, replace(members.table[1], **{recent: 10.1}))  # type: ignore[arg-type]
    assert membership.only_lost_nodes(members, now, SETTINGS) is (recent == "")


def test_a_clock_that_goes_back_has_received_nothing_in_the_future() -> None:
    """What was before the moment to which it went back stays, and all leases begin anew."""
    early, late = {"received_at": 8.0, "vouched": 7.0, "named_at": 6.0}, {"received_at": 20.0, "vouched": 21.0, "named_at": 22.0}  # fmt: skip
    times = (early, *({**early, name: late[name]} for name in late))
    members = attached(0, 1, 2, 3)
    for rank, of in enumerate(times):
        members = membership.update(members, rank, replace(members.table[rank], **of))  # type: ignore[arg-type]
    after = membership.clock_went_back(members, 10.0, SETTINGS)
    for rank, of in enumerate(times):
        known = after.table[rank]
        found = {"received_at": known.received_at, "vouched": known.vouched, "named_at": known.named_at}
        assert found == {name: min(moment, 10.0) for name, moment in of.items()}
    assert (after.leases_renewed_at, after.away_until, after.sweep_at) == (10.0, 10.0, 12.0)
    assert after.table[0] is members.table[0]
