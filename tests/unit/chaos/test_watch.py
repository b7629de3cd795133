"""What the harness reads of a job while it runs."""

from __future__ import annotations

import json
from pathlib import Path

from ttp.chaos.watch import Watch


def test_journals_are_read_wherever_a_start_keeps_them(tmp_path: Path) -> None:
    """The second start's first directory had died: its journal is in the next one; no line is read twice."""
    watch = Watch()
    for start, name in enumerate(("a", "b", "b")):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        watch.hear({"rank": 0}, (1, start), {"type": "log_dir", "unix_s": 1.0, "log_dir": str(folder)})
        line = {"unix_s": float(start), "event": "assembled", "fields": {"world_size": 2}}
        (folder / f"journal_{start}.jsonl").write_text(json.dumps(line) + "\n")
    assert sorted(line["unix_s"] for line in watch.look()) == [0.0, 1.0, 2.0]
    assert watch.look() == []
