"""The maker of mutants: what a test knows of is caught, what no test looks at survives, and the list of reasons is true."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rooms import imported, product
from tests.simulation.mutants.changes import LEFT_OUT, MODULES, ROOT, Mutant, mutants_of
from tests.simulation.mutants.equivalents import EQUIVALENT

TESTS = """
from ttp.controller.core.facts import pace as progress
from ttp.controller.core.facts.pace import ENOUGH, Pace, learn, suspects, unknown
from ttp.controller.core.facts.per_rank import PerRank
from ttp.controller.core.facts.pace import Place
from ttp.hang_limits import HangLimits
from ttp.proto.messages import Phase

LIMITS = HangLimits()


def test_the_last_of_two_is_suspect():
    places = PerRank.filled(2, Place(3, Phase.COMPUTE, False)).put(1, Place(2, Phase.COMPUTE, False))
    assert suspects(Pace(places), (0, 1)) == (1,)


def test_fewer_step_times_than_are_known_teach_nothing():
    pace = learn(unknown(2), 2, (1.0, 1.0), LIMITS)
    assert pace.durations == (1.0, 1.0)
    assert learn(pace, 2, (2.0,), LIMITS) is pace


def test_eight_are_enough():
    assert ENOUGH == progress.ENOUGH == 8


def test_a_pace_begins_at_step_0():
    assert unknown(2).front == 0


def test_notes_come_half_way():
    assert Pace(PerRank.filled(2, None), moved_at=10.0, limit_s=4.0).note_at == 12.0
"""
"""Tests of a machine that know of a few of its mutants."""

CAUGHT = (
    ("suspects", "min: max", "the_last_of_two"),
    ("learn", "steps <= pace.steps: Lt", "teach_nothing"),
    ("", "8: 9", "eight_are_enough"),
    ("", "0: 1", "begins_at_step_0"),
    ("Pace.note_at", "2: 3", "half_way"),
)
"""A condition and a call in a function, a constant that others import, a field's default, a property: (function, change, test)."""
SURVIVES = ("standstill", "len(named) > _NAMED: LtE")


def the(function: str, change: str) -> Mutant:
    found = [m for m in mutants_of("controller.core.facts.pace") if (m.function, m.change) == (function, change)]
    assert found, f"progress.{function} has no mutant '{change}' any more: choose another"
    return found[0]


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """What the command line says of these mutants, with these tests and no simulated jobs."""
    tests = tmp_path_factory.mktemp("mutants") / "test_small.py"
    tests.write_text(TESTS)
    chosen = [*(the(function, change) for function, change, _ in CAUGHT), the(*SURVIVES)]
    names = [word for mutant in chosen for word in ("--mutant", mutant.name)]
    command = [sys.executable, "-m", "tests.simulation.mutants", "--seeds", "0", "--all", "--tests", str(tests), *names]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize(
    ("function", "change", "test"), CAUGHT, ids=[function or change for function, change, _ in CAUGHT]
)
def test_what_a_test_knows_of_is_caught(
    tried: subprocess.CompletedProcess[str], function: str, change: str, test: str
) -> None:
    """By that test, wherever in the module the change is."""
    name = the(function, change).name
    (line,) = [line for line in tried.stdout.splitlines() if f"({name})" in line]
    assert line.startswith("caught by") and test in line, tried.stdout + tried.stderr


def test_what_no_test_looks_at_survives_and_is_printed_with_its_place(tried: subprocess.CompletedProcess[str]) -> None:
    """The exit status says so too."""
    mutant = the(*SURVIVES)
    (line,) = [line for line in tried.stdout.splitlines() if f"({mutant.name})" in line]
    assert (
        line
        == f"SURVIVED: controller/core/facts/pace.py:{mutant.line} ({mutant.name}) `{mutant.source}`: {mutant.change}"
    )
    assert tried.returncode == 1
    (row,) = [line for line in tried.stdout.splitlines() if "controller.core.facts.pace" in line and "│" in line]
    assert [cell.strip() for cell in row.split("│")][1:-1] == ["controller.core.facts.pace", "6", "5", "0", "1"]


def test_tests_that_fail_on_the_shipped_code_prove_nothing(tmp_path: Path) -> None:
    """They would catch every mutant: no mutant is tried."""
    failing = tmp_path / "test_failing.py"
    failing.write_text("def test_nothing_is_right():\n    assert False\n")
    command = [
        sys.executable,
        "-m",
        "tests.simulation.mutants",
        "--seeds",
        "0",
        "--module",
        "controller.core.ranks.stall",
    ]
    done = subprocess.run(
        [*command, "--tests", str(failing)], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 1 and "nothing_is_right" in done.stderr, done.stdout + done.stderr
    assert "caught" not in done.stdout


def test_every_module_has_mutants() -> None:
    """One that has moved would not be tried."""
    assert all(mutants_of(module) for module in MODULES)


def test_what_the_machines_import_and_what_the_simulation_runs_has_mutants_or_a_reason() -> None:
    """A new pure module, or an adapter that the simulation begins to run, cannot be left out unseen."""
    reached = _reached("ttp.controller.core.machine", "ttp.processor.core.machine", "ttp.processor.core.causes")
    for path in (ROOT / "tests" / "simulation").glob("*.py"):
        reached |= {name for name in imported(path) if _of_the_protocol(name)}
    packages = {name for name, path in product().items() if path.name == "__init__.py"}
    named = {f"ttp.{module}" for module in (*MODULES, *LEFT_OUT)}
    assert reached - packages <= named, f"neither in MODULES nor in LEFT_OUT: {sorted(reached - packages - named)}"
    assert not set(MODULES) & set(LEFT_OUT) and all(LEFT_OUT.values())


def _reached(*roots: str) -> set[str]:
    """Return these modules and what of the protocol they import, directly or not."""
    todo, seen = list(roots), set(roots)
    while todo:
        module = todo.pop()
        new = {name for name in imported(product()[module]) if _of_the_protocol(name)} - seen
        seen |= new
        todo += new
    return seen


def _of_the_protocol(module: str) -> bool:
    return module.startswith(("ttp.controller", "ttp.processor", "ttp.proto"))


def test_every_equivalent_is_still_a_mutant() -> None:
    """A row whose line was rewritten says nothing any more."""
    mutants = {(m.module, m.source, m.change) for module in MODULES for m in mutants_of(module)}
    rows = [row for listed in EQUIVALENT.values() for row in listed]
    stale = [row for row in rows if row not in mutants]
    assert not stale, f"rows of mutants that are no more: {stale}"
    assert len(set(rows)) == len(rows) and all(EQUIVALENT)
