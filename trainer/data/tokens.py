"""Training text as token ids, wherever it lies: bytes of text files, arrays of ids on disk, one after the other.

Owns the sources that need no preparation, and which source a path stands for. Reads what is asked for and no more: a source may
be larger than memory. Knows nothing of sequences.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from numpy.lib.format import open_memmap

from ttp.errors import DatasetError
from ttp.inputs import checked

from .megatron_indexed import IndexedTokens, prefix_of
from .spots import spot_hash

END_OF_TEXT = 0
"""What stands between two files that are read as bytes: it occurs in no string."""

_SNIFFED_BYTES = 1 << 16


class Tokens(Protocol):
    """Immutable token ids of known number."""

    name: str
    size: int

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return the ids [start, stop), of any integer type."""

    def fingerprint(self) -> str:
        """Return a short hash that changes when the tokens do (of a long text: those at its spots). Raises DatasetError."""


class MemoryText:
    """Text that fits in memory, a token each byte."""

    def __init__(self, name: str, content: bytes) -> None:
        self.name = name
        self.size = len(content)
        self._content = content

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        return np.frombuffer(self._content[start:stop], dtype=np.uint8)

    def fingerprint(self) -> str:
        return hashlib.sha256(self._content).hexdigest()[:16]


class FileText:
    """The files of a folder (or one file), a token each byte, END_OF_TEXT between two; read where they are."""

    def __init__(self, root: Path) -> None:
        self.name = str(root)
        self._root = root
        files = [(path, file_size(path)) for path in list_files(root)]
        self._files = [path for path, size in files if size]
        sizes = [size + 1 for _, size in files if size]
        self._ends = list(itertools.accumulate(sizes))
        """Each file's end, the byte after it included."""
        self.size = self._ends[-1] - 1 if self._ends else 0

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        pieces = []
        index = bisect.bisect_right(self._ends, start)
        while start < stop:
            begin, end = self._ends[index - 1] if index else 0, self._ends[index]
            count = min(stop, end - 1) - start
            if count > 0:
                pieces.append(_read_range(self._files[index], start - begin, count))
            if stop >= end:
                pieces.append(bytes([END_OF_TEXT]))
            start, index = end, index + 1
        return np.frombuffer(b"".join(pieces), dtype=np.uint8)

    def fingerprint(self) -> str:
        """Of names and sizes, and of spots of the contents: the text may be large."""
        lines = [
            f"{path.relative_to(self._root).as_posix()} {end}"
            for path, end in zip(self._files, self._ends, strict=True)
        ]
        return spot_hash(self, "\n".join(lines))


class ArrayTokens:
    """Ids in one array on disk: a .npy file, or raw ones of a type that is said. Memory-mapped.
    Raises DatasetError."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.name = str(path)
        try:
            # Not np.load: for a .zip that is named .npy it returns something else.
            array = open_memmap(path, mode="r") if path.suffix == ".npy" else np.memmap(path, mode="r", dtype=dtype)
        except Exception as exc:  # numpy raises whatever it meets in a damaged header
            expected = "a file of numpy.save" if path.suffix == ".npy" else f"raw ids of {dtype}"
            raise DatasetError(
                f"{path}: cannot be read as an array of token ids ({checked.shown(str(exc))}), expected {expected}; write it again, or"
                " name another file"
            ) from None
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DatasetError(
                f"{path}: got {array.dtype!s:.80} of shape {array.shape!s:.80}, expected integers in one dimension; write it again"
                " so, or name another file"
            )
        self.size = len(array)
        self._array: npt.NDArray[Any] = array

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        return self._array[start:stop]

    def fingerprint(self) -> str:
        """Of type, number and spots: the tokens may be many."""
        return spot_hash(self, str(self._array.dtype))


class Joined:
    """Several sources one after the other, each as it is (a token file has its own ends of text). Raises DatasetError for none."""

    def __init__(self, name: str, parts: Sequence[Tokens]) -> None:
        if not parts:
            raise DatasetError(
                f"{name}: no token file is in it; set dataset_config.dataset_dir to a folder that has some"
            )
        self.name = name
        self._parts = parts
        self._ends = list(itertools.accumulate(part.size for part in parts))
        self.size = self._ends[-1]

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        pieces = []
        index = bisect.bisect_right(self._ends, start)
        while start < stop:
            begin, until = self._ends[index - 1] if index else 0, min(stop, self._ends[index])
            pieces.append(self._parts[index].read(start - begin, until - begin).astype(np.int64))
            start, index = until, index + 1
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def fingerprint(self) -> str:
        return hashlib.sha256(" ".join(part.fingerprint() for part in self._parts).encode()).hexdigest()[:16]


def manual() -> MemoryText:
    """Return the text of Python's own manual. Raises DatasetError."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DatasetError(
            "this Python comes without pydoc_data.topics, the default text; set dataset_config.dataset_dir to a text file or folder"
        ) from None
    return MemoryText("pydoc_data.topics", "\n".join(topics[name] for name in sorted(topics)).encode())


def token_files(root: Path, raw_dtype: str) -> Tokens | None:
    """Return the tokens of a token file, or of a folder that has nothing else; None for anything else (text). Raises DatasetError."""
    prefix = prefix_of(root)
    if prefix is not None:
        return IndexedTokens(prefix)
    if root.is_file():
        if root.suffix == ".idx":
            raise DatasetError(
                f"{root}: the file with the tokens is missing, expected {root.with_suffix('.bin').name} beside it; copy it there,"
                " or prepare the text again"
            )
        return ArrayTokens(root, raw_dtype) if root.suffix in (".npy", ".bin") else None
    if not root.is_dir():
        return None
    files = sorted(path for path in root.iterdir() if path.is_file() and not path.name.startswith("."))
    if not files or any(path.suffix not in (".npy", ".bin", ".idx") for path in files):
        return None
    parts = [
        token_files(path, raw_dtype)
        for path in files
        if path.suffix != ".idx" or prefix_of(path) is None  # an index alone is refused
    ]
    return Joined(str(root), [part for part in parts if part is not None])


# --- files ---


def list_files(root: Path) -> list[Path]:
    """Return `root`, or every file below it but hidden ones, sorted by path. Raises DatasetError when one is not text."""
    try:
        if root.is_file():
            files = [root]
        elif root.is_dir():
            found = [Path(base) / name for base, _, names in os.walk(root, onerror=_raise) for name in names]
            visible = (p for p in found if not any(part.startswith(".") for part in p.relative_to(root).parts))
            files = sorted((p for p in visible if p.is_file()), key=lambda p: p.relative_to(root).parts)
        else:
            raise DatasetError(
                f"{root}: no such file or folder; name a text file or folder (a configuration does in dataset_config.dataset_dir)"
            )
    except OSError as exc:
        raise DatasetError(f"{root}: cannot be read ({exc.strerror}); give this user the right to read it") from None
    if not files:
        raise DatasetError(f"{root}: the folder has no files; set dataset_config.dataset_dir to a text file or folder")
    for path in files:
        if b"\0" in _read_range(path, 0, _SNIFFED_BYTES, short=True):
            raise DatasetError(
                f"{path}: holds zero bytes, so it is not text; take it out of the folder, or choose another"
            )
    return files


def file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as exc:
        raise DatasetError(f"{path}: cannot be read ({exc.strerror})") from None


def _raise(error: OSError) -> None:
    raise error


def _read_range(path: Path, start: int, count: int, *, short: bool = False) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(start)
            content = file.read(count)
    except OSError as exc:
        raise DatasetError(f"{path}: cannot be read ({exc.strerror}); give this user the right to read it") from None
    if len(content) < count and not short:
        raise DatasetError(
            f"{path}: ends at byte {start + len(content)}, was longer at the start: it changed during training"
        )
    return content
