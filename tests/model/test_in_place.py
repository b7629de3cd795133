"""The exhaustive model where ranks regroup: no violation in any order, and machines that are wrong there are caught."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from tests.model import gate as gates
from tests.model import in_place
from tests.model import rank as ranks
from tests.model.pairs import PAIRS_IN_PLACE
from tests.model.rank import Out, Rank
from tests.model.search import Search
from tests.model.shape import FAULTS, FAULTS_IN_PLACE, THREE_RANKS, Shape
from tests.model.situation import Situation
from tests.model.test_model import LONG, Mutation, described, searched
from tests.model.world import World
from tests.shown import ROOT
from ttp.controller.core import stages
from ttp.controller.core.dump import regroup, roll_forward
from ttp.proto.messages import CauseKind, Regroup

IN_PLACE = Shape(faults=1, calm_steps=1, peer_errors=0, holders=THREE_RANKS, in_place_s=0.25)
PUBLISHED_FIRST = "published first, one death or exception, from the second step on"
ONE_FAULT = "one fault of any kind, from the second step on"
SHAPES = {
    ONE_FAULT: replace(IN_PLACE, kinds=FAULTS),
    PUBLISHED_FIRST: replace(IN_PLACE, kinds=("kill", "raise"), publish_first=True),
    "published first, one fault of any kind": replace(IN_PLACE, kinds=FAULTS, publish_first=True),
    "one death and a collective's error, from the second step on": replace(IN_PLACE, kinds=("kill",), peer_errors=1),
    "two deaths, of ranks and controllers": replace(
        IN_PLACE, kinds=("kill", "controller kill"), steps=1, calm_steps=0, faults=2
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in (ONE_FAULT, PUBLISHED_FIRST) else LONG) for name in SHAPES]
)
def test_no_order_violates_an_invariant_where_ranks_regroup(name: str) -> None:
    """They train on without a checkpoint, or one is written; and nothing is lost for the first having been tried."""
    found = searched(SHAPES[name])
    print(f"{name}: {found.states} states, {found.ends} ends, {found.seconds:.1f} s: {dict(found.outcomes)}")
    assert not found.violation, described(found)
    assert found.complete
    assert {"published step 1", "trained on", "trained on, in place"} <= set(found.outcomes)


@pytest.mark.long
def test_a_rank_that_raised_is_a_holder_until_all_have_regrouped() -> None:
    """It raised outside its update, and the other holder of its shard dies before the gates have opened: I9."""
    found = searched(replace(IN_PLACE, kinds=("raise", "kill"), faults=2, each_once=True, steps=1, calm_steps=0))
    assert not found.violation, described(found)


@pytest.mark.parametrize(
    ("kinds", "standbys", "peer_errors"),
    [
        (("kill",), 1, 1),
        (("raise",), 0, 0),
        (("hang", "kill"), 0, 0),
        pytest.param(("kill", "controller kill"), 1, 0, marks=LONG),
        pytest.param(("break", "kill"), 0, 0, marks=LONG),
    ],
)
def test_the_reductions_lose_no_outcome_where_ranks_regroup(
    kinds: tuple[str, ...], standbys: int, peer_errors: int
) -> None:
    """With every order followed a job of two ranks ends in the same ways."""
    shape = replace(
        IN_PLACE, kinds=kinds, faults=len(kinds), each_once=True, standbys=standbys, peer_errors=peer_errors, steps=1, calm_steps=0,
        holders=((0, 1),),
    )  # fmt: skip
    whole, reduced = searched(shape, reduced=False), searched(shape)
    assert whole.complete and reduced.complete
    assert whole.endings == reduced.endings
    assert "trained on, in place" in reduced.outcomes
    assert reduced.states < whole.states


def _gate_opens_for_one(patch: pytest.MonkeyPatch) -> None:
    right = gates.Gate.regrouped
    patch.setattr(
        gates.Gate, "regrouped", lambda gate, state, record: replace(right(gate, state, record), barred=False)
    )


def _vacant_counts_as_holder(patch: pytest.MonkeyPatch) -> None:
    right = ranks.leave

    def leave(shape: Shape, rank: Rank) -> tuple[Rank, tuple[Out, ...]]:
        left, out = right(shape, rank)
        if rank.main != "vacant" or rank.regroup is None:
            return left, out
        gate = replace(left.gate, torn=False, state=(rank.regroup.step, False))
        return replace(left, gate=gate, proc=replace(left.proc, vacant=False, torn=False)), out

    patch.setattr(ranks, "leave", leave)


def _ends_a_holder(patch: pytest.MonkeyPatch) -> None:
    """A rank that has raised is replaced although its state is whole."""
    able_holders = roll_forward.able_holders

    def able(state: Any) -> frozenset[int]:
        raised = {rank for cause in state.at.fault.causes if cause.kind is CauseKind.EXCEPTION for rank in cause.ranks}
        return frozenset(able_holders(state) - raised)

    patch.setattr(regroup, "able_holders", able)
    patch.setattr(regroup, "_why_not_replaced", lambda state, rank, seated: "")


def _half_filled(patch: pytest.MonkeyPatch) -> None:
    right = in_place.filled
    patch.setattr(in_place, "filled", lambda shape, rank, state: right(shape, rank, (state[0], False)))


MUTATIONS = (
    Mutation("the gate opens when this rank has regrouped, not when all have", _gate_opens_for_one, ("I7",)),
    Mutation("a replacement that is not filled counts as a holder", _vacant_counts_as_holder, ("I3", "I5"), ("kill",), 2),
    Mutation("a process is ended that holds a shard", _ends_a_holder, ("I9",), ("raise", "kill"), 2),
    Mutation("a replacement that is half filled has regrouped", _half_filled, ("I18",)),
)  # fmt: skip


@pytest.mark.parametrize(
    "mutation",
    [pytest.param(each, marks=LONG if each.patch is _ends_a_holder else ()) for each in MUTATIONS],
    ids=lambda mutation: mutation.name,
)
def test_a_machine_that_regroups_wrongly_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each breaks an invariant, and the search says which. One needs two faults; the simulation shows it within 40 jobs (`mutations.py`)."""
    mutation.patch(monkeypatch)
    shape = replace(IN_PLACE, faults=mutation.faults, kinds=mutation.kinds, each_once=len(mutation.kinds) > 1)
    found = searched(shape, limit=400_000)
    print(f"{mutation.name}: {found.violation!r} after {found.states} states")
    assert any(name in found.violation for name in mutation.caught_as), found.violation


def _regroups_before_it_is_published(patch: pytest.MonkeyPatch) -> None:
    right = regroup.regroup_or_write

    def wrong(state: Any, now: float, out: Any) -> Any:
        return right(replace(state, settings=replace(state.settings, publish_first=False)), now, out)

    patch.setattr(stages, "regroup_or_write", wrong)


def test_ranks_that_regroup_before_the_step_is_published_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is to be published first: I20."""
    _regroups_before_it_is_published(monkeypatch)
    found = searched(replace(IN_PLACE, kinds=("kill",), publish_first=True), limit=400_000)
    print(f"{found.violation!r} after {found.states} states")
    assert found.violation.startswith("I20"), found.violation


class HalfWay(World):
    """Begins where a rank has died, all are ordered to regroup, and one of them has lost its stream with the order on it."""

    def start(self) -> Situation:
        situation = super().start()
        for action in (("ready", 0), ("ready", 1), ("ready", 2), ("kill", 2)):
            situation = self.apply(situation, action)
        while not any(isinstance(self.of_messages.values[number], Regroup) for number in situation.down[2]):
            messages = [action for action in self.ordinary(situation) if action[0] in ("receive", "deliver", "exit")]
            situation = self.apply(situation, messages[0])
        return self.apply(situation, ("break", 1))


@pytest.mark.parametrize("mutated", [False, True])
def test_a_standby_opens_no_gate_while_a_rank_is_half_way(mutated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From there on the controller may die at any moment. What takes over must not have the rank without the order train on."""
    if mutated:
        monkeypatch.setattr(stages, "decide_takeover", lambda state, now, out: state)
    shape = replace(IN_PLACE, faults=3, kinds=("kill", "break", "controller kill"), each_once=True)
    found = Search(HalfWay(shape)).run(400_000)
    print(f"{found.violation!r} after {found.states} states, {found.seconds:.1f} s: {dict(found.outcomes)}")
    assert found.violation.startswith("I17") if mutated else not found.violation, described(found)
    assert mutated or found.complete


def test_pairs_are_searched_from_the_command_line() -> None:
    """A death or an exception, and another fault of each kind."""
    for first in ("kill", "raise"):
        assert {kind for pair in PAIRS_IN_PLACE if first in pair for kind in pair} == set(FAULTS_IN_PLACE)
    command = [
        sys.executable,
        "-m",
        "tests.model.pairs",
        "--in-place",
        "--workers",
        "1",
        "--most",
        "300",
        "replace fails+kill",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1: kill + replace fails: 300 situations" in done.stdout
