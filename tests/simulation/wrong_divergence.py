"""Machines that are wrong on purpose about replicas that differ: who counts as wrong, and what is done with one. Undone with the patch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.comparing import Comparing
from ttp.controller.core.dump import regroup, roll_forward, writing
from ttp.controller.core.facts.coverage import Group
from ttp.controller.core.facts.divergence import Dispute, judge
from ttp.controller.core.facts.events import Journal
from ttp.controller.core.facts.state import EDGES, Regrouping, Writing, goto
from ttp.processor.gate import Gate

Patch = pytest.MonkeyPatch


def digests_are_not_looked_at(patch: Patch) -> None:
    """A step of which replicas differ is saved, or trained on from, as any other."""
    patch.setattr(roll_forward, "judge", lambda groups, reports: Dispute())
    patch.setattr(roll_forward, "_disputed", lambda state, reports: None)


def first_of_two_is_right(patch: Patch) -> None:
    """Half of the holders are enough."""

    def wrong(groups: Any, reports: Any) -> Dispute:
        found = judge([replace(group, holders=group.holders[:1]) for group in groups], reports)
        others = {
            rank
            for group in groups
            for rank in group.holders[1:]
            if rank in reports
            and _digest(reports, rank, group) not in (None, _digest(reports, group.holders[0], group))
        }
        return replace(found, wrong=found.wrong | others, undecided=())

    patch.setattr(roll_forward, "judge", wrong)


def _digest(reports: Any, rank: int, group: Group) -> int | None:
    report = reports.get(rank)
    found = [one.value for one in report.digests if one.group_id == group.group_id] if report is not None else []
    return found[0] if found else None


def majority_of_those_that_report(patch: Patch) -> None:
    """Holders that are dead do not count: of two that remain of three, the first one is believed."""

    def wrong(groups: Any, reports: Any) -> Dispute:
        reports = {
            rank: replace(report, digests=tuple(replace(digest, holders=1) for digest in report.digests))
            for rank, report in reports.items()
        }
        living = [replace(group, holders=tuple(r for r in group.holders if r in reports)) for group in groups]
        found = judge(living, reports)
        if found.undecided:
            rest = [replace(group, holders=group.holders[:1]) for group in living if group.holders]
            kept = {rank: report for rank, report in reports.items() if any(rank in g.holders for g in rest)}
            return judge(rest, kept)
        return found

    patch.setattr(roll_forward, "judge", wrong)


def holders_that_never_came_do_not_count(patch: Patch) -> None:
    """A controller that took over counts the holders that it knows."""

    def wrong(groups: Any, reports: Any) -> Dispute:
        few = {
            rank: replace(report, digests=tuple(replace(digest, holders=1) for digest in report.digests))
            for rank, report in reports.items()
        }
        return judge(groups, few)

    patch.setattr(roll_forward, "judge", wrong)


def wrong_replica_stays(patch: Patch) -> None:
    """It is known who is wrong, and nothing follows."""
    patch.setattr(roll_forward, "_judged", lambda state, fault, out: fault)


def wrong_replica_writes(patch: Patch) -> None:
    """Who is wrong is replaced where that is possible, and else writes its share."""

    def able(state: Any) -> frozenset[int]:
        return frozenset(roll_forward.able_holders(state) | state.at.fault.wrong)

    patch.setattr(writing, "able_holders", able)


def repaired_without_being_asked(patch: Patch) -> None:
    """The ranks have asked for an end."""
    patch.setattr(roll_forward, "_repairs", lambda state: True)


def right_replica_is_replaced(patch: Patch) -> None:
    """The majority is taken for the one that is wrong."""

    def wrong(groups: Any, reports: Any) -> Dispute:
        found = judge(groups, reports)
        reporting = {rank for rank, report in reports.items() if report.digests}
        return replace(found, wrong=frozenset(sorted(reporting - found.wrong)[:1])) if found.wrong else found

    patch.setattr(roll_forward, "judge", wrong)


def digests_pass_a_closed_gate(patch: Patch) -> None:
    """A rank whose gate is closed, and whose report had none, gives them to the others all the same."""

    def wrong(gate: Any, step: int, digests: Any) -> None:
        gate._digests = digests

    patch.setattr(Gate, "dispute", wrong)


def digests_are_not_reported(patch: Patch) -> None:
    def wrong(gate: Any, step: int, digests: Any) -> None:
        if not gate.regroups:
            gate._pass()
            gate._release()

    patch.setattr(Gate, "dispute", wrong)


def holder_without_a_digest_stays(patch: Patch) -> None:
    """Two of three prove what is right, and the third, which has reported nothing, counts as before."""
    patch.setattr(roll_forward, "judge", lambda groups, reports: replace(judge(groups, reports), unproven=frozenset()))


def written_without_being_asked_again(patch: Patch) -> None:
    """What the ranks have found of their replicas as they regrouped is not asked for."""

    def wrong(state: Any, reason: str, now: float, out: Any) -> Any:
        out.append(Journal("regroup_failed", {"freeze_id": state.freeze_id, "reason": reason}))
        return writing.start_writing(goto(state, Writing(state.at.fault, state.at.dump)), now, out)

    edges: Any = EDGES
    patch.setitem(edges, (Regrouping, Writing), "wrong")
    patch.setattr(regroup, "ask_again", wrong)


def fills_are_not_disputed(patch: Patch) -> None:
    """A fill shows that replicas differ, and no rank reports what it holds."""
    patch.setattr(Comparing, "dispute_filled", lambda comparing, process, step, differing: None)


def digests_of_a_fill_pass_a_later_freeze(patch: Patch) -> None:
    """A rank that was asked again as it regrouped, and whose report had none, gives them to the others all the same."""
    plain = Gate.dispute

    def wrong(gate: Any, step: int, digests: Any) -> None:
        gate.regroups = gate.regroups and gate.freeze_id
        plain(gate, step, digests)

    patch.setattr(Gate, "dispute", wrong)
