"""Whole jobs under random faults keep the invariants; a failing seed replays: `python -m tests.simulation.replay SEED`."""

from __future__ import annotations

import collections
from functools import partial

import pytest

from tests.simulation.checks import run_and_check
from tests.simulation.job import Job
from tests.simulation.network import RankStream
from tests.simulation.scenario import build
from tests.simulation.script import SCRIPTS, parse, play
from tests.simulation.soak import outcome_of
from tests.simulation.training import LAYOUTS, Layout, even
from tests.simulation.truth import events
from ttp.controller.core.facts import state
from ttp.controller.core.facts.state import (
    EDGES,
    AnyStage,
    Assembling,
    Exiting,
    Freezing,
    Gathering,
    Over,
    Regrouping,
    Rolling,
    Standby,
    Writing,
)
from ttp.processor.core import machine as process_machine
from ttp.processor.core.events import Effect, Event, Received
from ttp.processor.core.state import ProcessorState
from ttp.proto.messages import Cause, CauseKind, Freeze, Thaw

SEEDS_PER_BATCH = 60
Edge = tuple[type[AnyStage], type[AnyStage]]
_ORPHANED = (
    "all ranks lose this controller, and none finds another or ends, for the orphan timeout (unit/protocol/test_waits)"
)
RARE: dict[Edge, str] = {
    (Assembling, Over): _ORPHANED,
    (Rolling, Over): _ORPHANED,
    (Regrouping, Over): _ORPHANED,
    (Writing, Over): _ORPHANED,
    (
        Gathering,
        Standby,
    ): "only processes on a lost node come to a standby, and the job trains on (test_seats, unit/protocol/test_seats)",
    (
        Gathering,
        Exiting,
    ): "the controller dies between the first welcome and the last, with a rank (unit/protocol/test_absence)",
    (Rolling, Freezing): "an update ends while another rank is slow to roll forward (unit/protocol/test_patience)",
}
"""Transitions that no script and none of the first seeds takes -> why. The tests of the protocol that are named take them."""


@pytest.mark.parametrize("batch", range(6))
def test_invariants_hold_under_random_faults(batch: int) -> None:
    """Every seed's job ends published, refused with a true reason, or trained to the end."""
    outcomes: collections.Counter[str] = collections.Counter()
    for seed in range(batch * SEEDS_PER_BATCH, (batch + 1) * SEEDS_PER_BATCH):
        scenario = build(seed)
        found = run_and_check(scenario)
        assert not found, f"seed {seed} (python -m tests.simulation.replay {seed}): {found}"
        outcomes[outcome_of(scenario)] += 1
    assert min(outcomes["published"], outcomes["refused"], outcomes["finished"]) > 0, f"one-sided batch: {outcomes}"


def test_the_seeds_reach_every_kind_of_journal_line() -> None:
    """The faults are not all of one kind: every line that a dump can write is written by some job."""
    reached: set[str] = set()
    for seed in range(250):
        scenario = build(seed)
        run_and_check(scenario)
        reached |= {line.event for _, line in scenario.job.journal}
    assert reached >= {
        "suspect", "cleared", "thawed", "death_seen", "death_named", "fault_reported", "freeze_sent", "frozen", "decided",
        "rolled_forward", "write_sent", "written", "write_failed", "write_moved", "stuck", "replanned", "publish_sent",
        "published", "refused", "exit_sent", "finished",
    }  # fmt: skip


class Looked(dict[Edge, str]):
    """The transitions, and which of them `goto` has looked for."""

    def __init__(self, edges: dict[Edge, str]) -> None:
        super().__init__(edges)
        self.taken: set[object] = set()

    def __contains__(self, edge: object) -> bool:
        self.taken.add(edge)
        return super().__contains__(edge)


def test_every_listed_transition_is_taken_but_those_that_need_rare_coincidences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a script or by one of the first 250 seeds."""
    edges = Looked(EDGES)
    monkeypatch.setattr(state, "EDGES", edges)
    for path in SCRIPTS:
        play(parse(path.read_text(encoding="utf-8")))
    for seed in range(250):
        run_and_check(build(seed))
    assert EDGES.keys() - edges.taken == set(RARE)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name.replace(" ", "-"))
def test_one_dead_rank_is_always_survived(layout: Layout) -> None:
    """Whoever dies in training, whenever: the checkpoint is published, unless no step was committed yet."""
    published = 0
    for rank in range(layout.world_size):
        for step, phase in ((2, "READY"), (2, "UPDATING"), (2, "DONE"), (3, "READY")):
            scenario = build(1, layout, faults=False)
            scenario.harmless = False
            job = scenario.job
            job.hook(f"{phase} {step}", 1 + rank, partial(Job.kill, job))
            found = run_and_check(scenario)
            assert not found, f"{layout.name}, {phase} {step}, rank {rank}: {found}"
            published += len(events(job, "published"))
    assert published == 4 * layout.world_size


def test_a_seed_replays_exactly() -> None:
    """The same seed gives the same journals, line by line."""
    for seed in (3, 17, 42):
        first, second = build(seed), build(seed)
        assert run_and_check(first) == run_and_check(second)
        journals = [[(at, repr(line)) for at, line in scenario.job.journal] for scenario in (first, second)]
        assert journals[0] == journals[1]
        assert len(journals[0]) > 3


def test_what_comes_to_a_rank_that_is_stopped_and_held_at_once_is_read_in_the_order_in_which_it_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A queue in the memory of a process keeps its order, whatever keeps the process from reading it (seed 992065550)."""
    process = build(1, even(4), faults=False).job.ranks[2]
    stream = process.handler.stream = RankStream(process, process.job.controller, 0)
    came: list[object] = []

    def take(state: ProcessorState, event: Event, now: float) -> tuple[ProcessorState, tuple[Effect, ...]]:
        came.append(event)
        return state, ()

    monkeypatch.setattr(process_machine, "transition", take)
    process.stopped = True
    process.take_in(stream, Freeze(1, Cause(CauseKind.SILENT, (3,), "")))
    process.hogged = True
    process.take_in(stream, Thaw(1))
    process.resume()
    assert not came, "its interpreter is held"
    process.let_go()
    assert [type(event.message) for event in came if isinstance(event, Received)] == [Freeze, Thaw]
