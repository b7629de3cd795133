"""Damage to a checkpoint of several ranks, as disks, people and other versions do it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from ttp.checkpoint.format import dcp

DATA = "__1_0_0.distcp"


def flip_a_bit(path: Path, name: str = DATA, where: float = 1 / 3) -> None:
    """In the middle of a tensor: only the checksum shows it."""
    content = bytearray((path / name).read_bytes())
    content[int(len(content) * where)] ^= 4
    (path / name).write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path / DATA, (path / DATA).stat().st_size - 1)


def lengthen(path: Path) -> None:
    with open(path / DATA, "ab") as stream:
        stream.write(b"x")


def remove(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def alter(name: str, old: bytes, new: bytes) -> Callable[[Path], None]:
    """Replace bytes by as many others, so that only a checksum shows it."""

    def act(path: Path) -> None:
        content = (path / name).read_bytes()
        assert old in content
        (path / name).write_bytes(content.replace(old, new))

    return act


def flip_a_byte_of_metadata(path: Path) -> None:
    """One without which torch reads the same tensors in the same places: only its checksum shows it."""
    metadata = path / ".metadata"
    content, whole = metadata.read_bytes(), dcp.read_metadata(path, None)
    for index in reversed(range(len(content))):
        metadata.write_bytes(content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :])
        with contextlib.suppress(Exception):  # whatever torch says of it
            found = dcp.read_metadata(path, None)
            if (found.state_dict_metadata, found.storage_data) == (whole.state_dict_metadata, whole.storage_data):
                return
    raise AssertionError("every byte of .metadata is seen without its checksum")


def of_version(number: int) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        body = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps(body | {"format_version": number}))

    return act


def become_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("x")
