"""Controllers that are wrong on purpose: each function breaks one rule of the shipped machine, until the patch is undone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from tests.simulation.controllers import Controller
from tests.simulation.repetition import repeats_nothing
from tests.simulation.standbys import Standbys
from ttp.controller.core import machine, stages
from ttp.controller.core import transitions as tables
from ttp.controller.core.dump import freeze, publishing, roll_forward, writing
from ttp.controller.core.dump.finish import refuse
from ttp.controller.core.dump.publishing import start_publishing
from ttp.controller.core.facts import membership
from ttp.controller.core.facts import pace as progress
from ttp.controller.core.facts.answers import is_late
from ttp.controller.core.facts.coverage import Coverage, coverage_of
from ttp.controller.core.facts.decision import Decision, Refusal, decide
from ttp.controller.core.facts.events import Effect, Send
from ttp.controller.core.facts.planning import hand_over, share_out
from ttp.controller.core.facts.state import (
    AnyStage,
    Assembling,
    ControllerState,
    Freezing,
    Gathering,
    Publishing,
    Rolling,
    Running,
    StateAt,
    Writing,
    goto,
)
from ttp.controller.core.ranks import liveness, stall, takeover
from ttp.controller.core.ranks.liveness import welcome
from ttp.processor.core import orders
from ttp.processor.gate import Gate
from ttp.processor.worker import Tasks
from ttp.proto.messages import (
    Cause,
    CauseKind,
    CommitRecord,
    Phase,
    Progress,
    PublishOrder,
    RollForward,
    StandbyList,
    StateReport,
    StepFailed,
    Thaw,
)

Patch = pytest.MonkeyPatch
Reports = Mapping[int, StateReport]
Records = Mapping[int, CommitRecord]
Verdict = Decision | Refusal


def _with_advance(patch: Patch, stage: type[AnyStage], wrong: Callable[..., ControllerState]) -> None:
    """Go on from a stage in another way."""
    patch.setitem(tables.TABLES, stage, replace(tables.TABLES[stage], advance=wrong))


def _count_late(patch: Patch, kind: type) -> None:
    """Answers of this kind to an older freeze mean what they say."""
    patch.setattr(machine, "is_late", lambda state, message: not isinstance(message, kind) and is_late(state, message))


def with_decide(patch: Patch, wrong: Callable[..., Verdict]) -> None:
    patch.setattr(roll_forward, "decide", wrong)


# --- who is a holder, and of what ---


def torn_counts(patch: Patch) -> None:
    def wrong(groups: Any, reports: Reports, *rest: Any) -> Verdict:
        return decide(groups, {r: replace(report, torn=False) for r, report in reports.items()}, *rest)

    with_decide(patch, wrong)


def stuck_counts(patch: Patch) -> None:
    def wrong(groups: Any, reports: Reports, *rest: Any) -> Verdict:
        return decide(groups, {r: replace(report, closed=True) for r, report in reports.items()}, *rest)

    with_decide(patch, wrong)
    patch.setattr(Tasks, "_not_writable", lambda self, order: "")  # the work thread would refuse it


def step_of_a_dead_rank(patch: Patch) -> None:
    """The dead rank's last heartbeat was one step ahead of the survivors: none of them can write that step."""

    def wrong(groups: Any, reports: Reports, *rest: Any) -> Verdict:
        verdict = decide(groups, reports, *rest)
        if isinstance(verdict, Refusal) or len(reports) == max(max(g.holders) for g in groups) + 1:
            return verdict
        return Decision(verdict.step + 1, None, (), verdict.able)

    with_decide(patch, wrong)


def one_axis_of_coverage(patch: Patch) -> None:
    """Of every pipeline stage but the first, the shards are taken for copies of the first one's."""

    def wrong(registrations: Iterable[Any], world_size: int = 0) -> Coverage:
        coverage = coverage_of(registrations, world_size)
        first = min((group.holders[0] for group in coverage.groups), default=0)
        return replace(coverage, groups=tuple(g for g in coverage.groups if (g.holders[0] - first) % 2 == 0))

    for module in (stages, takeover):
        patch.setattr(module, "coverage_of", wrong)


# --- which step ---


def invented_record(patch: Patch) -> None:
    def wrong(groups: Any, reports: Reports, records: Records, *rest: Any) -> Verdict:
        ready = [report.step for report in reports.values() if report.phase is Phase.READY]
        invented = {step: CommitRecord(step, 1.0, 1.0, False, 1.0, (0.1,), ()) for step in ready}
        return decide(groups, reports, {**invented, **records}, *rest)

    with_decide(patch, wrong)


def forgotten_records(patch: Patch) -> None:
    with_decide(patch, lambda groups, reports, records, *rest: decide(groups, reports, {}, *rest))


def records_of_the_decided_round_only(patch: Patch) -> None:
    """The report of a rank in an earlier round, after which it died, is forgotten."""
    merge = freeze._merge
    patch.setattr(freeze, "_merge", lambda records, report, out: merge((), report, out))


def rolls_who_is_not_ready(patch: Patch) -> None:
    def wrong(groups: Any, reports: Reports, *rest: Any) -> Verdict:
        claimed = {r: replace(report, phase=Phase.READY, step=report.state_step + 1) for r, report in reports.items()}
        return decide(groups, claimed, *rest)

    with_decide(patch, wrong)

    def begins(self: Gate, record: CommitRecord) -> None:
        self._acquire(timeout=1.0)
        self._freezes.final, self._phase = True, Phase.UPDATING

    patch.setattr(Gate, "start_roll_forward", begins)


def record_of_an_older_step(patch: Patch) -> None:
    """The order has the right number, and everything else of the step before."""

    def wrong(freeze_id: int, record: CommitRecord) -> RollForward:
        factor, rates = 0.5 / max(1, record.step - 1), (0.1 / max(1, record.step - 1),)
        return RollForward(freeze_id, replace(record, clip_factor=factor, learning_rates=rates))

    patch.setattr(roll_forward, "RollForward", wrong)


def refuses_when_somebody_is_missing(patch: Patch) -> None:
    def wrong(groups: Any, reports: Reports, *rest: Any) -> Verdict:
        for group in groups:
            if gone := [rank for rank in group.holders if rank not in reports]:
                return Refusal(f"{group.label}: rank {gone[0]} is gone", (group.label,))
        return decide(groups, reports, *rest)

    with_decide(patch, wrong)


def rolls_only_the_first(patch: Patch) -> None:
    """One of the ranks that must roll forward is asked to; all are counted as having the step."""

    def wrong(groups: Any, reports: Reports, *rest: Any) -> Verdict:
        verdict = decide(groups, reports, *rest)
        return replace(verdict, roll_forward=verdict.roll_forward[:1]) if isinstance(verdict, Decision) else verdict

    with_decide(patch, wrong)


# --- writing and publishing ---


def publishes_before_all_is_written(patch: Patch) -> None:
    _with_advance(patch, Writing, lambda state, now, out: start_publishing(state, now, out))


def publishes_as_an_older_step(patch: Patch) -> None:
    """And the ranks, which would refuse such an order, believe it."""

    def wrong(*, step: int, **rest: Any) -> PublishOrder:
        return PublishOrder(step=max(1, step - 1), **rest)

    patch.setattr(publishing, "PublishOrder", wrong)
    _believe_orders(patch)


def _believe_orders(patch: Patch) -> None:
    patch.setattr(orders, "why_no_order", lambda state, order: "")


def lost_writers_answer_counts(patch: Patch) -> None:
    def wrong(parts: Any, holders: Any, loads: Any) -> Any:
        given = hand_over(parts, holders, loads)
        twice = tuple(parts) * 2  # the lost writer's answer and the new writer's
        return given and {rank: twice if rank == min(given) else mine for rank, mine in given.items()}

    patch.setattr(writing, "hand_over", wrong)


def shard_written_twice(patch: Patch) -> None:
    """The last part of the plan goes to one holder more."""

    def wrong(groups: Any, able: Iterable[int]) -> Any:
        groups, able = tuple(groups), tuple(able)
        plan, largest = share_out(groups, able)
        for group in groups:
            for rank in set(group.holders).intersection(able):
                for other, parts in plan.items():
                    mine = [part for part in parts if part.group_id == group.group_id]
                    if mine and other != rank:
                        return {**plan, rank: (*plan.get(rank, ()), mine[-1])}, largest
        return plan, largest

    patch.setattr(writing, "share_out", wrong)


def lost_writers_parts_are_dropped(patch: Patch) -> None:
    patch.setattr(writing, "hand_over", lambda parts, holders, loads: {})


def publishes_an_older_record(patch: Patch) -> None:
    """The manifest gets the oldest record that any rank reported, and the ranks, which would refuse it, believe it."""
    _believe_orders(patch)

    def wrong(state: StateAt[Writing], now: float, out: list[Effect]) -> ControllerState:
        dump, fault = state.at.dump, state.at.fault
        if dump.pending:
            return state
        decision = replace(dump.decision, record=fault.records[0] if fault.records else None)
        return start_publishing(state.with_dump(replace(dump, decision=decision)), now, out)

    _with_advance(patch, Writing, wrong)


def failed_publisher_is_not_replaced(patch: Patch) -> None:
    patch.setattr(publishing, "replace_publishers", lambda state, ranks, now, out: _waiting(state))


def _waiting(state: Any) -> Any:
    return state.with_dump(replace(state.dump, progress_by=inf, patience_until=inf))


def one_ranks_disk_vetoes_the_directory(patch: Patch) -> None:
    """When a write fails, no other rank writes there either."""
    replace_writers = writing.replace_writers

    def wrong(state: Any, lost: tuple[int, ...], now: float, out: list[Effect]) -> ControllerState:
        if state.dump.failed_here.isdisjoint(lost) or state.settings.local_dirs:
            return replace_writers(state, lost, now, out)
        return writing.next_directory(state, now, out)

    patch.setattr(writing, "replace_writers", wrong)


def working_renews_nothing(patch: Patch) -> None:
    """Only an answer proves that an order is carried out."""
    for stage in (Rolling, Writing, Publishing):
        patch.setitem(tables.TABLES[stage].on, Progress, tables.noted)


def new_process_is_taken_for_the_old(patch: Patch) -> None:
    """A rank that registers with another pid is only there again."""
    die = liveness.rank_died

    def wrong(state: ControllerState, rank: int, cause: Cause, *rest: Any) -> ControllerState:
        return state if "was replaced by" in cause.text else die(state, rank, cause, *rest)

    patch.setattr(liveness, "rank_died", wrong)


def launchers_never_learn_of_the_standbys(patch: Patch) -> None:
    """They receive the lease, and no address."""
    patch.setattr(liveness, "StandbyList", lambda addresses, lease_s: StandbyList((), lease_s))


def beats_renew_no_lease(patch: Patch) -> None:
    """Heartbeats that come in one envelope prove no rank's life, unless one is suspected already."""
    note_messages = membership.note_messages

    def wrong(members: membership.Membership, ranks: Iterable[int], now: float) -> membership.Membership | None:
        return None if note_messages(members, ranks, now) is None else members

    patch.setattr(machine, "note_messages", wrong)


def pauses_are_ignored(patch: Patch) -> None:
    """A rank that reports that it does something else counts as one that does not progress."""
    advance = progress.advance
    patch.setattr(stall, "advance", lambda pace, beat, *rest: advance(pace, replace(beat, paused=False), *rest))


# --- reports, suspicions, thaws ---


def old_reports_count(patch: Patch) -> None:
    """A report of an earlier freeze is taken for one of this; the rank may have trained since."""

    def wrong(state: Any, message: StateReport, now: float, out: Any) -> Any:
        return freeze.take_report(state, replace(message, freeze_id=state.freeze_id), out)

    _count_late(patch, StateReport)
    for stage in (Freezing, Rolling, Writing, Publishing):
        patch.setitem(tables.TABLES[stage].on, StateReport, wrong)


def decides_without_all_reports(patch: Patch) -> None:
    """Who has not reported yet is left out."""
    ask = freeze._ask

    def wrong(*arguments: Any) -> Any:
        state: Any = ask(*arguments)
        return state.with_fault(replace(state.fault, awaiting=min(1, state.fault.awaiting)))

    patch.setattr(freeze, "_ask", wrong)


def thaws_some(patch: Patch) -> None:
    repeats_nothing(patch)

    def wrong(ranks: tuple[int, ...], message: Any) -> Send:
        return Send(ranks[:-1] if isinstance(message, Thaw) else ranks, message)

    patch.setattr(freeze, "Send", wrong)


def who_never_began_is_welcomed_while_ranks_are_gathered(patch: Patch) -> None:
    welcomes = replace(tables.TABLES[Gathering], catch_up=lambda state, rank: (welcome(state, rank),))
    patch.setitem(tables.TABLES, Gathering, welcomes)


def never_sees_silence(patch: Patch) -> None:
    def wrong(members: Any, now: float, *rest: Any, **options: Any) -> membership.LeaseSweep:
        return membership.LeaseSweep(replace(members, sweep_at=float("inf")), (), ())

    patch.setattr(stages, "sweep_leases", wrong)


def suspicion_is_death(patch: Patch) -> None:
    def wrong(state: Any, rank: int, why: str, now: float, out: Any) -> Any:
        return liveness.rank_died(state, rank, Cause(CauseKind.SILENT, (rank,), why), False, now, out)

    for module in (liveness, stages):
        patch.setattr(module, "suspicion", wrong)


def one_lease_for_a_hang(patch: Patch) -> None:
    """The limit is not learned from the job's steps."""
    limit = progress.limit

    def wrong(pace: Any, hang: Any) -> float:
        return min(limit(pace, hang), 0.2)

    patch.setattr(progress, "limit", wrong)


def no_job_assembles(patch: Patch) -> None:
    """Training never begins: nothing bad can happen then."""
    _with_advance(patch, Assembling, lambda state, now, out: state)


def hang_without_proof(patch: Patch) -> None:
    """Nothing disproves a hang: a rank that progressed since is dumped all the same."""
    patch.setattr(stall, "_disproved", lambda state, rank, order, now, out: state)


# --- what is given up, and what not ---


def no_rank_is_passed_over(patch: Patch) -> None:
    """Slow work is waited for until the total time is over."""

    def wrong(state: Any, now: float, out: Any) -> Any:
        return state.with_dump(replace(state.dump, patience_until=inf))

    patch.setattr(stages, "pass_over", wrong)


def torn_file_costs_its_directory(patch: Patch) -> None:
    """Whose files are torn is not listened to."""
    publish_failed = publishing.publish_failed
    wrong: Any = lambda state, answer, now, out: publish_failed(state, replace(answer, torn=()), now, out)  # noqa: E731
    patch.setitem(tables.TABLES[Publishing].on, StepFailed, wrong)


def updates_are_not_waited_for(patch: Patch) -> None:
    patch.setattr(roll_forward, "_worth_waiting", lambda state, fault, now: ())


def no_older_step_is_tried(patch: Patch) -> None:
    """For a disk's sake the job does not go back to its local copies."""

    def wrong(state: Any, dump: Any, now: float, out: Any) -> Any:
        return refuse(state, Refusal("none of the directories could be written"), now, out)

    patch.setattr(writing, "_no_directory", wrong)


def a_leap_of_the_clock_counts_as_silence(patch: Patch) -> None:
    """Of a controller that receives nothing."""
    patch.setattr(machine, "controller_resumed", membership.renew_all_leases)


# --- takeovers ---


def takes_over_without_a_freeze(patch: Patch) -> None:
    repeats_nothing(patch)

    def wrong(state: Any, now: float, out: Any) -> Any:
        state = takeover.gather_ranks(state, now, out)
        if isinstance(state.at, Freezing) and not state.at.fault.causes:
            return goto(state, Running())
        return state

    _with_advance(patch, Gathering, wrong)


def thaws_what_another_ordered(patch: Patch) -> None:
    judge = takeover.decide_takeover

    def wrong(state: Any, now: float, out: Any) -> Any:
        changed: Any = judge(state, now, out)
        finals = changed.fault.causes and "had begun a dump" in changed.fault.causes[0].text
        return state if finals else changed

    patch.setattr(stages, "decide_takeover", wrong)


def freezes_counted_from_one(patch: Patch) -> None:
    patch.setattr(machine, "FREEZES_OF_A_TERM", 0)


def unknown_shards_forgotten(patch: Patch) -> None:
    start_dump = roll_forward.start_dump
    patch.setattr(stages, "start_dump", lambda state, now, out: start_dump(replace(state, job_groups=0), now, out))


def standbys_kept_secret(patch: Patch) -> None:
    """Not even the list in the store helps."""
    patch.setattr(Standbys, "look", lambda self, process: None)
    for module in (liveness, stages):
        patch.setattr(module, "welcome", lambda state, rank: replace(welcome(state, rank), successors=()))


def earlier_controller_keeps_its_ranks(patch: Patch) -> None:
    patch.setattr(Controller, "_supersede", lambda self, older, generation: None)
