"""From a decision to ranks that all hold the decided step (PURE).

Owns the decision's inputs and the roll-forward orders. A rank that fails or falls silent is left out; if the shards are
then no longer covered, the ranks are asked again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

from ttp.proto.frozen import replace
from ttp.proto.messages import Progress, RolledForward, RollForward, StateReport, StepFailed

from ..facts.coverage import Group, named
from ..facts.decision import Decision, Refusal, decide
from ..facts.divergence import judge
from ..facts.events import Effect, Fields, Journal, Send
from ..facts.incident import stage_ended
from ..facts.membership import SUSPECT_AFTER, alive_at, silent_since
from ..facts.pace import has_started
from ..facts.per_rank import PerRank
from ..facts.state import (
    ControllerState,
    Dump,
    Fault,
    Faulted,
    Freezing,
    Ordered,
    Rolling,
    S,
    StateAt,
    Work,
    goto,
)
from .finish import refuse, step_of
from .freeze import frozen_fields, half_of_the_rest, owes_report

_NAMED = 4


def start_dump(state: StateAt[Freezing], now: float, out: list[Effect]) -> ControllerState:
    """All reports are in, or the round's time is over: decide, and order the roll-forwards. Or wait for what no step is covered
    without: the end of an update, or the report of a silent rank that may still come back."""
    fault = _judged(state, state.at.fault, out)
    state = state.with_fault(fault)
    verdict = verdict_of(state, fault)
    if isinstance(verdict, Refusal) and (updating := _worth_waiting(state, fault, now)):
        return _wait_for_updates(state, fault, updating, now, out)
    if _is_less(verdict, fault) and now < (known_at := _known_at(state, fault, now)):
        return state.with_fault(replace(fault, round_deadline=known_at, updating=()))
    out.append(Journal("frozen", frozen_fields(state)))
    state = stage_ended(state, "frozen", now)
    if isinstance(verdict, Refusal):
        return refuse(state, _with_what_failed(fault, verdict), now, out)
    return _order_rolls(state, verdict, now, out)


def _judged(state: ControllerState, fault: Fault, out: list[Effect]) -> Fault:
    """Note the ranks that these reports prove wrong. Where the ranks have not asked for it none is."""
    if not _repairs(state):
        return fault
    wrong = judge(state.coverage.groups, _reports(state, fault)).wrong - fault.wrong
    if wrong:
        out.append(Journal("wrong_replicas", {"freeze_id": state.freeze_id, "ranks": tuple(sorted(wrong))}))
    return replace(fault, wrong=fault.wrong | wrong)


def _repairs(state: ControllerState) -> bool:
    """Say whether replicas that are proven wrong are done without. Every rank that has come says the same."""
    known = (member.registration for member in state.members.table if member.registration is not None)
    return all(registration.repairs for registration in known)


def _reports(state: ControllerState, fault: Fault) -> dict[int, StateReport]:
    """Return the reports of this round that count, by rank. Plain: this runs for every rank between the last report and the orders."""
    stuck = fault.stuck
    return {
        rank: report
        for rank, report, member in zip(range(len(fault.reports)), fault.reports, state.members.table, strict=True)
        if report is not None and member.dead is None and not member.suspect and rank not in stuck
    }


def _disputed(state: ControllerState, reports: Mapping[int, StateReport]) -> Refusal | None:
    """Refuse to write a step of which replicas differ, unless it is proven which of them are wrong, and the ranks have asked for that to be acted on."""
    if not any(report.digests for report in reports.values()):
        return None
    undecided = judge(state.coverage.groups, reports).undecided
    if undecided:
        more = f"; and {len(undecided) - _NAMED} more" if len(undecided) > _NAMED else ""
        return Refusal(f"replicas differ, and no majority of holders agrees: {'; '.join(undecided[:_NAMED])}{more}")
    return None if _repairs(state) else Refusal("replicas differ, and on_divergence='repair' was not asked for")


def _is_less(verdict: Decision | Refusal, fault: Fault) -> bool:
    """Say whether more might be saved: no step is covered, or, by local copies, only one before the newest that is known to be committed."""
    return isinstance(verdict, Refusal) or any(record.step > verdict.step for record in fault.records)


def verdict_of(state: ControllerState, fault: Fault, updating: tuple[int, ...] = ()) -> Decision | Refusal:
    """Decide from what was reported; `updating`: as if the updates of these ranks had ended."""
    if not state.coverage.groups:
        return Refusal("no rank registered any shards")
    unknown = state.job_groups - len(state.coverage.groups)
    if unknown > 0:  # a standby never learns of shards whose holders had all gone before it took over
        gone = named("rank", state.members.table.ranks(lambda member: member.registration is None))
        held = (
            f"{unknown} of {state.job_groups} shard groups were held only by ranks that never came to this controller"
        )
        return Refusal(f"no live rank can write: {held} ({gone})")
    reports = _reports(state, fault)
    if (disputed := _disputed(state, reports)) is not None:
        return disputed
    unproven = judge(state.coverage.groups, reports).unproven
    for rank in updating:
        report = fault.reports[rank]
        assert report is not None
        reports[rank] = replace(report, closed=True, state_step=report.step)
    if without := fault.wrong | unproven:
        reports = {rank: report for rank, report in reports.items() if rank not in without}
    records = {record.step: record for record in fault.records}
    groups, unwritable = state.coverage.groups, _unwritable(fault, reports)
    verdict = decide(groups, reports, records, fault.unreachable, None, unwritable)
    if isinstance(verdict, Refusal):  # written again, with every absent rank's fate: O(world) strings without a reader
        return decide(groups, reports, records, fault.unreachable, _absences(state, fault, unproven), unwritable)
    if unwritable and verdict.step <= step_of(state.checkpoint):
        return Refusal(f"step {verdict.step}, the newest with local copies, is not newer than {state.checkpoint}")
    return verdict


def _unwritable(fault: Fault, reports: Mapping[int, StateReport]) -> frozenset[int]:
    """Return the steps that no directory took and that no rank has reached since."""
    return frozenset(
        step
        for step, tried in fault.unwritable
        if not any(
            report.closed and not report.torn and report.state_step == step and rank not in tried
            for rank, report in reports.items()
        )
    )


def _with_what_failed(fault: Fault, refusal: Refusal) -> Refusal:
    """Say why no older step is written either, after what had kept the newer ones from being written."""
    if not fault.unwritable:
        return refusal
    steps = named("step", sorted(step for step, _ in fault.unwritable))
    reason = f"no directory took {steps} ({'; '.join(fault.errors[-4:])}), and then {refusal.reason}"
    return replace(refusal, reason=reason)


def _worth_waiting(state: StateAt[Freezing], fault: Fault, now: float) -> tuple[int, ...]:
    """Return the ranks whose update goes on behind the shut gate, if its end would cover a step that is not covered now.

    Where another holder has their shards nothing is waited for: one stuck rank never vetoes.
    """
    if now >= fault.update_by:
        return ()
    updating = tuple(
        report.rank
        for report in fault.reports
        if report is not None and not report.closed and not report.torn and is_holder(state, report.rank)
    )
    return updating if updating and isinstance(verdict_of(state, fault, updating), Decision) else ()


def _known_at(state: ControllerState, fault: Fault, now: float) -> float:
    """Return when every silent rank that has reported, or that its agent sees running, sends again or is dead, and every rank that
    attached again has had time to answer; half of the fault's time at most. This controller may be the one that receives nothing:
    silence alone does not justify a refusal. -inf: there are none."""
    members, settings, started = state.members, state.settings, has_started(state.pace)
    silent_s = SUSPECT_AFTER * settings.lease_s
    last_alive = known_at = -inf
    for rank, (report, member) in enumerate(zip(fault.reports, members.table, strict=True)):
        if member.dead is not None or member.registration is None or rank in fault.stuck:
            continue
        since, alive = (
            silent_since(member, members.leases_renewed_at),
            alive_at(member, members.leases_renewed_at, settings, started),
        )
        if member.suspect if report is not None else alive > since and now >= since + silent_s:
            last_alive = max(last_alive, alive)
        if owes_report(state, fault, rank):
            known_at = fault.asked_late_until
    return min(max(known_at, last_alive + settings.lease_s), fault.began + settings.total_timeout_s / 2)


def _wait_for_updates(
    state: ControllerState, fault: Fault, updating: tuple[int, ...], now: float, out: list[Effect]
) -> ControllerState:
    update_by = min(fault.update_by, now + state.settings.progress_timeout_s)
    if fault.update_by == inf:
        out.append(Journal("awaiting_updates", {"ranks": updating, "freeze_id": state.freeze_id}))
    return state.with_fault(replace(fault, updating=updating, update_by=update_by))


def _order_rolls(state: StateAt[Freezing], verdict: Decision, now: float, out: list[Effect]) -> ControllerState:
    """Note the decision and have the ranks that are one step behind roll forward."""
    fields: Fields = {"freeze_id": state.freeze_id, "step": verdict.step, "able": verdict.able}
    out.append(Journal("decided", {**fields, "roll_forward": verdict.roll_forward}))
    state = stage_ended(state, "decided", now)
    rolling = PerRank.filled(state.settings.world_size, False)
    if verdict.roll_forward:
        assert verdict.record is not None
        out.append(Send(verdict.roll_forward, RollForward(state.freeze_id, verdict.record)))
        rolling = rolling.put_all(dict.fromkeys(verdict.roll_forward, True))
    dump = Dump(
        decision=verdict,
        able=frozenset(verdict.able),
        rolling=rolling,
        pending=len(verdict.roll_forward),
        progress_by=now + state.settings.progress_timeout_s,
        patience_until=half_of_the_rest(state, now),
        directories=_directories(state, verdict),
        work=PerRank.filled(state.settings.world_size, Work()),
    )
    return goto(state, Rolling(state.at.fault, dump))


def rolled(state: StateAt[Rolling], answer: RolledForward, now: float, out: list[Effect]) -> ControllerState:
    """A rank has finished the decided step's update."""
    dump, rank = state.at.dump, answer.rank
    if not dump.rolling[rank]:
        return state
    if answer.state_step != dump.decision.step:
        return _not_rolled(state, rank, f"it is at step {answer.state_step}", now, out)
    out.append(Journal("rolled_forward", {"rank": rank, "step": answer.state_step}))
    return _answered(state, rank, now)


def note_progress(state: StateAt[Ordered], message: Progress, now: float, out: list[Effect]) -> ControllerState:
    """A rank that owes an answer reports progress: the wait for all answers starts again, within the fault's total."""
    dump, rank = state.at.dump, message.rank
    if not (dump.rolling[rank] or dump.work[rank].orders or rank in dump.publishers):
        return state  # the dead and the stuck owe nothing
    progress_by = max(dump.progress_by, now + state.settings.progress_timeout_s)
    return state.with_dump(replace(dump, progress_by=progress_by))


def roll_failed(state: StateAt[Rolling], answer: StepFailed, now: float, out: list[Effect]) -> ControllerState:
    """A rank cannot reach the decided step. Whether its own older state is whole, its next report says."""
    if answer.stage != "roll_forward" or not state.at.dump.rolling[answer.rank]:
        return state
    return _not_rolled(state, answer.rank, answer.error, now, out)


def _not_rolled(state: StateAt[Rolling], rank: int, error: str, now: float, out: list[Effect]) -> ControllerState:
    dump, fault = state.at.dump, state.at.fault
    out.append(Journal("roll_forward_failed", {"rank": rank, "step": dump.decision.step, "error": error}))
    fault = replace(fault, unreachable=fault.unreachable | {(rank, dump.decision.step)})
    dump = replace(dump, able=dump.able - {rank})
    return _answered(state.with_fault(fault).with_dump(dump), rank, now)


def on_rank_lost_rolling(state: StateAt[Rolling], rank: int, now: float, out: list[Effect]) -> ControllerState:
    """A rank died."""
    return _answered(state, rank, now) if state.at.dump.rolling[rank] else state


def on_timeout_rolling(state: StateAt[Rolling], now: float, out: list[Effect]) -> ControllerState:
    """No answer came for too long: every rank that owes one is stuck."""
    late = state.at.dump.rolling.ranks(bool)
    out.append(Journal("stuck", {"ranks": late, "stage": "roll_forward"}))
    return drop_roll_forwards(state, late, now)


def drop_roll_forwards(state: StateAt[Rolling], ranks: tuple[int, ...], now: float) -> StateAt[Rolling]:
    """These ranks' roll-forwards are waited for no longer."""
    state = mark_stuck(state, ranks)
    for rank in ranks:
        state = _answered(state, rank, now)
    return state


def mark_stuck(state: S, ranks: Iterable[int]) -> S:
    """These ranks are holders no more in this fault, if there is one."""
    fault = state.fault
    return state if fault is None else state.with_fault(replace(fault, stuck=fault.stuck.union(ranks)))


def is_holder(state: StateAt[Faulted], rank: int) -> bool:
    """True for a rank that may be given orders: alive, not stuck, and its replica not proven wrong."""
    fault = state.at.fault
    return state.members.table[rank].dead is None and rank not in fault.stuck and rank not in fault.wrong


def able_holders(state: StateAt[Ordered]) -> frozenset[int]:
    """Return the ranks that can write the decided step now. O(world)."""
    table = state.members.table
    dead = [rank for rank, member in enumerate(table) if member.dead is not None]
    able, lost = state.at.dump.able, state.at.fault.stuck.union(dead)
    return able if able.isdisjoint(lost) else able - lost


def holders(state: StateAt[Ordered], group: Group) -> tuple[int, ...]:
    """Return the ranks that can write a group at the decided step now."""
    return tuple(rank for rank in group.holders if rank in state.at.dump.able and is_holder(state, rank))


def _answered(state: StateAt[Rolling], rank: int, now: float) -> StateAt[Rolling]:
    dump = state.at.dump
    rolling, progress_by = dump.rolling.put(rank, False), now + state.settings.progress_timeout_s
    return state.with_dump(replace(dump, rolling=rolling, pending=dump.pending - 1, progress_by=progress_by))


def _directories(state: ControllerState, decision: Decision) -> tuple[str, ...]:
    """Return the first able rank's directories: they are the job's, in its order of preference."""
    registration = state.members.table[decision.able[0]].registration
    return registration.save_dirs if registration is not None else ()


def _absences(state: ControllerState, fault: Fault, unproven: frozenset[int]) -> dict[int, str]:
    """Say of every rank without a usable report why, for a refusal's text."""
    absent = {}
    for rank, member in enumerate(state.members.table):
        report = fault.reports[rank]
        if member.dead is not None:
            absent[rank] = f"dead ({member.dead.text})"
        elif rank in fault.stuck:
            absent[rank] = "stuck in an order"
        elif rank in fault.wrong:
            absent[rank] = "whose replica is wrong"
        elif rank in unproven and report is not None and report.closed and not report.torn:
            absent[rank] = "whose replica may be wrong: it has reported no digest"
        elif report is None or member.suspect:
            absent[rank] = "which did not answer"
        elif report.torn:
            absent[rank] = f"whose update of step {report.step} failed half way"
        elif not report.closed:
            absent[rank] = f"stuck in {report.phase.name} of step {report.step}"
    return absent
