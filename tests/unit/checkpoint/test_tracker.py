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


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(path.parent)  # the path of a socket has at most 107 bytes
        try:
            server.bind(path.name)
        finally:
            os.chdir(here)


HARM: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": a_socket,
    "folder": os.mkdir,
    "loop": lambda path: path.symlink_to(path.name),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "many digits": lambda path: path.write_text("4" * 4300),
    "too many digits": lambda path: path.write_text("4" * 5000),
    "a step past 64 bits": lambda path: path.write_text("9" * 32),
    "no digits": lambda path: path.write_bytes(b"\xff\x00\xc2\xb2"),
    "other digits": lambda path: path.write_text("\u0664\u0662"),
    "nothing": Path.touch,
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("harm", HARM.values(), ids=HARM.keys())
def test_no_tracker_fails_a_publish_or_a_listing(job: Job, tmp_path: Path, harm: Callable[[Path], object]) -> None:
    """Neither hangs; what can be replaced names the new step afterwards."""
    harm(tmp_path / durable.TRACKER_NAME)
    path = job.save(tmp_path, 42)
    assert verify(path).step == 42
    if harm is not os.mkdir:  # it cannot be replaced by a file
        assert (tmp_path / durable.TRACKER_NAME).read_bytes() == b"42\n"
    (tmp_path / durable.TRACKER_NAME).unlink() if harm is not os.mkdir else (tmp_path / durable.TRACKER_NAME).rmdir()
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
