"""What an observer reads of a job's growing files."""

from __future__ import annotations

from pathlib import Path

from ttp.chaos.observed.training_job import GrowingLines


def test_lines_are_read_whole_and_once(tmp_path: Path) -> None:
    """A line without its end is still being written; what was read before is not read again; what is shorter is another file."""
    path = tmp_path / "metrics.jsonl"
    lines = GrowingLines(path)
    assert lines.read() == []
    with open(path, "a") as file:
        file.write('{"step": 1}\n{"st')
        file.flush()
        assert lines.read() == [{"step": 1}]
        file.write('ep": 2}\n\n')
        file.flush()
        assert lines.read() == [{"step": 1}, {"step": 2}]
        lines.read().clear()
        assert lines.read() == [{"step": 1}, {"step": 2}], "the caller's list is its own"
    path.write_text('{"step": 7}\n')
    assert lines.read() == [{"step": 7}]
