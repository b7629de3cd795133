"""What a rehearsal has shown is kept, for the program that it was shown for and for no other; a file that is none is named and ignored."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ttp.errors import NotAsBefore
from ttp.regroup import kept_result
from ttp.regroup.kept_result import (
    MOST_BYTES,
    MOST_RESULTS,
    NAME,
    KeptResults,
    RehearsedProgram,
    agreed_program,
    read,
    this_program,
)

PROGRAM = RehearsedProgram("script", "0.1.0", "2.13.0", "layout")
ROW = {"script": "s", "ttp": "t", "torch": "c", "layout": "l", "step": 3, "unequal": ""}


def kept(folder: Path, program: RehearsedProgram = PROGRAM, attempt: int = 0) -> KeptResults:
    return KeptResults([str(folder)], program, attempt)


def test_what_was_equal_is_kept_and_asks_for_no_other_rehearsal(tmp_path: Path) -> None:
    assert "was not rehearsed yet: run the job's first steps once with TTP_REHEARSE=every:3" in kept(tmp_path).why_not()
    results = kept(tmp_path)
    results.passed(3)
    results.passed(6)
    assert kept(tmp_path).why_not() == "" and [result.step for result in read(tmp_path)] == [3]
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"script": "x"}, "with another script"),
        ({"ttp": "0.2.0"}, "with ttp '0.2.0' (but '0.1.0')"),
        ({"torch": "2.14.0"}, "with torch '2.14.0' (but '2.13.0')"),
        ({"layout": "x"}, "with another layout of ranks"),
        ({"layout": "x", "script": "y"}, "with another script and another layout of ranks"),
    ],
)
def test_whatever_changes_is_named_and_has_to_be_rehearsed_again(tmp_path: Path, changed: Any, named: str) -> None:
    kept(tmp_path).passed(3)
    other = replace(PROGRAM, **changed)
    assert f"train() was not rehearsed {named}: run" in kept(tmp_path, other).why_not()
    kept(tmp_path, other).passed(3)
    assert kept(tmp_path, other).why_not() == "" == kept(tmp_path).why_not(), "both stay"


def test_a_later_step_that_is_unequal_takes_it_back_for_all_attempts_of_the_job(tmp_path: Path) -> None:
    results = kept(tmp_path)
    results.passed(3)
    results.failed(6, "grad_norm was 1.0, then 2.0")
    results.passed(9)
    why = kept(tmp_path).why_not()
    assert "cannot be entered again, as the rehearsal of step 6 has shown: 'grad_norm was 1.0, then 2.0'" in why
    kept(tmp_path, attempt=1).passed(9)
    assert kept(tmp_path).why_not() == why, "a restart of the same job may be past what was unequal"
    same = kept(tmp_path)
    same.failed(6, "grad_norm was 1.0, then 2.0")
    same.passed(9)
    assert kept(tmp_path).why_not() == why, "of one process the unequal one counts, whatever follows"
    kept(tmp_path).passed(3)
    assert kept(tmp_path).why_not() == "", "the job was started anew, by somebody who has mended it"


def test_results_do_not_grow_without_bound(tmp_path: Path) -> None:
    for number in range(MOST_RESULTS + 3):
        kept(tmp_path, replace(PROGRAM, layout=str(number))).failed(3, "x" * 100_000)
    rows = read(tmp_path)
    assert [row.program.layout for row in rows] == [str(number) for number in range(3, MOST_RESULTS + 3)]
    assert (tmp_path / NAME).stat().st_size < MOST_BYTES


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "Expecting"),
        ("[]", "expected a mapping"),
        ("[" * 100_000, "nested too deep"),
        (json.dumps({"format": 2, "results": []}), "format: got 2, expected an integer from 1 to 1"),
        (json.dumps({"format": 1}), "results: is missing"),
        (json.dumps({"format": 1, "results": [3]}), "results[0]: got 3, expected a mapping"),
        (json.dumps({"format": 1, "results": [{**ROW, "script": 5}]}), "results[0].script: got 5"),
        (json.dumps({"format": 1, "results": [{**ROW, "step": -1}]}), "results[0].step: got -1"),
        (json.dumps({"format": 1, "results": [{**ROW, "unequal": None}]}), "results[0].unequal: got None"),
        (json.dumps({"format": 1, "results": [{**ROW, "torch": "\ud800"}]}), "results[0].torch"),
        (" " * (MOST_BYTES + 1), f"expected at most {MOST_BYTES} bytes"),
    ],
    ids=range(11),
)
def test_a_file_that_is_none_is_named_in_a_line_and_ignored(
    tmp_path: Path, content: str, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / NAME).write_text(content)
    assert "was not rehearsed yet" in kept(tmp_path).why_not()
    [line] = caplog.messages
    assert named in line and str(tmp_path / NAME) in line and "\n" not in line and len(line) < 600
    kept(tmp_path).passed(3)
    assert kept(tmp_path).why_not() == "", "the next result takes its place"


def test_a_pipe_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / NAME)
    assert "was not rehearsed yet" in kept(tmp_path).why_not() and "expected a regular file" in caplog.text


def test_a_directory_that_takes_nothing_ends_no_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept(tmp_path / "gone").passed(3)
    assert "the rehearsal's result is not kept" in caplog.text


def test_any_of_the_directories_may_have_it(tmp_path: Path) -> None:
    """Which of them serves first may be another at each attempt."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    kept(tmp_path / "second").passed(3)
    both = KeptResults([str(tmp_path / "first"), str(tmp_path / "second")], PROGRAM, 0)
    assert both.why_not() == ""


def test_a_program_without_a_file_is_not_known_again(tmp_path: Path) -> None:
    nameless = replace(PROGRAM, script="")
    kept(tmp_path, nameless).passed(3)
    assert "because it has no file" in kept(tmp_path, nameless).why_not()


def test_all_ranks_keep_results_of_rank_0s_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a rank that fails would leave what another has kept under its own key."""
    monkeypatch.setattr(kept_result, "broadcast_json", lambda value, device: asdict(PROGRAM))
    assert agreed_program(2, torch.device("cpu"), "{this rank's}") == PROGRAM
    monkeypatch.setattr(kept_result, "broadcast_json", lambda value, device: value)
    assert agreed_program(2, torch.device("cpu"), "{}") == this_program(2, "cpu", "{}")


@pytest.mark.parametrize("name", ["script", "ttp", "torch"])
def test_a_process_in_a_lost_ones_place_that_runs_something_else_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file was changed while the job ran, or is another one on a spare node: this rank would train with other code than the others."""
    mine = this_program(2, "cpu", "{}")
    before = {"script": mine.script, "ttp": mine.ttp, "torch": mine.torch}
    kept_as: list[object] = []

    def of_this_rank(what: str, value: object) -> object:
        kept_as.append((what, value))
        return before

    monkeypatch.setattr(kept_result, "of_this_rank", of_this_rank)
    monkeypatch.setattr(kept_result, "broadcast_json", lambda value, device: value)
    assert agreed_program(2, torch.device("cpu"), "{}") == mine and kept_as == [("program", before)]
    before = before | {name: "another"}
    with pytest.raises(NotAsBefore, match=rf"changed on this node since the job began \({name}\)"):
        agreed_program(2, torch.device("cpu"), "{}")


def test_a_script_is_known_by_its_content_and_by_that_of_its_own_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, part = tmp_path / "train.py", tmp_path / "part.py"
    script.write_text("import part")
    part.write_text("lr = 1")
    main, module = ModuleType("__main__"), ModuleType("part")
    main.__file__, module.__file__ = str(script), str(part)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setitem(sys.modules, "part", module)

    def program(ranks: int = 2, device: str = "cpu", layout: str = "{}") -> RehearsedProgram:
        return this_program(ranks, device, layout)

    first = program()
    assert first == program() and len(first.script) == 64
    part.write_text("lr = 2")
    assert program().script != first.script
    part.write_text("lr = 1")
    assert program() == first
    script.write_text("import part  # changed")
    assert program().script != first.script
    script.write_text("import part")
    assert len({program(3).layout, program(device="cuda").layout, program(layout="{1}").layout, first.layout}) == 4
    part.unlink()
    assert program().script != first.script
    main.__file__ = None
    assert program().script == ""


def test_installed_packages_are_known_by_their_versions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name for name, _ in kept_result._own_modules()}
    assert not names & {"torch", "ttp.regroup.kept_result", "json", "pytest"}
