"""Machines that are wrong on purpose about recovering without a checkpoint: when it is tried, when gates open, and what remains for the
checkpoint if it fails. Undone with the patch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.agents import Agent
from tests.simulation.in_place import InPlace, Replacements
from tests.simulation.in_place import Regrouping as TrainingThread
from tests.simulation.job import Job
from tests.simulation.threads import Threads
from tests.simulation.wrong_controllers import Reports, Verdict, _with_advance, with_decide
from tests.simulation.wrong_memories import _for_every
from ttp.controller.core import stages
from ttp.controller.core.dump import publishing, regroup, roll_forward
from ttp.controller.core.facts.decision import decide
from ttp.controller.core.facts.events import Send
from ttp.controller.core.facts.state import Regrouping
from ttp.controller.core.ranks import takeover
from ttp.controller.core.transitions import TABLES
from ttp.processor.core import freezes, orders, refusals
from ttp.processor.core import transitions as rank_tables
from ttp.processor.core.events import GateClosed, RegroupDone
from ttp.processor.core.state import RankMode
from ttp.processor.gate import Gate
from ttp.processor.worker import Tasks
from ttp.proto.messages import CauseKind, Regroup, Replace, Thaw, WriteOrder

Patch = pytest.MonkeyPatch


# --- when it is tried ---


def last_holder_is_ended(patch: Patch) -> None:
    """It is not looked at whether a shard keeps a holder."""
    why_not = regroup._why_not

    def wrong(state: Any, now: float) -> str:
        return why_not(replace(state, coverage=replace(state.coverage, groups=())), now)

    patch.setattr(regroup, "_why_not", wrong)


def process_is_ended_that_holds_a_shard(patch: Patch) -> None:
    """A rank that has raised is replaced although its state is whole."""
    able_holders = roll_forward.able_holders

    def wrong(state: Any) -> frozenset[int]:
        raised = {rank for cause in state.at.fault.causes if cause.kind is CauseKind.EXCEPTION for rank in cause.ranks}
        return frozenset(able_holders(state) - raised)

    patch.setattr(regroup, "able_holders", wrong)
    patch.setattr(regroup, "_why_not_replaced", lambda state, rank, seated: "")


def recoveries_at_one_step_never_end(patch: Patch) -> None:
    patch.setattr(regroup, "MOST_AT_A_STEP", 10**9)


def regroups_before_the_step_is_published(patch: Patch) -> None:
    regroup_or_write = regroup.regroup_or_write

    def wrong(state: Any, now: float, out: Any) -> Any:
        return regroup_or_write(replace(state, settings=replace(state.settings, publish_first=False)), now, out)

    patch.setattr(stages, "regroup_or_write", wrong)


def published_step_is_forgotten_while_all_regroup(patch: Patch) -> None:
    start = regroup._start

    def wrong(state: Any, now: float, out: Any) -> Any:
        return start(state.with_dump(replace(state.at.dump, saved=None)), now, out)

    patch.setattr(regroup, "_start", wrong)


def published_step_is_forgotten_behind_a_recovery(patch: Patch) -> None:
    """A controller names what ranks have reported, and not what it had published itself."""
    patch.setattr(publishing, "learn_checkpoint", lambda state, path: state)


# --- when gates open ---


def gates_open_before_all_have_regrouped(patch: Patch) -> None:
    """The first answer is enough, once every replacement has come."""
    end = regroup.end_regrouping

    def wrong(state: Any, now: float, out: Any) -> Any:
        at = state.at
        enough = not at.awaited and len(at.pending) < state.settings.world_size
        return end(replace(state, at=replace(at, pending=frozenset())) if enough else state, now, out)

    _with_advance(patch, Regrouping, wrong)


def deaths_while_all_regroup_are_not_noticed(patch: Patch) -> None:
    def wrong(state: Any, rank: int, now: float, out: Any) -> Any:
        return state

    patch.setitem(TABLES, Regrouping, replace(TABLES[Regrouping], rank_lost=wrong))


def fills_are_not_compared(patch: Patch) -> None:
    init = InPlace.__init__

    def wrong(self: InPlace, *rest: Any) -> None:
        init(self, *rest)
        self.fills_are_compared = False

    patch.setattr(InPlace, "__init__", wrong)


def training_is_entered_before_the_gate_opens(patch: Patch) -> None:
    patch.setattr(Gate, "await_open", lambda self: None)


def old_turn_goes_on_in_the_new_generation(patch: Patch) -> None:
    """What the training thread had begun before it left its training is gone on with."""
    patch.setattr(Threads, "_if_in_turn", lambda self, turn, call: call())


def half_way_is_not_reported_as_final(patch: Patch) -> None:
    """A rank that regroups, or is vacant, reports to a new controller like one that was only frozen, and it is not looked at who has begun what."""
    patch.setattr(takeover, "begun", lambda process: 0)
    closed = freezes.gate_closed

    def wrong(state: Any, event: GateClosed, now: float, out: Any) -> Any:
        whole = closed(replace(state, regrouping=None, vacant=False), event, now, out)
        return replace(whole, regrouping=state.regrouping, vacant=state.vacant)

    _for_every(patch, rank_tables.TRANSITIONS, GateClosed, closed, wrong)


def half_way_rank_obeys_a_thaw(patch: Patch) -> None:
    """Nor does it report that its gate cannot open."""
    half_way_is_not_reported_as_final(patch)
    thaw = freezes.thaw

    def wrong(state: Any, message: Thaw, now: float, out: Any) -> Any:
        return thaw(replace(state, regrouping=None, vacant=False), message, now, out)

    _for_every(patch, rank_tables.TRANSITIONS, Thaw, thaw, wrong)


def rolled_ranks_are_not_asked_to_regroup(patch: Patch) -> None:
    """Those that have rolled forward hold the step, and stay where they are: behind a gate that does not open again."""
    start = regroup._start

    def wrong(state: Any, now: float, out: Any) -> Any:
        rolled = frozenset(state.dump.decision.roll_forward)
        state = start(state, now, out)
        for place, effect in enumerate(out):
            if isinstance(effect, Send) and isinstance(effect.message, Regroup):
                out[place] = replace(effect, ranks=tuple(rank for rank in effect.ranks if rank not in rolled))
        return replace(state, at=replace(state.at, pending=state.at.pending - rolled))

    patch.setattr(regroup, "_start", wrong)


# --- what remains for the checkpoint ---


def vacant_rank_counts_as_a_holder(patch: Patch) -> None:
    """A replacement that holds nothing yet counts for the newest step, and writes."""

    def wrong(groups: Any, reports: Reports, *rest: Any) -> Verdict:
        newest = max((report.state_step for report in reports.values() if report.closed and not report.torn), default=0)
        kept = {
            rank: replace(report, torn=False, state_step=newest) if report.torn else report
            for rank, report in reports.items()
        }
        return decide(groups, kept, *rest)

    with_decide(patch, wrong)
    why_no_order = refusals.why_no_order
    patch.setattr(orders, "why_no_order", lambda state, order: why_no_order(replace(state, vacant=False), order))
    patch.setattr(Tasks, "_not_writable", lambda self, order: "")


def write_order_is_lost_while_a_rank_regroups(patch: Patch) -> None:
    write = orders.write

    def wrong(state: Any, message: WriteOrder, now: float, out: Any) -> Any:
        return state if state.regrouping is not None else write(state, message, now, out)

    _for_every(patch, rank_tables.TRANSITIONS, WriteOrder, write, wrong)


# --- what belongs together ---


def faults_are_forgotten_when_a_rank_has_regrouped(patch: Patch) -> None:
    done = orders.regroup_done

    def wrong(state: Any, event: RegroupDone, now: float, out: Any) -> Any:
        return replace(done(state, event, now, out), faults=())

    patch.setitem(rank_tables.TRANSITIONS, (RankMode.FROZEN, RegroupDone), wrong)


def orders_are_forgotten_when_a_rank_has_regrouped(patch: Patch) -> None:
    """Also those that came while its groups were made."""
    done = orders.regroup_done

    def wrong(state: Any, event: RegroupDone, now: float, out: Any) -> Any:
        return done(replace(state, ordered=0), event, now, out)

    patch.setitem(rank_tables.TRANSITIONS, (RankMode.FROZEN, RegroupDone), wrong)


def ranks_regroup_beside_their_work(patch: Patch) -> None:
    """Whatever they were ordered to write or to publish, and have not answered."""
    why_no_regroup = refusals.why_no_regroup
    patch.setattr(
        orders, "why_no_regroup", lambda state, order: why_no_regroup(replace(state, orders=(), ordered=0), order)
    )


def order_to_regroup_is_not_said_again(patch: Patch) -> None:
    """It comes once to those that stay, and once to a replacement."""
    open_order = regroup.open_order

    def wrong(state: Any, rank: int) -> Any:
        replaced = isinstance(state.at, Regrouping) and rank in state.dump.regroup.replaced
        return open_order(state, rank) if replaced else ()

    patch.setattr(regroup, "open_order", wrong)


def training_that_has_returned_is_entered_again(patch: Patch) -> None:
    """A training thread that was to leave its step, and has returned from its training meanwhile, regroups with the others."""
    leave = TrainingThread._leave

    def wrong(self: TrainingThread, order: Regroup) -> None:
        self._process.returned = False
        leave(self, order)

    patch.setattr(TrainingThread, "_leave", wrong)


def agents_repeat_the_exit_of_a_replaced_process(patch: Patch) -> None:
    patch.setattr(Agent, "replaced", lambda self, rank: None)


def silent_process_is_ended_before_the_step_is_on_disk(patch: Patch) -> None:
    regroup_or_write = regroup.regroup_or_write

    def wrong(state: Any, now: float, out: Any) -> Any:
        if not state.settings.publish_first and regroup._is_possible(state, now, out):
            return regroup._start(state, now, out)
        return regroup_or_write(state, now, out)

    patch.setattr(stages, "regroup_or_write", wrong)


def silent_process_is_replaced_and_runs_on(patch: Patch) -> None:
    """Its agent starts another one in its place, and does not end it."""
    start = Replacements._start

    def started_beside(self: Replacements, order: Replace, fails: bool) -> None:
        with pytest.MonkeyPatch.context() as only_now:
            only_now.setattr(Job, "kill", lambda *_: None)
            start(self, order, fails)

    patch.setattr(Replacements, "_start", started_beside)
