"""`make flaky`: repeats test files beside busy processes, counts every failure, and goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import flaky

SOMETIMES = """
from pathlib import Path

def test_fails_the_second_time():
    count = Path(__file__).with_name("count")
    seen = int(count.read_text()) if count.exists() else 0
    count.write_text(str(seen + 1))
    assert seen != 1, "sometimes"
"""


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


def test_busy_processes_are_gone_afterwards() -> None:
    with flaky.busy(2) as processes:
        assert all(process.poll() is None for process in processes)
    assert all(process.poll() is not None for process in processes)


def test_a_place_without_tests_is_refused_by_name() -> None:
    with pytest.raises(SystemExit, match="invalid place: got 'tests/nowhere'"):
        flaky.places_of(["tests/nowhere"])


def test_every_default_place_has_tests() -> None:
    assert {Path(place).parts[1] for place in flaky.places_of(flaky.PLACES)} == {"unit", "parity", "chaos", "device"}
