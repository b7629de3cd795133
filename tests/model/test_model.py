"""The exhaustive model: no violation in any order, the reduction loses no outcome, and broken machines are caught."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from typing import Any

import pytest

from tests.model import gate as gates
from tests.model.pairs import PAIRS, named_pair, shape_of
from tests.model.search import Found, Search
from tests.model.shape import FAULTS, THREE_RANKS, Shape
from tests.model.world import World
from tests.shown import ROOT
from tests.simulation.repetition import repeats_nothing
from ttp.controller.core import stages
from ttp.controller.core.dump import freeze, publishing, roll_forward, writing
from ttp.controller.core.facts import decision
from ttp.controller.core.facts.events import Effect, Send
from ttp.controller.core.facts.stage_table import TABLES
from ttp.controller.core.facts.state import ControllerState, Freezing, StateAt, Writing
from ttp.proto.messages import StateReport, Thaw

LONGEST_S = 1800
LONG = (pytest.mark.long, pytest.mark.timeout(LONGEST_S))
"""Of a search: all its orders, on cores that are busy with other things."""
ONE_FAULT, TWO_DEATHS = "one fault of any kind, from the second step on", "two deaths, in a job of three ranks"
SMALL = {
    ONE_FAULT: (
        Shape(faults=1, kinds=FAULTS, calm_steps=1),
        {"published step 1", "published step 2", "trained on"},
    ),
    TWO_DEATHS: (
        Shape(steps=1, faults=2, kinds=("kill", "controller kill"), peer_errors=0, holders=THREE_RANKS),
        {"published step 1", "refused", "trained on"},
    ),
}
"""What `make test` has time for; `WHOLE` has all of their orders."""
WHOLE = {
    "one fault of any kind": Shape(faults=1, kinds=FAULTS),
    "two deaths": Shape(faults=2, kinds=("kill", "controller kill"), calm_steps=1, peer_errors=0),
}


def searched(shape: Shape, reduced: bool = True, limit: int = 0) -> Found:
    return Search(World(shape), reduced).run(limit)


def described(found: Found) -> str:
    """Return a violation with the way to it, for a failing test."""
    return "\n".join([found.violation, *(" ".join(map(str, action)) for action in found.path)])


@pytest.mark.parametrize("name", [ONE_FAULT, pytest.param(TWO_DEATHS, marks=pytest.mark.long)])
def test_no_order_of_faults_and_messages_in_a_small_job_violates_an_invariant(name: str) -> None:
    """One fault of any kind at any moment of the second step; and two deaths, of ranks and controllers, of fewer ranks."""
    shape, outcomes = SMALL[name]
    _holds(name, searched(shape), outcomes)


@pytest.mark.long
@pytest.mark.timeout(LONGEST_S)
def test_no_order_of_faults_and_messages_violates_an_invariant() -> None:
    """One fault of any kind at any moment; and two deaths, of ranks and controllers, from the second step on."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        searches = dict(zip(WHOLE, pool.map(searched, WHOLE.values()), strict=True))
    for name, found in searches.items():
        _holds(name, found, {"published step 1", "published step 2", "refused", "trained on"})


def _holds(name: str, found: Found, outcomes: set[str]) -> None:
    print(f"{name}: {found.states} states, {found.ends} ends, {found.seconds:.1f} s: {dict(found.outcomes)}")
    assert not found.violation, described(found)
    assert found.complete
    assert outcomes <= set(found.outcomes)


@pytest.mark.parametrize(
    "kind",
    [
        "controller kill",
        *(pytest.param(kind, marks=LONG) for kind in ("kill", "raise", "break", "controller stop")),
    ],
)
def test_the_reduction_loses_no_outcome(kind: str) -> None:
    """With every order followed the job ends in the same ways: outcome, what is published, how every rank ended."""
    shape = Shape(steps=1, faults=1, kinds=(kind,))
    whole, reduced = searched(shape, reduced=False), searched(shape)
    assert whole.complete and reduced.complete
    assert whole.endings == reduced.endings
    assert reduced.states < whole.states


@pytest.mark.parametrize("kind", ["kill", pytest.param("stop", marks=LONG)])
def test_a_stopped_controller_without_messages_may_go_on_later(kind: str) -> None:
    """Two faults in a job of two ranks, the controller being stopped one of them: the reduction for it loses no outcome either."""
    shape = Shape(steps=1, faults=2, kinds=(kind, "controller stop"), each_once=True, holders=((0, 1),))
    whole, reduced = searched(shape, reduced=False), searched(shape)
    assert whole.complete and reduced.complete
    assert whole.endings == reduced.endings
    assert reduced.states < whole.states


def test_asking_a_stopped_controller_again_and_again_leaves_nothing() -> None:
    """Else there would be no end of situations: one more for every time that a rank gave up a stream that was not answered."""
    shape = Shape(faults=3, peer_errors=0, holders=((0, 1),))
    world = World(shape)
    situation = world.start()
    for fault in (("controller stop", 0), ("controller kill", 1), ("kill", 0)):
        situation = world.apply(situation, fault)
    for _ in range(100):
        while ordinary := world.ordinary(situation):
            situation = world.apply(situation, ordinary[0])
        situation = world._pass_time(situation, world._next_moment(situation))
    assert world.views[situation.ranks[1]].alive and max(map(len, situation.up)) < 8


def test_a_pair_is_named_in_whichever_order() -> None:
    """So that a search that takes long can be run in parts."""
    assert named_pair("hang+kill") == named_pair("kill+hang") == ("kill", "hang")
    assert {named_pair("+".join(pair)) for pair in PAIRS} == set(PAIRS)
    with pytest.raises(argparse.ArgumentTypeError, match=r"'kill': expected two of kill, stop"):
        named_pair("kill")


def test_pairs_of_kinds_are_all_ways_to_have_two_faults() -> None:
    """Each kind twice, and each with each other; in a pair of different kinds neither comes twice."""
    assert {frozenset(pair) for pair in PAIRS} == {frozenset(pair) for pair in product(FAULTS, FAULTS)}
    for pair, left in (("kill", "full disk"), {"full disk"}), (("kill", "kill"), {"kill"}):
        world = World(shape_of(pair, calm_steps=1))
        start = world.start()
        assert {action[0] for action in world.faults(start)} == set(pair)
        killed = world.apply(start, next(action for action in world.faults(start) if action[0] == "kill"))
        assert {action[0] for action in world.faults(killed)} == left


def test_a_pair_is_searched_from_the_command_line() -> None:
    """As far as the limit allows; what it did not search is printed."""
    command = [sys.executable, "-m", "tests.model.pairs", "--workers", "1", "--most", "300", "raise+kill"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1: kill + raise: 300 situations" in done.stdout
    assert "no violation; left at 300 situations: kill + raise" in done.stdout


@dataclass(frozen=True)
class Mutation:
    """A machine that is wrong in one place, and what the search must say of it."""

    name: str
    patch: Callable[[pytest.MonkeyPatch], None]
    caught_as: tuple[str, ...]
    kinds: tuple[str, ...] = ("kill",)
    faults: int = 1


def _gate_stays_open(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gates.Gate, "bar", lambda gate, freeze_id: replace(gate, freeze_id=freeze_id))


def _publishes_before_all_is_written(patch: pytest.MonkeyPatch) -> None:
    def write(state: StateAt[Writing], now: float, out: list[Effect]) -> ControllerState:
        return publishing.start_publishing(state, now, out) if state.at.dump.pending <= 1 else state

    patch.setitem(TABLES, Writing, replace(TABLES[Writing], advance=write))


def _takes_a_replica_that_is_updating(patch: pytest.MonkeyPatch) -> None:
    right = decision.decide

    def decide(groups: Any, reports: dict[int, StateReport], *rest: Any) -> Any:
        seen = {rank: replace(report, closed=True) for rank, report in reports.items()}
        return right(groups, seen, *rest)

    patch.setattr(roll_forward, "decide", decide)


def _forgets_the_records(patch: pytest.MonkeyPatch) -> None:
    right = decision.decide
    patch.setattr(roll_forward, "decide", lambda groups, reports, records, *rest: right(groups, reports, {}, *rest))


def _thaws_only_the_first(patch: pytest.MonkeyPatch) -> None:
    def thaw(state: StateAt[Freezing], now: float, out: list[Effect]) -> ControllerState:
        thawed = freeze.thaw(state, now, out)
        for index, effect in enumerate(out):
            if isinstance(effect, Send) and isinstance(effect.message, Thaw):
                out[index] = replace(effect, ranks=effect.ranks[:1])
        return thawed

    patch.setattr(stages, "thaw", thaw)
    repeats_nothing(patch)  # it would thaw the others


def _drops_the_parts_of_a_lost_writer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(writing, "hand_over", lambda parts, holders, loads: {})


MUTATIONS = (
    Mutation("the gate stays open", _gate_stays_open, ("I7", "I5", "I3")),
    Mutation("published before all is written", _publishes_before_all_is_written, ("I1", "I5")),
    Mutation("a replica in UPDATING is taken", _takes_a_replica_that_is_updating, ("I3",), ("kill", "hang"), 2),
    Mutation("commit records are forgotten", _forgets_the_records, ("I6", "I9")),
    Mutation("only one rank is thawed", _thaws_only_the_first, ("I11",), ("break",)),
    Mutation("a lost writer's parts are dropped", _drops_the_parts_of_a_lost_writer, ("I5",), ("raise", "kill"), 2),
)  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_broken_machine_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search can fail: each of these breaks an invariant, and the search says which."""
    mutation.patch(monkeypatch)
    shape = Shape(
        faults=mutation.faults, kinds=mutation.kinds, calm_steps=1, peer_errors=0, each_once=True, holders=THREE_RANKS
    )
    found = searched(shape, limit=400_000)
    print(f"{mutation.name}: {found.violation!r} after {found.states} states")
    assert any(name in found.violation for name in mutation.caught_as), found.violation
