"""Whatever the tracker file is or holds, a checkpoint is published, and the folder is listed."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.checkpoint.conftest import Job
from ttp.checkpoint import find
from ttp.checkpoint.cli.main import main
from ttp.checkpoint.format import durable
from ttp.checkpoint.verify import verify


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(path.parent)  # the path of a socket has at most 107 bytes
        try:
            server.bind(path.name)
        finally:
            os.chdir(here)


def a_folder(path: Path) -> None:
    path.mkdir()


def a_loop(path: Path) -> None:
    path.symlink_to(path.name)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def many_digits(path: Path) -> None:
    path.write_text("4" * 4300)


def too_many_digits(path: Path) -> None:
    path.write_text("4" * 5000)


def a_step_past_64_bits(path: Path) -> None:
    path.write_text("9" * 32)


def no_digits(path: Path) -> None:
    path.write_bytes(b"\xff\x00\xc2\xb2")


def other_digits(path: Path) -> None:
    path.write_text("\u0664\u0662")


def nothing(path: Path) -> None:
    path.touch()


HARM = [a_pipe, a_socket, a_folder, a_loop, a_device, many_digits, too_many_digits, a_step_past_64_bits, no_digits]
HARM += [other_digits, nothing]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("harm", HARM, ids=[harm.__name__ for harm in HARM])
def test_no_tracker_fails_a_publish_or_a_listing(job: Job, tmp_path: Path, harm: Callable[[Path], None]) -> None:
    """Neither hangs; what can be replaced names the new step afterwards."""
    harm(tmp_path / durable.TRACKER_NAME)
    path = job.save(tmp_path, 42)
    assert verify(path).step == 42
    if harm is not a_folder:  # it cannot be replaced by a file
        assert (tmp_path / durable.TRACKER_NAME).read_bytes() == b"42\n"
    (tmp_path / durable.TRACKER_NAME).unlink() if harm is not a_folder else (tmp_path / durable.TRACKER_NAME).rmdir()
    harm(tmp_path / durable.TRACKER_NAME)
    assert main(["list", str(tmp_path)]) == 0


def test_a_tracker_of_32_bytes_is_read_and_a_longer_one_is_not(tmp_path: Path) -> None:
    """Blanks around the number count."""
    (tmp_path / durable.TRACKER_NAME).write_text(f"{'42':<31}\n")
    assert durable.read_tracker(tmp_path) == 42
    (tmp_path / durable.TRACKER_NAME).write_text(f"{'42':<32}\n")
    assert durable.read_tracker(tmp_path) is None


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", [".metadata", "__1_0_0.distcp", "manifest.json"])
def test_a_pipe_in_place_of_a_checkpoints_file_is_named(job: Job, tmp_path: Path, name: str) -> None:
    """Reading one never returns."""
    older, path = job.save(tmp_path, 41), job.save(tmp_path, 42)
    (path / name).unlink()
    os.mkfifo(path / name)
    found = find.find_newest_valid([tmp_path])
    assert found is not None and found.path == older and name in found.skipped[0]
