"""Mutants that random jobs do not find, each with the reason and the unit test that finds it: `make mutants` reports them, and does not fail for them.

A row is found like those of `equivalents`. Tests hold that each is still a mutant, and that docs/limits.md has the same table.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.simulation.mutants.changes import Mutant
from tests.simulation.mutants.equivalents import Row


@dataclass(frozen=True)
class NotBySeeds:
    """One row of the table in docs/limits.md."""

    change: str
    why: str
    test: str
    """The file in `tests/unit/protocol` that finds it."""
    rows: tuple[Row, ...]


NOT_BY_SEEDS = (
    NotBySeeds(
        "the first message after all ranks were silent gives the others no time",
        "leases must be looked at between two messages that come within milliseconds, after a leap of the clock: 1 of 1,600 jobs that cut a controller off; three times as many of them would take their share from all others",
        "test_absence.py",
        (
            ("controller.core.machine", "if of_rank and was_cut_off and not _receives_nothing(state):", "if of_rank and was_cut_off and (not _receives_nothing(state)): always False"),
        ),
    ),
    NotBySeeds(
        "a rank that failed to roll forward, and whose state is whole, is asked again",
        "a simulated roll forward that fails leaves the state torn",
        "test_losses.py",
        (
            ("controller.core.dump.roll_forward", "fault = replace(fault, unreachable=fault.unreachable | {(rank, dump.decision.step)})", "without fault = replace(fault, unreachable=fault.unreachable | {(rank, dump.decision.step)})"),
            ("controller.core.dump.roll_forward", "fault = replace(fault, unreachable=fault.unreachable | {(rank, dump.decision.step)})", "replace(fault, unreachable=fault.unreachable | {(rank, dump.decision.step)}): forgets unreachable"),
        ),
    ),
    NotBySeeds(
        "the exit of a rank that has come to a new controller is not believed while ranks are gathered",
        "a process must end in these milliseconds, and its silence shows the death a little later",
        "test_takeover.py",
        (
            ("controller.core.ranks.takeover", "if member.registration is not None and member.registration.pid != message.pid:", "member.registration is not None and member.registration.pid != message.pid: without member.registration.pid != message.pid"),
        ),
    ),
    NotBySeeds(
        "dead ranks are waited for in a takeover",
        "it takes a lease longer at most",
        "test_takeover.py",
        (
            ("controller.core.ranks.takeover", "awaited = members.table.ranks(lambda member: member.dead is None and not member.attached)", "member.dead is None and (not member.attached): without member.dead is None"),
        ),
    ),
    NotBySeeds(
        "leases are not looked at sooner when a rank attaches",
        "another look comes within the limit",
        "test_absence.py",
        (
            ("controller.core.facts.membership", "return replace(members, sweep_at=min(members.sweep_at, now + SUSPECT_AFTER * settings.lease_s))", "replace(members, sweep_at=min(members.sweep_at, now + SUSPECT_AFTER * settings.lease_s)): forgets sweep_at"),
            ("controller.core.facts.membership", "return replace(members, sweep_at=min(members.sweep_at, now + SUSPECT_AFTER * settings.lease_s))", "min(members.sweep_at, now + SUSPECT_AFTER * settings.lease_s): without now + SUSPECT_AFTER * settings.lease_s"),
        ),
    ),
    NotBySeeds(
        "a rank that knows one controller gives up an attempt to connect after a lease",
        "it connects again, to the same one",
        "test_succession.py",
        (
            ("processor.core.failover", "if link is _CONNECTING and state.successors:", "link is _CONNECTING and state.successors: without state.successors"),
        ),
    ),
    NotBySeeds(
        "step times are sent again",
        "they are known",
        "test_step_times.py",
        (
            ("processor.core.transitions", "return replace(", "replace(state, link=LinkState.UP, lost_since=inf, loss_logged=False, unled=False, received_s=now, refusals=0, steps_reported=state.steps, save_dirs=registration.save_dirs, group_ids=frozenset((group.group_id for group in registration.groups))): forgets steps_reported"),
            ("processor.core.transitions", "state = replace(state, heartbeat_at=beat_at, work_done=event.work_done, steps_reported=state.steps)", "replace(state, heartbeat_at=beat_at, work_done=event.work_done, steps_reported=state.steps): forgets steps_reported"),
            ("processor.core.transitions", "new = min(state.steps - state.steps_reported, REPORTED_STEPS, len(state.step_times_s))", "min(state.steps - state.steps_reported, REPORTED_STEPS, len(state.step_times_s)): without state.steps - state.steps_reported"),
        ),
    ),
    NotBySeeds(
        "half of a limit without progress is not noted",
        "a line of the journal",
        "test_hangs.py",
        (
            ("controller.core.facts.pace", "return self.hung_at if self.noted else self.note_at", "if self.noted: always True"),
        ),
    ),
    NotBySeeds(
        "shards whose holders share a node are not warned of",
        "a warning",
        "test_coverage.py",
        (
            ("controller.core.facts.coverage", "found += [", "without found += [f\"{group.label}: its holders, {named('rank', group.holders)}, do not all sit on different nodes\" for group in together[:_NAMED]]"),
        ),
    ),
    NotBySeeds(
        "time is granted at each message of a rank that was taken for dead, and not only when the others are there again",
        "some leases end later, within the orphan timeout",
        "test_absence.py",
        (
            ("controller.core.machine", "if of_rank and was_cut_off and not _receives_nothing(state):", "of_rank and was_cut_off and (not _receives_nothing(state)): without not _receives_nothing(state)"),
        ),
    ),
    NotBySeeds(
        "a rank sends the times of no steps but the first ones",
        "paces are known from these",
        "test_step_times.py",
        (
            ("processor.core.transitions", "state = replace(state, steps=event.steps, step_times_s=event.step_times_s)", "replace(state, steps=event.steps, step_times_s=event.step_times_s): forgets step_times_s"),
        ),
    ),
    NotBySeeds(
        "a count of steps without times, or times without a count, is not noted",
        "the next heartbeat has both",
        "test_vouched.py",
        (
            ("controller.core.facts.pace", "if beat.steps > pace.steps or beat.step_times_s:", "beat.steps > pace.steps or beat.step_times_s: And"),
        ),
    ),
    NotBySeeds(
        "a rank that was only silent counts again where no round asks",
        "a dump reads no reports any more, and before a job assembles no rank falls silent for a lease",
        "test_gathering.py",
        (
            ("controller.core.dump.freeze", "if not isinstance(state.at, Freezing) or not was_only_silent(state.members.table[rank]):", "not isinstance(state.at, Freezing) or not was_only_silent(state.members.table[rank]): without not isinstance(state.at, Freezing)"),
        ),
    ),
    NotBySeeds(
        "a fault that a rank reports while all regroup is not one of the fault's causes",
        "the report lacks it",
        "test_regroup_fallback.py",
        (
            ("controller.core.ranks.liveness", "state = add_cause(sign_of_report(state, message, now), message.cause, now)", "without state = add_cause(sign_of_report(state, message, now), message.cause, now)"),
        ),
    ),
    NotBySeeds(
        "a round whose culprit is known waits for hints all the same",
        "it takes the rest of that time longer",
        "test_rounds.py",
        (
            ("controller.core.stages", "-inf if has_culprit(fault.causes) else fault.hint_until,", "if has_culprit(fault.causes): always False"),
        ),
    ),
    NotBySeeds(
        "a freeze that looks for a hang has no end of its own",
        "another deadline ends it",
        "test_hangs.py",
        (
            ("controller.core.stages", "waits = fault.unproven is not None or (fault.takeover and fault.awaiting)", "fault.unproven is not None or (fault.takeover and fault.awaiting): without fault.unproven is not None"),
        ),
    ),
    NotBySeeds(
        "ranks of a later generation that come to a new controller are not waited for",
        "they are there within a lease",
        "test_seats.py",
        (
            ("controller.core.ranks.takeover", "at = Gathering(deadline, now + settings.orphan_timeout_s, at.last_message_at, at.early, looked=generation)", "now + settings.orphan_timeout_s: Sub"),
        ),
    ),
    NotBySeeds(
        "the next standby is asked for only when the time of the last one is over",
        "no job loses as many controllers in that time",
        "test_restore.py",
        (
            ("controller.core.ranks.standbys", "known = replace(known, asked=-1, until=now, passed=frozenset())", "replace(known, asked=-1, until=now, passed=frozenset()): forgets until"),
        ),
    ),
    NotBySeeds(
        "ranks never regroup in place",
        "the step is written, and the job restarts",
        "test_seats.py",
        (
            ("controller.core.dump.regroup", "if cause.kind not in _AT_ONCE and not (cause.kind is CauseKind.SILENT and replaceable.issuperset(cause.ranks))", "for cause in fault.causes: without if cause.kind not in _AT_ONCE and (not (cause.kind is CauseKind.SILENT and replaceable.issuperset(cause.ranks)))"),
        ),
    ),
)  # fmt: skip

_BY_ROW = {row: one for one in NOT_BY_SEEDS for row in one.rows}


def known(mutant: Mutant) -> NotBySeeds | None:
    """Return what is known of a mutant that random jobs do not find; None: they are expected to find it."""
    return _BY_ROW.get((mutant.module, mutant.source, mutant.change))
