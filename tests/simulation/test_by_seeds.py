"""`make mutants` tries the next mutants by random jobs alone, keeps what it has found, and goes on where it was."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.simulation.mutants import by_seeds
from tests.simulation.mutants.changes import MODULES, ROOT, mutants_of
from tests.simulation.mutants.equivalents import reason
from tests.simulation.mutants.not_by_seeds import NOT_BY_SEEDS
from tests.simulation.mutations import MUTATIONS

UNSEEN = ("controller.core.facts.pace", "standstill", "len(named) > _NAMED: LtE")


def name_of(module: str, function: str, change: str) -> str:
    found = [mutant.name for mutant in mutants_of(module) if mutant.function == function and change in mutant.change]
    assert found, f"{module}.{function} has no mutant '{change}' any more: choose another"
    return found[0]


def test_what_random_jobs_show_is_found_with_its_seed_and_not_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = name_of("controller.core.facts.decision", "decide", "not lacking: without not")
    given = ["--mutant", name, "--jobs", "60", "--state", str(tmp_path / "state.json")]
    assert by_seeds.main(given) == 0
    output = capsys.readouterr().out
    assert output.startswith("found by seed ") and f"({name})" in output and "1 of 1 mutants tried: 1 found" in output
    assert by_seeds.main(given) == 0
    assert capsys.readouterr().out.startswith("1 of 1 mutants tried: 1 found")


def test_what_they_do_not_show_is_said_and_more_jobs_begin_behind_those_that_were_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit status says so too."""
    name, path = name_of(*UNSEEN), tmp_path / "state.json"
    ranges: list[tuple[int, int]] = []
    look = by_seeds.look

    def watched(change: Callable[[], bool], first: int, count: int) -> by_seeds.Found:
        ranges.append((first, count))
        return look(change, first, count)

    monkeypatch.setattr(by_seeds, "look", watched)
    for jobs in ("2", "5"):
        assert by_seeds.main(["--mutant", name, "--jobs", jobs, "--state", str(path)]) == 1
        assert f"NOT FOUND by {jobs} seeds" in capsys.readouterr().out
    assert ranges == [(0, 2), (2, 3)]
    assert json.loads(path.read_text())["found"] == {name: {"jobs": 5, "by": ""}}


def named_rows() -> dict[str, str]:
    """Return the mutants of NOT_BY_SEEDS by name, with the unit tests that find them."""
    mutants = {(m.module, m.source, m.change): m for module in MODULES for m in mutants_of(module)}
    rows = {row: one.test for one in NOT_BY_SEEDS for row in one.rows}
    stale = [row for row in rows if row not in mutants or reason(mutants[row])]
    assert not stale, f"rows of mutants that are no more, or change nothing: {stale}"
    assert len(rows) == sum(len(one.rows) for one in NOT_BY_SEEDS) and all(one.rows for one in NOT_BY_SEEDS)
    return {mutants[row].name: test for row, test in rows.items()}


def test_what_random_jobs_are_known_not_to_find_is_reported_and_fails_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until they find it after all: then its row is wrong."""
    name, test = next(iter(named_rows().items()))
    given = ["--mutant", name, "--jobs", "2", "--state"]
    assert by_seeds.main([*given, str(tmp_path / "state.json")]) == 0
    output = capsys.readouterr().out
    assert output.startswith("not found by 2 seeds, as is known (") and f"; {test} finds it)" in output
    assert "0 found by seeds alone, 1 not found by 2 (1 of them as is known)" in output
    monkeypatch.setattr(by_seeds, "look", lambda change, first, count: by_seeds.Found(first + 1, "I1"))
    assert by_seeds.main([*given, str(tmp_path / "found.json")]) == 1
    assert "REMOVE ITS ROW" in capsys.readouterr().out


def test_the_document_lists_what_random_jobs_are_known_not_to_find() -> None:
    """Row for row, and how many wrong variants there are."""
    text = (ROOT / "docs/limits.md").read_text(encoding="utf-8").partition("## What random jobs do not find")[2]
    table = text[text.index("| small change |") :].partition("\n\n")[0].splitlines()[2:]
    assert table == [f"| {one.change} | {one.why} | `{one.test}` |" for one in NOT_BY_SEEDS]
    assert "The other nine, and ten of twenty that were tried later, are held" in text and len(NOT_BY_SEEDS) == 19
    assert f"Of the {len(MUTATIONS)} wrong variants by hand" in text


@pytest.mark.long
def test_unit_tests_find_what_random_jobs_do_not() -> None:
    """The ones that the table names."""
    rows = named_rows()
    for test in sorted(set(rows.values())):
        names = [word for name, by in rows.items() if by == test for word in ("--mutant", name)]
        command = [sys.executable, "-m", "tests.simulation.mutants", "--seeds", "0", *names]
        command += ["--tests", str(ROOT / "tests/unit/protocol" / test)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_change_of_the_code_begins_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "state.json"
    state = by_seeds.State("another", {"controller.core.dump.freeze:1": by_seeds.Found(5, "I1")})
    state.save(path)
    assert by_seeds.State.load(path, "another") == state
    assert by_seeds.State.load(path, by_seeds.code()).found == {}
    assert "begins anew" in capsys.readouterr().out


def test_so_many_in_one_go_and_the_next_ones_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In an order that is always the same, and not that of the files."""
    monkeypatch.setattr(by_seeds, "look", lambda change, first, count: by_seeds.Found(first + 1, "I1"))
    monkeypatch.setattr(by_seeds, "known", lambda mutant: None)
    given = ["--most", "3", "--state", str(tmp_path / "state.json")]
    for tried in (3, 6):
        assert by_seeds.main(given) == 0
        assert f"\n{tried} of {len(by_seeds.in_order(by_seeds.MACHINES))} mutants tried" in capsys.readouterr().out
    first = [mutant.name for mutant in by_seeds.in_order(by_seeds.MACHINES)[:6]]
    assert list(json.loads((tmp_path / "state.json").read_text())["found"]) == first
    assert len({name.split(":")[0] for name in first}) > 1


def test_a_change_that_changes_nothing_is_not_a_mutant() -> None:
    def fails() -> bool:
        raise AssertionError("changes nothing")

    with pytest.raises(RuntimeError, match="could not be made"):
        by_seeds.look(fails, 0, 1)


def test_the_machines_are_the_modules_that_are_not_adapters() -> None:
    assert set(by_seeds.ADAPTERS) | set(by_seeds.NOT_RANDOM) | set(by_seeds.MACHINES) == set(MODULES)
    assert "controller.core.dump.reassign" in by_seeds.MACHINES and "processor.core.transitions" in by_seeds.MACHINES


def test_a_mutant_that_is_not_there_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Trying nothing would pass."""
    with pytest.raises(SystemExit, match="2"):
        by_seeds.main(["--mutant", "controller.core.dump.freeze:9999"])
    assert "no mutant controller.core.dump.freeze:9999" in capsys.readouterr().err
