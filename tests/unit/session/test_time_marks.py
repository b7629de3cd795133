"""Rank 0 notes when its first step is finished, and how long saves take; what the file holds besides that is passed over."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from tests.unit.session.test_last_step import trained
from tests.waiting import until
from ttp.exchange import time_marks
from ttp.exchange.time_marks import SAVED, STEPPED, Mark, TimeMarks


def test_a_session_notes_its_first_step_and_every_save(tmp_path: Path) -> None:
    session = trained(tmp_path, 3)
    session.save()
    session.close()
    until(lambda: len(time_marks.read(session.log_dir, 0, 0.0)) == 2, "the threads that write have ended")
    first, saved = time_marks.read(session.log_dir, 0, 0.0)
    assert (first.what, first.step, saved.what, saved.step) == (STEPPED, 1, SAVED, 3)
    assert 0.0 < saved.took_s < 60.0 and first.unix_s < saved.unix_s
    assert time_marks.read(session.log_dir, 0, saved.unix_s) == [saved], "an earlier job's marks are not this one's"


def test_an_unprotected_session_notes_nothing(tmp_path: Path) -> None:
    session = trained(tmp_path, 1, enable=False)
    session.save()
    session.close()
    assert list(tmp_path.rglob("times_*")) == []


@pytest.mark.parametrize("line", ["", "{", "[]", '{"event": "stepped"}', '{"unix_s": "x", "event": "saved", "step": 1, "took_s": 1}', "7"])  # fmt: skip
def test_a_line_without_a_mark_costs_itself_alone(tmp_path: Path, line: str) -> None:
    good = json.dumps({"unix_s": 5.0, "event": "stepped", "step": 3, "took_s": 0.0})
    time_marks.path_of(tmp_path, 0).write_text(f"{line}\n{good}\n")
    assert time_marks.read(tmp_path, 0, 0.0) == [Mark(5.0, STEPPED, 3)]


def test_a_file_that_is_not_there_or_no_text_has_no_marks(tmp_path: Path) -> None:
    assert time_marks.read(tmp_path, 0, 0.0) == []
    time_marks.path_of(tmp_path, 0).write_bytes(b"\xff\xfe\n")
    assert time_marks.read(tmp_path, 0, 0.0) == []


def test_a_disk_that_hangs_delays_no_step(tmp_path: Path) -> None:
    """A pipe that nothing reads: the open of it for writing does not return."""
    os.mkfifo(path := time_marks.path_of(tmp_path, 0))
    before = set(threading.enumerate())
    TimeMarks(tmp_path, 0).stepped(1)
    (writer,) = [each for each in set(threading.enumerate()) - before if each.name == "ttp-mark"]
    assert writer.is_alive() and writer.daemon
    assert '"step": 1' in path.read_text(), "what is read lets it go"
    writer.join(10.0)
    assert not writer.is_alive()


def test_where_nothing_can_be_written_nothing_is_raised(tmp_path: Path) -> None:
    TimeMarks(tmp_path / "missing", 0).saved(3, 1.0)
    assert not (tmp_path / "missing").exists()
