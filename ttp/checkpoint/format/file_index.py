"""Where a share's files keep what: a table at the end of each file, so that it need not cross the wire.

Owns the table's form, its writing and its checked reading. A writer reports to the controller its files' names, sizes and
checksums; which box of which tensor is at which byte, the publisher reads from the files themselves. At 10,000 writers
with hundreds of boxes each the tables are hundreds of MB: as messages they would stop the controller for a minute.

    torch's archives, one a box | JSON table | SHA-256 of the table (32 bytes) | its length (8, little endian) | MAGIC (8)

torch reads a box by position and length, so it never sees the table; the file's own checksum covers it.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttp.checkpoint.format.checksum import sha256
from ttp.checkpoint.format.durable import open_regular
from ttp.errors import CorruptCheckpoint, TornShare
from ttp.inputs import checked
from ttp.proto.messages import FileEntry, ShareResult

MAGIC = b"TTPTOC01"
TAIL_BYTES = 32 + 8 + len(MAGIC)
"""Behind a table: its digest, its length and MAGIC."""
_READERS = 16
"""Files whose tables are read at once: a shared file system answers each in milliseconds, however idle it is."""
_READ_AHEAD = 256
"""Files whose tables are in memory at once."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One written box of one tensor: DCP's chunk and where its bytes are."""

    key: str
    dtype: str
    """torch's name without the module: `float32`."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    position: int
    """Byte offset in `file`."""
    length: int
    """Bytes in `file`."""


@dataclass(frozen=True, slots=True)
class BlobEntry:
    """One written non-tensor value (torch.save of plain values, loadable with weights_only)."""

    key: str
    file: str
    position: int
    length: int


@dataclass(frozen=True, slots=True)
class Contents:
    """Files and all that is in them."""

    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    blobs: tuple[BlobEntry, ...]
    finite: bool | None = None
    """No tensor holds NaN or infinity; None: some writer did not look (an older version's file)."""


def to_bytes(tensors: Sequence[TensorEntry], blobs: Sequence[BlobEntry], finite: bool | None = None) -> bytes:
    """Return what goes to the end of the one file that these entries lie in. `finite`: of its tensors' values."""
    specs: dict[tuple[str, str, tuple[int, ...]], list[Any]] = {}
    for e in tensors:
        specs.setdefault((e.key, e.dtype, e.shape), []).append((e.offsets, e.sizes, e.position, e.length))
    table = {
        "tensors": [[*spec, boxes] for spec, boxes in specs.items()],
        "blobs": [(b.key, b.position, b.length) for b in blobs],
        "finite": finite,
    }
    body = json.dumps(table, separators=(",", ":")).encode()
    return body + sha256(body) + len(body).to_bytes(8, "little") + MAGIC


def read_contents(
    directory: Path, results: Sequence[ShareResult], advance: Callable[[int], None] = lambda count: None
) -> Contents:
    """Read the tables of all files of these shares; `advance` is called for each file (one reader's thread at a time).

    Raises TornShare for a file without a sound table, CorruptCheckpoint for a table that cannot be understood,
    FileNotFoundError for a file that is gone.
    """
    files = [file for result in results for file in result.files]
    return parse_tables(files, read_tables(directory, files), advance)


def parse_tables(
    files: Sequence[FileEntry], tables: Iterable[bytes], advance: Callable[[int], None] = lambda count: None
) -> Contents:
    """Return what the tables of these files say. Raises CorruptCheckpoint."""
    tensors: list[TensorEntry] = []
    blobs: list[BlobEntry] = []
    finite: list[bool | None] = []
    for file, body in zip(files, tables, strict=True):
        finite.append(_parse(body, file, tensors, blobs))
        advance(1)
    return Contents(tuple(files), tuple(tensors), tuple(blobs), all_finite(finite))


def all_finite(parts: Sequence[bool | None]) -> bool | None:
    """Join what is known of parts: one that is not finite decides; else one of which nothing is known does."""
    return False if False in parts else None if None in parts else True


def wrong_files(folder: Path, files: Sequence[FileEntry], advice: str) -> CorruptCheckpoint | None:
    """Return the error for files of a staging directory that are not what was reported; None: all are.

    TornShare, with their writers, where all are there and some have another size: then it is not the directory that is wrong.
    """
    text, torn = "", set()
    for file in files:
        name = f"{folder / file.name}, written by rank {file.rank},"
        try:
            nbytes = (folder / file.name).stat().st_size
        except FileNotFoundError:
            return CorruptCheckpoint(f"{name} is missing; {advice}")
        if nbytes != file.nbytes:
            text = text or f"{name} has {nbytes} bytes, expected {file.nbytes}; {advice}"
            torn.add(file.rank)
    return TornShare(text, tuple(sorted(torn))) if torn else None


def read_tables(directory: Path, files: Sequence[FileEntry]) -> Iterator[bytes]:
    """Yield the tables in the files' order, a few files ahead of the one that is asked for. Raises as `read_contents`."""
    for begin in range(0, len(files), _READ_AHEAD):
        some = files[begin : begin + _READ_AHEAD]
        if len(some) < _READERS:  # threads would cost more than they save
            yield from (_read_table(directory / file.name, file) for file in some)
            continue
        with ThreadPoolExecutor(min(_READERS, len(some)), thread_name_prefix="ttp-tables") as readers:
            yield from readers.map(lambda file: _read_table(directory / file.name, file), some)


def table_begin(nbytes: int, tail: bytes) -> int:
    """Return where the table of a file of so many bytes begins; negative: there is none. `tail`: the file's last TAIL_BYTES."""
    if len(tail) < TAIL_BYTES or tail[40:] != MAGIC:
        return -1
    return nbytes - TAIL_BYTES - int.from_bytes(tail[32:40], "little")


def _read_table(path: Path, file: FileEntry) -> bytes:
    """Return the checked table of one file. Raises TornShare, OSError."""
    name = f"{path}, written by rank {file.rank}"
    with open_regular(path) as raw, io.BufferedReader(raw) as stream:
        nbytes = os.fstat(stream.fileno()).st_size
        if nbytes != file.nbytes:
            raise TornShare(f"{name}, has {nbytes} bytes, expected {file.nbytes}", (file.rank,))
        stream.seek(max(0, nbytes - TAIL_BYTES))
        tail = stream.read(TAIL_BYTES)
        if (begin := table_begin(nbytes, tail)) < 0:
            raise TornShare(f"{name}, has no table of contents at its end", (file.rank,))
        stream.seek(begin)
        body = stream.read(nbytes - TAIL_BYTES - begin)
    if sha256(body) != tail[:32]:
        raise TornShare(f"{name}: its table of contents was altered", (file.rank,))
    return body


def _parse(body: bytes, file: FileEntry, tensors: list[TensorEntry], blobs: list[BlobEntry]) -> bool | None:
    """Add a file's entries; return whether its values are finite, as far as its writer knows."""
    try:
        table = checked.mapping(json.loads(body), "table")
        for key, dtype, shape, boxes in checked.field(table, "tensors", "table")[0]:
            checked.string(key, "tensors")
            checked.string(dtype, key)
            whole = checked.integers(shape, key)
            for offsets, sizes, position, length in boxes:
                if not checked.are_naturals((*offsets, *sizes, position, length)):
                    raise checked.Invalid(key, [offsets, sizes, position, length], "a box of integers >= 0")
                box = (tuple(offsets), tuple(sizes))
                tensors.append(TensorEntry(key, dtype, whole, *box, file.name, position, length))
        for key, position, length in checked.field(table, "blobs", "table")[0]:
            if not checked.are_naturals((position, length)):
                raise checked.Invalid(checked.string(key, "blobs"), [position, length], "two integers >= 0")
            blobs.append(BlobEntry(checked.string(key, "blobs"), file.name, position, length))
        return checked.optional_boolean(table.get("finite"), "table.finite")
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptCheckpoint(
            f"{file.name}, written by rank {file.rank}: its table of contents cannot be read ({error}); was it written by "
            "another version?"
        ) from None
