"""Megatron's indexed token files: `NAME.bin` with the tokens of all documents, `NAME.idx` that says where each one lies.

Owns the format, for reading (memory-mapped, any size) and for writing. The index is little-endian: nine bytes of magic, the
version (uint64), the code of the tokens' type (uint8), the numbers of sequences and of document ends (uint64 each), then every
sequence's length (int32), its byte offset (int64), and every document's first sequence with their number at the end (int64). What
follows (modes of multimodal sequences) is left alone.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ttp.errors import DatasetError

from .spots import spot_hash

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Codes 6 and 7 are float64 and float32: no token ids."""

_AGAIN = "copy both files again, or prepare the text again"

SMALLEST_WIDE_VOCABULARY = 65500
"""From this many ids on Megatron writes int32, below it uint16."""


def token_type(vocab_size: int) -> str:
    """Return the type in which Megatron writes the ids of a vocabulary."""
    return "uint16" if vocab_size < SMALLEST_WIDE_VOCABULARY else "int32"


def prefix_of(path: Path) -> Path | None:
    """Return NAME for NAME, NAME.bin or NAME.idx when both files are there, else None."""
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    return prefix if all(_part(prefix, end).is_file() for end in ("bin", "idx")) else None


class IndexedTokens:
    """All sequences one after the other, in the index's order. `made_of`: a hash of the text that they were made of, if it is known. Raises
    DatasetError for files that are not whole."""

    def __init__(self, prefix: Path, made_of: str = "") -> None:
        index, tokens = _part(prefix, "idx"), _part(prefix, "bin")
        self.name = str(prefix)
        self._made_of = made_of
        try:
            body = np.memmap(index, mode="r", dtype=np.uint8)
            raw = np.memmap(tokens, mode="r", dtype=np.uint8)
        except (OSError, ValueError) as exc:  # ValueError: an empty file cannot be mapped
            raise DatasetError(f"{prefix}: {index.name} or {tokens.name} cannot be read: {exc}; {_AGAIN}") from None
        dtype, count, documents = _read_header(index, body)
        after = _HEADER.size
        if len(body) < after + 12 * count + 8 * documents:
            raise DatasetError(
                f"{index}: has {len(body)} bytes, {count} sequences and {documents} document ends take"
                f" {after + 12 * count + 8 * documents}: it was cut off; {_AGAIN}"
            )
        lengths = np.frombuffer(body, "<i4", count, after).astype(np.int64)
        offsets = np.frombuffer(body, "<i8", count, after + 4 * count)
        self.documents = np.frombuffer(body, "<i8", documents, after + 12 * count)
        """Number of each document's first sequence, and of all sequences at the end."""
        ends = offsets + lengths * dtype.itemsize
        if count and min(int(offsets.min()), int(lengths.min())) < 0:
            raise DatasetError(f"{index}: got a length or an offset below 0, expected none: it is damaged; {_AGAIN}")
        reach = (
            max(int(offsets.max()), int(ends.max())) if count else 0
        )  # an end beyond int64 wraps, its offset does not
        if reach > len(raw):
            raise DatasetError(
                f"{tokens}: has {len(raw)} bytes, {index.name} speaks of {reach}: one of them was cut off, or is another's; {_AGAIN}"
            )
        self._raw, self._dtype, self._offsets = raw, dtype, offsets
        self._stops: npt.NDArray[Any] = np.cumsum(lengths)
        self.size = int(self._stops[-1]) if count else 0
        self._whole = bool(count) and int(offsets[0]) == 0 and bool((offsets[1:] == ends[:-1]).all())

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return the tokens [start, stop)."""
        if self._whole:
            return self._run(0, start, stop)
        parts = []
        number = int(np.searchsorted(self._stops, start, side="right"))
        while start < stop:
            begin = int(self._stops[number - 1]) if number else 0
            until = min(stop, int(self._stops[number]))
            parts.append(self._run(int(self._offsets[number]), start - begin, until - begin))
            start, number = until, number + 1
        return np.concatenate(parts) if parts else np.empty(0, self._dtype)

    def fingerprint(self) -> str:
        """Of the sequences' lengths, and of spots of the tokens: they may be many."""
        lengths = hashlib.sha256(self._stops.tobytes()).hexdigest()
        return spot_hash(self, f"{self._made_of} {self._dtype} {lengths}")

    def _run(self, offset: int, start: int, stop: int) -> npt.NDArray[Any]:
        size = self._dtype.itemsize
        return np.frombuffer(self._raw, self._dtype, stop - start, offset + start * size)


class IndexedWriter:
    """Writes NAME.bin as tokens come, and NAME.idx at the end: without it there is no data set. Both are durable then."""

    def __init__(self, prefix: Path, dtype: str) -> None:
        self._prefix, self._dtype = prefix, np.dtype(dtype).newbyteorder("<")
        self._file = open(_part(prefix, "bin"), "wb")  # noqa: SIM115  # closed by finish or abandon
        self._lengths: list[int] = []
        self._documents = [0]
        self.size = 0
        """Tokens written."""

    def add(self, tokens: Sequence[int] | npt.NDArray[Any], *, ends_document: bool) -> None:
        """Append a sequence; a document has one or several. Raises DatasetError for an id that the type cannot hold."""
        array = np.asarray(tokens, dtype=np.int64)
        bounds = np.iinfo(self._dtype)
        if array.size and not (bounds.min <= int(array.min()) and int(array.max()) <= bounds.max):
            raise DatasetError(
                f"{self._prefix}: token ids {int(array.min())} to {int(array.max())} do not fit {self._dtype.name}"
            )
        self._file.write(array.astype(self._dtype).tobytes())
        self._lengths.append(array.size)
        self.size += array.size
        if ends_document:
            self._documents.append(len(self._lengths))

    def finish(self) -> None:
        """Write the index; both files are on the disk when this returns."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        lengths = np.asarray(self._lengths, dtype="<i4")
        offsets = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1].astype(np.int64) * self._dtype.itemsize, out=offsets[1:])
        code = next(code for code, name in _TYPES.items() if name == self._dtype.name)
        with open(_part(self._prefix, "idx"), "wb") as file:
            file.write(_HEADER.pack(_MAGIC, _VERSION, code, len(lengths), len(self._documents)))
            for part in (lengths, offsets, np.asarray(self._documents, dtype="<i8")):
                file.write(part.tobytes())
            file.flush()
            os.fsync(file.fileno())

    def abandon(self) -> None:
        """Close the file without an index."""
        self._file.close()


def _read_header(index: Path, body: npt.NDArray[Any]) -> tuple[np.dtype[Any], int, int]:
    """Return the tokens' type and the numbers of sequences and document ends."""
    if len(body) < _HEADER.size or bytes(body[: len(_MAGIC)]) != _MAGIC:
        raise DatasetError(
            f"{index}: does not begin with {_MAGIC!r}, expected an index of Megatron's indexed data set; {_AGAIN}"
        )
    _, version, code, count, documents = _HEADER.unpack(bytes(body[: _HEADER.size]))
    if version != _VERSION or code not in _TYPES:
        raise DatasetError(
            f"{index}: got version {version}, type code {code}, expected version {_VERSION} and one of {_TYPES}; {_AGAIN}"
        )
    return np.dtype(_TYPES[code]).newbyteorder("<"), count, documents


def _part(prefix: Path, end: str) -> Path:
    return prefix.with_name(f"{prefix.name}.{end}")
