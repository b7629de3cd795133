"""Machines that are wrong on purpose about what belongs together: of two orders one is forgotten, of two freezes the older one
counts, of what a lost controller knew a part does not come to the next. Undone with the patch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.wrong_controllers import Reports, Verdict, _count_late, with_decide
from ttp.controller.core import stages
from ttp.controller.core.dump import finish, reassign, roll_forward, writing
from ttp.controller.core.dump import freeze as rounds
from ttp.controller.core.facts.decision import decide
from ttp.controller.core.facts.incident import report
from ttp.controller.core.facts.state import Writing
from ttp.controller.core.ranks import takeover
from ttp.controller.core.transitions import TABLES
from ttp.processor.core import freezes
from ttp.processor.core import transitions as rank_tables
from ttp.processor.core.state import RankMode
from ttp.proto.messages import Cause, CauseKind, Freeze, Published, Thaw, Written

Patch = pytest.MonkeyPatch


# --- two orders ---


def second_order_is_lost_with_its_writer(patch: Patch) -> None:
    """Only what a writer owes under its first order is given to others."""
    replace_writers = writing.replace_writers

    def wrong(state: Any, lost: tuple[int, ...], now: float, out: Any) -> Any:
        dump = state.dump
        first = {rank: replace(dump.work[rank], orders=dump.work[rank].orders[:1]) for rank in lost}
        dropped = sum(len(dump.work[rank].orders[1:]) for rank in lost)
        known = replace(dump, work=dump.work.put_all(first), pending=dump.pending - dropped)
        return replace_writers(state.with_dump(known), lost, now, out)

    for module in (writing, reassign):
        patch.setattr(module, "replace_writers", wrong)


def repeated_answer_settles_another_order(patch: Patch) -> None:
    """An answer is known by its staging directory's name, whatever parts it is about."""
    written = writing.written

    def wrong(state: Any, answer: Any, now: float, out: Any) -> Any:
        same = [order for order in state.dump.work[answer.rank].orders if order.tmp_name == answer.tmp_name]
        return written(state, replace(answer, parts=same[0].parts) if same else answer, now, out)

    patch.setitem(TABLES[Writing].on, Written, wrong)


# --- two freezes ---


def older_freeze_is_obeyed(patch: Patch) -> None:
    """A rank goes back to its number, and messages of the newer one's controller are not meant for it any more."""
    freeze = freezes.freeze

    def wrong(state: Any, message: Freeze, now: float, out: Any) -> Any:
        older = message.freeze_id < state.freeze_id
        return freeze(replace(state, freeze_id=message.freeze_id - 1) if older else state, message, now, out)

    _for_every(patch, rank_tables.TRANSITIONS, Freeze, freeze, wrong)


def older_thaw_is_obeyed(patch: Patch) -> None:
    """It opens the gate that a newer freeze has closed."""
    thaw = freezes.thaw

    def wrong(state: Any, message: Thaw, now: float, out: Any) -> Any:
        newest = max(state.freeze_id, message.freeze_id)
        return thaw(state, replace(message, freeze_id=newest), now, out)

    _for_every(patch, rank_tables.TRANSITIONS, Thaw, thaw, wrong)


def _for_every(patch: Patch, table: Any, kind: type, right: Any, wrong: Any) -> None:
    for (standing, of), handler in list(table.items()):
        if of is kind and handler is right:
            patch.setitem(table, (standing, of), wrong)


def published_of_an_earlier_freeze_counts(patch: Patch) -> None:
    """What a place had published of a staging directory that was given up is taken for its part of this one."""
    _count_late(patch, Published)


def rolls_are_waited_for_from_the_fault_on(patch: Patch) -> None:
    """A long freeze leaves the ranks that roll forward no time."""
    order_rolls = roll_forward._order_rolls

    def wrong(state: Any, verdict: Any, now: float, out: Any) -> Any:
        state = order_rolls(state, verdict, now, out)
        by = state.fault.began + state.settings.progress_timeout_s
        return state.with_dump(replace(state.dump, progress_by=by))

    patch.setattr(roll_forward, "_order_rolls", wrong)


def torn_ranks_local_copy_counts(patch: Patch) -> None:
    """And so does its torn state, under the number of the step before."""

    def wrong(groups: Any, reports: Reports, *rest: Any) -> Verdict:
        kept = {r: replace(report, torn=report.torn and report.backup_step < 0) for r, report in reports.items()}
        return decide(groups, kept, *rest)

    with_decide(patch, wrong)


# --- two controllers ---


def _takes_over_knowing(patch: Patch, known: Any) -> None:
    """Of the causes with which a takeover begins, a standby knows only some."""

    def wrong(state: Any, causes: tuple[Cause, ...], *rest: Any, **options: Any) -> Any:
        return rounds.begin_fault(state, tuple(cause for cause in causes if known(state, cause)), *rest, **options)

    patch.setattr(takeover, "begin_fault", wrong)


def reported_faults_are_forgotten_at_a_takeover(patch: Patch) -> None:
    """The rank that raised is thawed with the others, and training stops there. It does not report its fault again when it is thawed:
    that would heal the mistake, at the price of one thaw and one freeze more."""
    _takes_over_knowing(patch, lambda state, cause: cause not in state.at.early)
    row = (RankMode.FROZEN, Thaw)
    thaw = rank_tables.TRANSITIONS[row]

    def wrong(state: Any, *rest: Any) -> Any:
        return replace(thaw(replace(state, faults=()), *rest), faults=state.faults)

    patch.setitem(rank_tables.TRANSITIONS, row, wrong)


def ranks_that_never_came_are_not_causes(patch: Patch) -> None:
    """All that came are thawed, and train without the others."""

    def known(state: Any, cause: Cause) -> bool:
        return state.members.table[cause.ranks[0]].registration is not None

    _takes_over_knowing(patch, known)


def a_dump_is_gone_on_with_when_all_had_begun_it(patch: Patch) -> None:
    """One rank that was only frozen is reason enough to open all gates, those that can never be opened as well."""
    judge = takeover.decide_takeover

    def wrong(state: Any, now: float, out: Any) -> Any:
        changed: Any = judge(state, now, out)
        alive = state.members.table.ranks(lambda member: member.dead is None)
        begun = [cause for cause in changed.fault.causes if cause.kind is CauseKind.CONTROLLER_LOST]
        return state if begun and len(begun[0].ranks) < len(alive) else changed

    patch.setattr(stages, "decide_takeover", wrong)


# --- what is reported of a fault ---


def refused_faults_are_not_reported(patch: Patch) -> None:
    """Only a fault that was saved has an incident."""

    def wrong(state: Any, outcome: Any, now: float, out: Any) -> Any:
        return report(state, outcome, now, out) if outcome.saved is not None else state

    patch.setattr(finish, "report", wrong)


def steps_before_the_saved_one_count_as_lost(patch: Patch) -> None:
    """The report counts from the step before the one that was saved."""

    def wrong(state: Any, outcome: Any, now: float, out: Any) -> Any:
        if outcome.saved is not None:
            outcome = replace(outcome, kept_step=outcome.saved.step - 1)
        return report(state, outcome, now, out)

    patch.setattr(finish, "report", wrong)


def checkpoints_of_an_earlier_round_are_forgotten(patch: Patch) -> None:
    """Who had reported one may have died since."""
    ask = rounds._ask
    patch.setattr(rounds, "_ask", lambda state, *rest: ask(replace(state, checkpoint=""), *rest))
