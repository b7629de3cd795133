"""What `ttp doctor` finds of a checkpoint directory, and that nothing of its looking stays."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ttp.doctor import save_directories
from ttp.doctor.finding import FAILED, OK, WARNING, Finding
from ttp.doctor.save_directories import CHECKPOINTS_MORE, SLOW_SYNC_S, CheckpointSize, check, measure

MIB = 1 << 20
DUMP = CheckpointSize(nbytes=8 * MIB, on_node=4 * MIB, local=False, timeout_s=120.0)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_directories, "MEASURED_BYTES", MIB)
    monkeypatch.setattr(save_directories, "CHUNK", MIB // 4)


def found_in(
    directory: Path, dump: CheckpointSize | None = DUMP, clock: Callable[[], float] | None = None
) -> dict[str, Finding]:
    """Return the findings by the last word of their names; of the first `directory`."""
    found = list(check(directory, dump, clock) if clock is not None else check(directory, dump))
    return {each.name.rpartition(", ")[2] if ", " in each.name else "directory": each for each in found}


def test_a_directory_that_serves_is_ok_and_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "iter_0000042").mkdir()
    found = found_in(tmp_path)
    assert list(found) == ["directory", "links", "speed", "room", "dump"]
    assert {each.status for each in found.values()} == {OK}
    assert all(float(value) > 0 for value in found["speed"].figures.values())
    assert os.listdir(tmp_path) == ["iter_0000042"]


def test_a_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    found = found_in(tmp_path / "output" / "checkpoints")
    assert found["directory"].status == OK and f"will be made in {tmp_path}" in found["directory"].found
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["file", "file/below", "gone/below"])
def test_what_takes_no_checkpoint_fails_in_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "gone").symlink_to(tmp_path / "file")
    (found,) = check(tmp_path / name, DUMP)
    assert (found.status, found.name) == (FAILED, f"directory {tmp_path / name}")
    assert "cannot be written: Not a directory" in found.found and "save_dirs" in found.do


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENAMETOOLONG, errno.ESTALE])
def test_a_directory_that_may_not_be_looked_at_fails(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is behind a folder that may not be entered, say."""

    def refuses(*of: object, **more: object) -> None:
        raise OSError(number, os.strerror(number))

    place = tmp_path / "locked" / "checkpoints"
    monkeypatch.setattr(os, "stat", refuses)
    found = list(check(place, DUMP))
    monkeypatch.undo()
    assert [each.status for each in found] == [FAILED]
    assert found[0].found == f"{place} cannot be written: {os.strerror(number)}"


def test_a_directory_that_refuses_files_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*of: object, **more: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "it")

    monkeypatch.setattr(os, "mkdir", refuses)
    (found,) = check(tmp_path, DUMP)
    assert found.status == FAILED and found.found == f"{tmp_path} cannot be written: Read-only file system"


def test_without_hard_links_it_warns_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*of: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuses)
    found = found_in(tmp_path)
    assert found["links"].status == WARNING and "Operation not permitted" in found["links"].found
    assert found["speed"].status == OK and os.listdir(tmp_path) == []


def test_a_disk_that_is_full_while_it_is_measured_fails_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, clock: object) -> None:
        (folder / "bytes").write_bytes(b"x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(save_directories, "measure", full)
    found = list(check(tmp_path, DUMP))[-1]
    assert found.status == FAILED and "No space left on device" in found.found and os.listdir(tmp_path) == []


def test_a_disk_whose_room_cannot_be_asked_for_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(place: Path) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(shutil, "disk_usage", stale)
    found = list(check(tmp_path, DUMP))[-1]
    assert (found.status, found.found) == (FAILED, "could not be measured: Stale file handle")


def test_ctrl_c_in_the_middle_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(folder: Path, clock: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(save_directories, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(check(tmp_path, DUMP))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("local", "needed"), [(False, 16 * MIB), (True, 8 * MIB)])
@pytest.mark.parametrize("short", [0, 1])
def test_room_is_for_two_checkpoints_more(
    local: bool, needed: int, short: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a directory of its own a node needs room for its part."""
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=needed - short))
    found = found_in(tmp_path, CheckpointSize(8 * MIB, 4 * MIB, local, 120.0))["room"]
    assert found.status == (FAILED if short else OK)
    assert found.figures["needed_bytes"] == needed == CHECKPOINTS_MORE * (4 if local else 8) * MIB


def test_without_a_size_there_is_neither_need_nor_time(tmp_path: Path) -> None:
    found = found_in(tmp_path, None)
    assert found["room"].status == OK and "dump" not in found


def ticking(step_s: float) -> Callable[[], float]:
    """Return a clock that goes on by so much each time it is read."""
    times: Iterator[float] = (number * step_s for number in range(10**9))
    return lambda: next(times)


def test_speed_is_bytes_by_time_and_the_median_fsync(tmp_path: Path) -> None:
    """Of four chunks, with a look before each and one at the end."""
    speed = measure(tmp_path, ticking(0.5))
    assert speed.bytes_per_s == pytest.approx(MIB / 2.5) and speed.sync_s == 0.5


def test_a_slow_disk_is_not_written_to_for_long(tmp_path: Path) -> None:
    assert measure(tmp_path, ticking(2.0)).bytes_per_s == pytest.approx(MIB / 4 / 6.0)


@pytest.mark.parametrize(("step_s", "status"), [(SLOW_SYNC_S - 0.01, OK), (SLOW_SYNC_S, WARNING)])
def test_slow_fsyncs_warn(step_s: float, status: str, tmp_path: Path) -> None:
    assert found_in(tmp_path, None, ticking(step_s))["speed"].status == status


@pytest.mark.parametrize(("timeout_s", "status"), [(56.1, OK), (55.9, WARNING), (14.1, WARNING), (13.9, FAILED)])
def test_a_dump_must_fit_into_a_quarter_of_the_faults_time(timeout_s: float, status: str, tmp_path: Path) -> None:
    """4 MiB of this node at 0.4 MiB/s, and eight fsyncs of 0.5 s: 14 s."""
    found = found_in(tmp_path, CheckpointSize(8 * MIB, 4 * MIB, False, timeout_s), ticking(0.5))["dump"]
    assert found.status == status and found.figures["seconds"] == pytest.approx(14.0)
    if status != OK:
        assert "Set TTP_OT=56 or more" in found.do
