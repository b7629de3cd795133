"""The checker can fail: each of these wrong protocols violates an invariant within a few hundred jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.checks import run_and_check
from tests.simulation.rank import Rank
from tests.simulation.scenario import Scenario, build
from tests.simulation.training import even
from ttp.controller import machine, membership, presence, rolling, settling, writing
from ttp.controller.decision import Decision, Refusal, decide
from ttp.controller.planning import hand_over
from ttp.controller.publishing import start_publishing
from ttp.controller.state import Stage
from ttp.errors import ProtocolError
from ttp.processor import transitions as processor_transitions
from ttp.proto.messages import Cause, CauseKind, CommitRecord, Phase, StateReport, Thaw

Decide = Callable[..., Decision | Refusal]
LONGEST_SEARCH = 600


def first_caught(known: str, arrange: Callable[[Scenario], None] | None = None) -> str:
    """Return the first violation that starts with `known`, searching seed by seed; fail when none is found.

    `arrange`: puts one kind of fault into an even layout of two or four ranks, instead of the seeds' own faults.
    """
    others: set[str] = set()
    for seed in range(LONGEST_SEARCH):
        scenario = build(seed) if arrange is None else build(seed, even(2 + 2 * (seed % 2)), faults=False)
        if arrange is not None:
            scenario.harmless = False
            arrange(scenario)
        try:
            found = run_and_check(scenario)
        except (AssertionError, KeyError, IndexError, ProtocolError) as error:
            found = [f"raised: {error!r}"]
        for text in found:
            if text.startswith(known):
                return text
            others.add(text[:60])
    raise AssertionError(f"no job of {LONGEST_SEARCH} violated {known}; seen instead: {sorted(others)[:5]}")


def with_decide(monkeypatch: pytest.MonkeyPatch, wrong: Decide) -> None:
    monkeypatch.setattr(rolling, "decide", wrong)


def test_a_torn_rank_that_counts_as_holder_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(groups: Any, reports: Mapping[int, StateReport], *rest: Any) -> Decision | Refusal:
        return decide(groups, {r: replace(report, torn=False) for r, report in reports.items()}, *rest)

    with_decide(monkeypatch, wrong)

    def torn_and_alone(scenario: Scenario) -> None:
        """Rank 0 raises in the middle of its update, and its partner dies."""
        job, half = scenario.job, scenario.job.training.layout.world_size // 2
        process = job.ranks[0]
        job.hook("UPDATING 2", 1, lambda rank: process.fault(CauseKind.EXCEPTION, "out of memory"))
        job.hook("UPDATING 2", 1, lambda rank: job.kill(half))

    first_caught("I3", torn_and_alone)


def test_a_stuck_rank_that_counts_as_holder_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(groups: Any, reports: Mapping[int, StateReport], *rest: Any) -> Decision | Refusal:
        return decide(groups, {r: replace(report, closed=True) for r, report in reports.items()}, *rest)

    with_decide(monkeypatch, wrong)
    first_caught("I3")


def test_taking_the_step_from_a_dead_ranks_word_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dead rank's last heartbeat was one step ahead of the survivors: nobody can write that step."""

    def wrong(groups: Any, reports: Mapping[int, StateReport], *rest: Any) -> Decision | Refusal:
        verdict = decide(groups, reports, *rest)
        if isinstance(verdict, Refusal) or len(reports) == max(max(g.holders) for g in groups) + 1:
            return verdict
        return Decision(verdict.step + 1, None, (), verdict.able)

    with_decide(monkeypatch, wrong)
    first_caught("I3")


def test_rolling_forward_without_a_record_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(
        groups: Any, reports: Mapping[int, StateReport], records: Mapping[int, CommitRecord], *rest: Any
    ) -> Decision | Refusal:
        ready = [report.step for report in reports.values() if report.phase is Phase.READY]
        invented = {step: CommitRecord(step, 1.0, 1.0, False, 1.0, (0.1,), ()) for step in ready}
        return decide(groups, reports, {**invented, **records}, *rest)

    with_decide(monkeypatch, wrong)
    first_caught("I3")


def test_deciding_for_an_older_step_than_necessary_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(groups: Any, reports: Mapping[int, StateReport], records: Any, *rest: Any) -> Decision | Refusal:
        return decide(groups, reports, {}, *rest)

    with_decide(monkeypatch, wrong)
    first_caught("I9")


def test_rolling_a_rank_forward_that_is_not_ready_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(groups: Any, reports: Mapping[int, StateReport], *rest: Any) -> Decision | Refusal:
        claimed = {
            rank: replace(report, phase=Phase.READY, step=report.state_step + 1) for rank, report in reports.items()
        }
        return decide(groups, claimed, *rest)

    with_decide(monkeypatch, wrong)
    monkeypatch.setattr("tests.simulation.gate.Gate.can_roll", lambda self, record: not self.busy)
    first_caught("I3")


def test_a_gate_that_lets_ready_pass_while_closed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that reported COMPUTE goes on into the collective, and another gets a record that nobody can use."""
    monkeypatch.setattr(Rank, "_pass_gate_to_ready", Rank._ready)

    def preempted_on_a_slow_network(scenario: Scenario) -> None:
        job = scenario.job
        job.slowest_s = 0.05
        process = job.ranks[scenario.seed % len(job.ranks)]
        job.hook("UPDATING 2", 1, lambda rank: process.run(lambda: process.fault(CauseKind.PREEMPTED, "SIGTERM")))

    first_caught("I6", preempted_on_a_slow_network)


def test_publishing_before_everything_is_written_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(state: Any, now: float, out: Any) -> Any:
        return start_publishing(state, now, out)

    monkeypatch.setitem(settling._ADVANCE, Stage.WRITING, wrong)
    first_caught("I5")


def test_counting_a_replaced_writers_late_answer_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(parts: Any, holders: Any, loads: Any) -> Any:
        given = hand_over(parts, holders, loads)
        twice = tuple(parts) * 2  # the lost writer's answer and the new writer's
        return given and {rank: twice if rank == min(given) else mine for rank, mine in given.items()}

    monkeypatch.setattr(writing, "hand_over", wrong)
    first_caught("I5")


def test_missing_silent_deaths_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(members: Any, now: float, *rest: Any, **options: Any) -> membership.Swept:
        return membership.Swept(replace(members, sweep_at=float("inf")), (), ())

    monkeypatch.setattr(machine, "sweep", wrong)
    first_caught("I11")


def test_taking_every_suspicion_for_a_death_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(state: Any, rank: int, why: str, now: float, out: Any) -> Any:
        return presence.die(state, rank, Cause(CauseKind.SILENT, (rank,), why), False, now, out)

    monkeypatch.setattr(presence, "suspicion", wrong)
    monkeypatch.setattr(machine, "suspicion", wrong)
    first_caught("I7")


def test_a_thaw_that_opens_no_gate_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    table = processor_transitions.TRANSITIONS
    for standing, kind in list(table):
        if kind is Thaw:
            monkeypatch.setitem(table, (standing, kind), processor_transitions.late)
    first_caught("I11")


def test_opening_the_gate_by_itself_after_a_lost_stream_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = processor_transitions.gate_closed

    def wrong(state: Any, event: Any, now: float, out: Any) -> Any:
        from ttp.processor.events import OpenGate

        state = closed(state, event, now, out)
        out.append(OpenGate(state.freeze_id))
        return state

    for key in list(processor_transitions.TRANSITIONS):
        if processor_transitions.TRANSITIONS[key] is closed:
            monkeypatch.setitem(processor_transitions.TRANSITIONS, key, wrong)
    first_caught("I7")
