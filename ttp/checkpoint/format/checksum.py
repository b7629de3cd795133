"""Checksums of a checkpoint's files: the algorithm that new files get, and those that older ones have.

Owns the algorithms, their names, and the form in which a checksum is recorded: `xxh3_128:` and hexadecimal digits. A checksum finds damage, not
forgery; of a signed checkpoint each file has its SHA-256 besides. Never decides what is done about damage.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import xxhash

from ttp.checkpoint.format.durable import open_regular
from ttp.errors import CorruptCheckpoint
from ttp.inputs import checked
from ttp.proto.messages import FileEntry

SHA256 = "sha256"
"""Of files that were written before checksums named their algorithm."""
NEWEST = "xxh3_128"
"""Of files that are written now."""
_BLOCK_BYTES = 1 << 20
"""Stays in the processor's cache between the reading and the hashing."""


class _Hash(Protocol):
    def update(self, block: bytes | bytearray | memoryview, /) -> object: ...

    def hexdigest(self) -> str: ...


_ALGORITHMS: dict[str, tuple[Callable[[], _Hash], int]] = {NEWEST: (xxhash.xxh3_128, 32), SHA256: (hashlib.sha256, 64)}
"""Each with the number of its hexadecimal digits."""


class Checksum:
    """Takes a file's bytes in order; `text` is the checksum of what it has taken, `digest` its SHA-256 where that was asked for."""

    def __init__(self, algorithm: str = NEWEST, *, digest: bool = False) -> None:
        self._algorithm = algorithm
        self._hash = _ALGORITHMS[algorithm][0]()
        self._sha256 = hashlib.sha256() if digest else None

    def update(self, block: bytes | bytearray | memoryview) -> None:
        self._hash.update(block)
        if self._sha256 is not None:
            self._sha256.update(block)

    @property
    def text(self) -> str:
        return f"{self._algorithm}:{self._hash.hexdigest()}"

    @property
    def digest(self) -> str:
        """In hexadecimal; empty where it was not asked for."""
        return "" if self._sha256 is None else self._sha256.hexdigest()


def parse(value: object, path: str) -> str:
    """Return a recorded checksum. Raises ValueError naming `path`, for an algorithm that is not known here too."""
    text = checked.string(value, path)
    algorithm, colon, digits = text.partition(":")
    if not colon or algorithm not in _ALGORITHMS:
        raise checked.Invalid(
            path, text, f"a checksum by {' or '.join(_ALGORITHMS)}; read it with the ttp that wrote it"
        )
    count = _ALGORITHMS[algorithm][1]
    if not re.fullmatch(f"[0-9a-f]{{{count}}}", digits):
        raise checked.Invalid(path, text, f"{algorithm}: and {count} hexadecimal digits")
    return text


def digest_of(entry: FileEntry) -> str:
    """Return the SHA-256 that was recorded of a file, be it as its checksum; empty: none was."""
    algorithm, _, digits = entry.checksum.partition(":")
    return digits if algorithm == SHA256 else entry.digest


def for_file(entry: FileEntry, *, digest: bool = False) -> Checksum:
    """Return a checksum by the algorithm that the file was recorded with. Raises CorruptCheckpoint for one that is not known here."""
    try:
        return Checksum(parse(entry.checksum, "checksum").partition(":")[0], digest=digest)
    except ValueError as error:
        raise CorruptCheckpoint(f"{entry.name}, written by rank {entry.rank}: {error}") from None


def of_file(path: Path, checksum: Checksum, progress: Callable[[int], None] | None = None) -> str:
    """Read a file; `progress` is called with each block's bytes. Raises OSError, CorruptCheckpoint for what is not a regular file."""
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    with open_regular(path) as stream:
        while count := stream.readinto(buffer):
            checksum.update(buffer[:count])
            if progress is not None:
                progress(count)
    return checksum.text


def check_file(path: Path, entry: FileEntry, progress: Callable[[int], None] | None = None) -> None:
    """Read a file. Raises CorruptCheckpoint where it is not as it was written; OSError."""
    check(path, entry, of_file(path, for_file(entry), progress))


def check(path: Path, entry: FileEntry, found: str) -> None:
    """Raise CorruptCheckpoint where a file's checksum is not the recorded one."""
    if found != entry.checksum:
        raise CorruptCheckpoint(
            f"{path} was altered since rank {entry.rank} wrote it: checksum {found}, expected {entry.checksum}"
        )


def sha256(content: bytes) -> bytes:
    """Return the digest that seals a manifest and a table of contents: a part of their form, whatever the files have."""
    return hashlib.sha256(content).digest()
