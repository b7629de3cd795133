"""What the harness reads of a job while it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ttp.chaos.observed.recorder import Recorder
from ttp.controller.journal import set_aside


def test_journals_are_read_wherever_an_attempt_keeps_them(tmp_path: Path) -> None:
    """The second attempt's first directory had died: its journal is in the next one; no line is read twice."""
    watch = Recorder()
    for start, name in enumerate(("a", "b", "b")):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        watch.receive({"rank": 0}, (1, start), {"type": "log_dir", "unix_s": 1.0, "log_dir": str(folder)})
        line = {"unix_s": float(start), "event": "assembled", "fields": {"world_size": 2}}
        (folder / f"journal_{start}.jsonl").write_text(json.dumps(line) + "\n")
    assert sorted(line["unix_s"] for line in watch.look()) == [0.0, 1.0, 2.0]
    assert watch.look() == []


def test_a_journal_that_a_later_launch_has_moved_aside_is_read_to_its_end(tmp_path: Path) -> None:
    """The new one has its name, and is shorter; no line is read twice."""

    def line(unix_s: float) -> str:
        return json.dumps({"unix_s": unix_s, "event": "assembled", "fields": {"world_size": 2}}) + "\n"

    watch, path = Recorder(), tmp_path / "journal_0.jsonl"
    watch.receive({"rank": 0}, (1, 0), {"type": "log_dir", "unix_s": 1.0, "log_dir": str(tmp_path)})
    path.write_text(line(1.0) + line(2.0))
    assert len(watch.look()) == 2
    with open(path, "a", encoding="utf-8") as file:
        file.write(line(3.0))
    set_aside(path)
    path.write_text(line(4.0))
    assert sorted(each["unix_s"] for each in watch.look()) == [3.0, 4.0]
    assert watch.look() == []


def test_a_journal_that_is_moved_aside_between_two_looks_at_its_folder_is_read_at_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch that begins moves it between the harness' listing and its opening."""
    watch, path = Recorder(), tmp_path / "journal_0.jsonl"
    watch.receive({"rank": 0}, (1, 0), {"type": "log_dir", "unix_s": 1.0, "log_dir": str(tmp_path)})
    path.write_text(json.dumps({"unix_s": 1.0, "event": "assembled", "fields": {"world_size": 2}}) + "\n")
    listing = Path.glob

    def glob(folder: Path, pattern: str) -> list[Path]:
        found = list(listing(folder, pattern))
        if pattern.startswith("earlier"):
            set_aside(path)
        return found

    monkeypatch.setattr(Path, "glob", glob)
    assert watch.look() == []
    assert [line["unix_s"] for line in watch.look()] == [1.0]
