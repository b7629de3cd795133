"""`make flaky`: repeats test files beside busy processes, counts every failure, and goes on where it was."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests import flaky
from tests.pauses import sitecustomize
from tests.rooms import ROOT
from ttp.text.wording import ranks_text

SOMETIMES = """
from pathlib import Path

def test_fails_the_second_time(tmp_path):
    count = Path(__file__).with_name("count")
    seen = int(count.read_text()) if count.exists() else 0
    count.write_text(str(seen + 1))
    (tmp_path / "left").write_text(f"run {seen + 1}")
    assert seen != 1, "sometimes"
"""


@pytest.fixture(autouse=True)
def kept_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What failing tests of these tests wrote goes with them."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.long
def test_a_test_that_fails_once_is_found_and_a_run_that_was_interrupted_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """First one run, then all; the file of another commit is not used."""
    (tmp_path / "test_sometimes.py").write_text(SOMETIMES)
    folder = tmp_path / "state"
    arguments = [str(tmp_path / "test_sometimes.py"), "--busy", "1", "--workers", "0", "--folder", str(folder)]
    assert flaky.main([*arguments, "--times", "1"]) == 0
    assert flaky.main([*arguments, "--times", "3"]) == 1
    assert (tmp_path / "count").read_text() == "3", "no run was done twice"
    said = capsys.readouterr().out
    assert "3 of 3 runs done, 1 failed tests" in said and "test_fails_the_second_time, run 2: see " in said
    (output,) = folder.glob("*_2.txt")
    assert "sometimes" in output.read_text() and list(folder.glob("*.txt")) == [output]
    wrote = Path(output.read_text().rpartition("what the tests wrote is in ")[2].strip())
    assert [path.read_text() for path in wrote.rglob("left")] == ["run 2"], "kept where one failed"
    state = json.loads((folder / "state.json").read_text())
    assert len(state["failures"]) == 1
    (folder / "state.json").write_text(json.dumps(state | {"commit": "another"}))
    assert flaky.main([*arguments, "--times", "1", "--minutes", "0"]) == 0
    assert "0 of 1 runs done" in capsys.readouterr().out


def test_a_file_that_cannot_be_collected_has_failed(tmp_path: Path) -> None:
    """pytest reports no test of it."""
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    arguments = [str(tmp_path), "--busy", "0", "--workers", "0", "--times", "1", "--folder", str(tmp_path / "state")]
    assert flaky.main(arguments) == 1


def test_other_marks_are_other_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was run with the default ones does not count for them, nor the other way round."""
    (tmp_path / "test_short.py").write_text("def test_short(): pass\n")
    arguments = [str(tmp_path / "test_short.py"), "--busy", "0", "--workers", "0", "--times", "1"]
    arguments += ["--folder", str(tmp_path / "state")]
    assert flaky.main(arguments) == 0 and "run 1 of 1: passed" in capsys.readouterr().out
    assert flaky.main([*arguments, "--marks", "long"]) == 0 and "run 1 of 1: passed" in capsys.readouterr().out
    assert flaky.main([*arguments, "--marks", "long"]) == 0 and "run 1 of 1" not in capsys.readouterr().out


TRACED = """
import os, subprocess, sys, threading

def test_threads_and_processes_of_a_test_are_followed_and_the_test_is_with_its_own_lines():
    code = "import sys; print(sys.gettrace())"
    child = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    followed = ["trace_calls" in text for text in (str(sys.gettrace()), str(threading.gettrace()), child)]
    assert followed == [os.environ.get("PAUSES", "").endswith("tests"), True, True]
"""


def test_threads_and_processes_that_a_test_starts_pause_where_they_are_asked_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of runs with pauses is not that of runs without."""
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # a process that has it from its start is one that a test has started
    (tmp_path / "test_traced.py").write_text(TRACED)
    arguments = [str(tmp_path / "test_traced.py"), "--busy", "0", "--workers", "0", "--times", "1"]
    arguments += ["--folder", str(tmp_path / "state")]
    assert flaky.main([*arguments, "--pauses", "0.01"]) == 0
    assert flaky.main([*arguments, "--pauses", "0.01", "--lines-of", "tests"]) == 0
    assert flaky.main(arguments) == 1 and "run 1 of 1: FAILED" in capsys.readouterr().out


def sorted_here(numbers: list[int]) -> list[int]:
    return sorted(numbers)


def test_each_thread_pauses_once_in_a_test_at_each_of_the_chosen_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a share of 1 at every line; the seed chooses, for each test anew. Of ttp's lines, or of the tests'."""
    paused: list[float] = []
    monkeypatch.setattr(sitecustomize, "sleep", paused.append)

    def in_a_thread(
        share: float, times: int = 1, what: Callable[[list[int]], object] = ranks_text, of_tests: bool = False
    ) -> list[float]:
        before = threading.gettrace()
        paused.clear()
        sitecustomize.Pauses("1", share, of_tests=of_tests).start(here=False)
        try:
            thread = threading.Thread(target=lambda: [what([0, 1, 5]) for _ in range(times)])
            thread.start()
            thread.join()
        finally:
            threading.settrace(before)
        return [each for each in paused if each > 0.0]

    every = in_a_thread(1.0)
    assert every and every == in_a_thread(1.0, times=2) and max(every) <= sitecustomize.LONGEST_S
    assert len(in_a_thread(0.3)) < len(every) and in_a_thread(0.0) == [] == in_a_thread(1.0, what=sum)
    of_tests = [len(in_a_thread(1.0, what=what, of_tests=True)) for what in (ranks_text, sorted_here)]
    assert of_tests[1] == of_tests[0] + 1 and in_a_thread(1.0, what=sorted_here) == []
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "another")
    assert in_a_thread(1.0) != every


LATE = """
import sys
from ttp.text.wording import ranks_text

class Late:
    def __del__(self, call=ranks_text):
        call([0, 1, 5])

import inspect
inspect.late = Late()
"""


def test_an_interpreter_that_ends_is_followed_no_more() -> None:
    """What the file has imported is gone then: a line of a traceback would be in what the process prints."""
    environment = {**flaky.pausing(1, 0.001, "ttp"), "PYTEST_CURRENT_TEST": "this one"}
    ended = subprocess.run([sys.executable, "-c", LATE], cwd=ROOT, env=environment, capture_output=True, check=True)
    assert ended.stderr == b""


def test_a_share_of_the_lines_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        flaky.main(["--pauses", "2"])
    assert "invalid --pauses: got 2, expected a share of the lines, 0 to 1, as in 0.03" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        flaky.main(["--lines-of", "tests"])
    assert "invalid --lines-of: got tests without --pauses" in capsys.readouterr().err


def test_busy_processes_are_gone_afterwards() -> None:
    with flaky.busy(2) as processes:
        assert all(process.poll() is None for process in processes)
    assert all(process.poll() is not None for process in processes)


def test_a_place_without_tests_is_refused_by_name() -> None:
    with pytest.raises(SystemExit, match="invalid place: got 'tests/nowhere'"):
        flaky.places_of(["tests/nowhere"])


STARTS = {
    *("subprocess", "Popen", "multiprocessing", "fork", "start_processes", "ForkServer", "HTTPServer", "grpc"),
    *("start_controller", "JobController", "TrainingJob"),
}
"""Whoever names one of these starts a process, or a real server."""


def test_every_default_place_has_tests_and_none_is_in_another() -> None:
    places = flaky.places_of(flaky.PLACES)
    assert not [
        (one, other) for one in places for other in places if one != other and f"{one}/".startswith(f"{other}/")
    ]


def test_whatever_starts_processes_is_in_a_default_place_or_left_out_for_a_reason() -> None:
    """By itself, by what it imports of the tests, or by a fixture."""
    starts = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py") if starting(path)}
    assert "tests/unit/mirror/test_upload.py" in starts, "a server that a fixture starts is not seen any more"
    assert "tests/unit/trainer/test_tokenizer.py" not in starts, "a fixture that starts nothing counts"
    missing = {path for path in starts if not within(path, (*flaky.PLACES, *flaky.LEFT_OUT))}
    assert not missing, f"add these to PLACES of tests/flaky.py, or to LEFT_OUT with the reason: {sorted(missing)}"
    stale = [place for place in flaky.LEFT_OUT if not any(within(path, (place,)) for path in starts)]
    assert not stale, f"nothing there starts processes: {stale}"
    assert not [place for place in flaky.LEFT_OUT if within(place, flaky.PLACES)] and all(flaky.LEFT_OUT.values())


def within(path: str, places: tuple[str, ...]) -> bool:
    return any(f"{path}/".startswith(f"{place}/") for place in places)


def starting(path: Path) -> set[str]:
    """Return the names in a test file by which it starts processes."""
    fixtures: set[str] = set()
    for folder in path.parents:
        if (conftest := folder / "conftest.py").exists() and folder.is_relative_to(ROOT / "tests"):
            fixtures |= starters()[conftest]
    return identifiers(tree(path)) & (STARTS | fixtures | imported(path, starters()))


@cache
def starters() -> dict[Path, set[str]]:
    """Return, of each file from which tests take something, its functions and classes that start processes, and what it imports of others' that do."""
    every = sorted((ROOT / "tests").rglob("*.py"))
    sources = {source for path in every for module, name, _ in imports(path) for source in (module, module / name)}
    files = [path for path in every if path.name == "conftest.py" or path.with_suffix("") in sources]
    parts = {
        path: {one.name: identifiers(one) for one in tree(path).body if isinstance(one, ast.FunctionDef | ast.ClassDef)}
        for path in files
    }
    found: dict[Path, set[str]] = {path: set() for path in files}
    count = -1
    while count < (count := sum(map(len, found.values()))):
        for path in files:
            found[path] |= imported(path, found)
            found[path] |= {name for name, used in parts[path].items() if used & (STARTS | found[path])}
    return found


def imported(path: Path, found: dict[Path, set[str]]) -> set[str]:
    """Return what of `found` a file imports."""
    names: set[str] = set()
    for source, name, here in imports(path):
        names |= found.get(source / f"{name}.py", set())
        names |= {here} if name in found.get(source.with_suffix(".py"), ()) else set()
    return names


@cache
def imports(path: Path) -> list[tuple[Path, str, str]]:
    """Return the file (or folder) without its ending, the name there and the name here of all that a file imports from the tests."""
    return [
        (ROOT / str(node.module).replace(".", "/"), alias.name, alias.asname or alias.name)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("tests")
        for alias in node.names
    ]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def identifiers(node: ast.AST) -> set[str]:
    """Return the names in a part of a file, those of fixtures too."""
    return {name for each in ast.walk(node) for name in _names(each)}


def _names(node: ast.AST) -> list[str]:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
            return [name]
        case ast.alias(name=name):
            return name.split(".")
        case ast.Call(func=ast.Attribute(attr="usefixtures"), args=arguments):
            return [str(one.value) for one in arguments if isinstance(one, ast.Constant)]
    return []
