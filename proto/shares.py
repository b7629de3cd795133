"""What a rank is ordered to write, and what it wrote, as frozen dataclasses (PURE: standard library data modules only).

Owns these values alone; the messages that carry them are in `messages.py`, which has their names too.
"""

from __future__ import annotations

from ttp.proto.frozen import dataclass


@dataclass(frozen=True, slots=True)
class FileEntry:
    name: str
    nbytes: int
    checksum: str
    """Its algorithm, a colon, and hexadecimal digits."""
    rank: int
    digest: str = ""
    """SHA-256 in hexadecimal digits, where checkpoints are signed; else empty."""


@dataclass(frozen=True, slots=True)
class ShareResult:
    """What one writer wrote, durable (fsync) before this is sent. Which box of which tensor is where is stored in a table at
    the end of each file: at scale that is hundreds of MB, which must not pass through the controller."""

    files: tuple[FileEntry, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Part `index` of `count` of a shard group, cut by bytes the same way on every holder."""

    group_id: str
    index: int
    count: int
