"""What is kept of files between two looks: one value for each, until the file changes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.unit.checkpoint.conftest import make_job
from tests.unit.status.jobs import comes, incident, journal
from ttp.launch.report.journals import Line, read_journals
from ttp.proto.messages import Cause, CauseKind
from ttp.status import history, look
from ttp.status.find_job import Job
from ttp.status.remembered import Remembered, state_of


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The attempts whose journals were read, one entry for each time."""
    found: list[int] = []

    def read(log_dir: Path, start: int, begun_unix_s: float) -> Sequence[Line]:
        found.append(start)
        return read_journals(log_dir, start, begun_unix_s)

    monkeypatch.setattr(history, "read_journals", read)
    monkeypatch.setattr(history, "_attempts", Remembered(99))
    return found


def test_a_running_attempt_is_kept_once_however_many_lines_it_gets(tmp_path: Path, reads: list[int]) -> None:
    journal(tmp_path, 0, *comes(0.0))
    journal(tmp_path, 1, *comes(20.0))
    for second in range(5):
        journal(tmp_path, 1, (30.0 + second, "suspect", {"rank": 0, "why": "silent"}))
        assert history.read(tmp_path).attempts[-1].last_unix_s == pytest.approx(1_700_000_030.0 + second)
    assert reads == [0, *[1] * 5] and len(history._attempts) == 2


def test_that_a_journal_was_read_does_not_have_it_read_again(tmp_path: Path, reads: list[int]) -> None:
    """A mount with strictatime notes each look."""
    path = journal(tmp_path, 0, *comes(0.0))
    for later_s in range(3):
        found = path.stat()
        os.utime(path, ns=(found.st_atime_ns + later_s * 10**9, found.st_mtime_ns))
        assert len(history.read(tmp_path).attempts) == 1
    assert reads == [0]


def test_a_journal_that_is_written_anew_is_read_again(tmp_path: Path, reads: list[int]) -> None:
    path = journal(tmp_path, 0, *comes(0.0))
    assert history.read(tmp_path).faults == ()
    path.unlink()
    journal(tmp_path, 0, *comes(0.0), incident(12.0, 1.0, 40))
    assert len(history.read(tmp_path).faults) == 1 and reads == [0, 0]


def test_the_state_of_a_file_is_its_size_its_time_and_which_file_it_is(tmp_path: Path) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_bytes(b"1")
    first, times = state_of([path]), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    path.write_bytes(b"12")
    os.utime(path, ns=times)
    longer = state_of([path])
    os.utime(path, ns=(times[0], times[1] + 1))
    later = state_of([path])
    other.write_bytes(b"21")
    os.utime(other, ns=(times[0], times[1] + 1))
    os.replace(other, path)
    assert len({first, longer, later, state_of([path])}) == 4


def test_the_key_that_was_asked_for_longest_ago_goes_first() -> None:
    kept: Remembered[str, str] = Remembered(2)
    asked: list[str] = []

    def read(key: str) -> str:
        asked.append(key)
        return key

    for key in ("a", "b", "a", "c", "a", "b"):
        assert kept.get(key, (), partial(read, key)) == key
    assert asked == ["a", "b", "c", "b"] and len(kept) == 2


def test_a_checkpoint_that_has_taken_another_ones_place_is_shown(tmp_path: Path) -> None:
    journal(tmp_path / "log", 0, *comes(0.0))
    folder = tmp_path / "checkpoints"
    path = make_job().save(folder, 7)
    shown = look.look(Job(tmp_path / "log", "")).checkpoints
    shutil.rmtree(path)
    make_job().save(folder, 7, cause=Cause(CauseKind.PREEMPTED, (0,), "SIGTERM"))
    shown += look.look(Job(tmp_path / "log", "")).checkpoints
    assert [row.cause for row in shown] == ["exited", "preempted"]
