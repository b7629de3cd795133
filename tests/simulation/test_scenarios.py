"""Every script of `scenarios/` gives its golden transcript, keeps the invariants, and its faults strike."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.script import SCRIPTS, compare, parse, play
from tests.simulation.script_faults import ScriptError


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script_gives_its_golden_transcript(path: Path) -> None:
    """A changed transcript is shown as a diff; `python -m tests.simulation.script --update` takes it over."""
    wrong, _ = compare(path)
    assert not wrong, f"\n{wrong}"


def test_every_script_begins_with_what_it_shows() -> None:
    """The first line is a sentence for people, and no two scripts say the same."""
    first = [path.read_text(encoding="utf-8").splitlines()[0] for path in SCRIPTS]
    assert all(line.startswith("# ") and line.endswith(".") for line in first)
    assert len(set(first)) == len(first) >= 15


def test_a_script_plays_the_same_twice() -> None:
    """Nothing in it is random."""
    script = parse("standbys 1\nkill rank 2 when UPDATING 3\nkill controller c0 when writing\n---\n")
    assert play(script) == play(script)


def test_a_fault_that_never_strikes_is_reported() -> None:
    """A script whose moment never comes shows nothing."""
    _, found = play(parse("kill rank 1 when UPDATING 99\n---\n"))
    assert found == ["never came to: kill rank 1 when UPDATING 99"]


def test_a_violated_invariant_is_reported() -> None:
    """A job that loses a rank cannot be called harmless."""
    _, found = play(parse("harmless\nkill rank 2 when UPDATING 3\n---\n"))
    assert found and found[0].startswith("I7: a false alarm cost the job")


@pytest.mark.parametrize("line", ["kil rank 2", "kill rank two", "layout cube 8", "stop rank 1 for ever"])
def test_a_line_without_meaning_is_refused(line: str) -> None:
    """The error names the line and what may be said."""
    with pytest.raises(ScriptError, match="expected"):
        play(parse(f"{line}\n---\n"))
