"""Training text as bytes, and which sequences each step takes: pure functions of (seed, position).

Owns the text's sources and the order of sequences. Holds no state that a dead rank could take along: a position is a
number that counts all sequences ever consumed by the job, and everything follows from it.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from ttp.errors import DatasetError

from .config import Config

_ROUNDS = 6
_SNIFFED_BYTES = 1 << 16


class Text(Protocol):
    """Immutable bytes of known length."""

    name: str
    size: int

    def read(self, start: int, stop: int) -> bytes: ...

    def fingerprint(self) -> str:
        """Return a short hash that changes when the text does."""


class MemoryText:
    """Text that fits in memory."""

    def __init__(self, name: str, content: bytes) -> None:
        self.name = name
        self.size = len(content)
        self._content = content

    def read(self, start: int, stop: int) -> bytes:
        return self._content[start:stop]

    def fingerprint(self) -> str:
        return hashlib.sha256(self._content).hexdigest()[:16]


class FileText:
    """The files of a folder (or one file), one after the other, read where they are: any size, no copy."""

    def __init__(self, root: Path) -> None:
        self.name = str(root)
        self._root = root
        self._files = _list_files(root)
        sizes = [_file_size(path) for path in self._files]
        self._ends = list(itertools.accumulate(sizes))
        self.size = self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> bytes:
        pieces = []
        index = bisect.bisect_right(self._ends, start)
        while start < stop:
            begin = self._ends[index - 1] if index else 0
            count = min(stop, self._ends[index]) - start
            pieces.append(_read_range(self._files[index], start - begin, count))
            start += count
            index += 1
        return b"".join(pieces)

    def fingerprint(self) -> str:
        """Of names and sizes, not of contents: the text may be large."""
        lines = [
            f"{path.relative_to(self._root).as_posix()} {end}"
            for path, end in zip(self._files, self._ends, strict=True)
        ]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def open_text(dataset_dir: str | None) -> Text:
    """Return the text of a file or folder, or of Python's manual for None. Raises DatasetError that says what to do."""
    if dataset_dir is not None:
        return FileText(Path(dataset_dir))
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DatasetError(
            "this Python comes without pydoc_data.topics, the default text; set dataset_config.dataset_dir to a text file or folder"
        ) from None
    return MemoryText("pydoc_data.topics", "\n".join(topics[name] for name in sorted(topics)).encode())


class Sequences:
    """The text cut into sequences of T + 1 bytes that overlap by one, in the order of training.

    Position p is sequence p % count of epoch p // count; each epoch takes every sequence once.
    """

    def __init__(self, text: Text, seq_length: int, *, seed: int, shuffle: bool) -> None:
        self.count = max(0, text.size - 1) // seq_length
        """Sequences in an epoch."""
        if self.count == 0:
            raise DatasetError(
                f"{text.name} has {text.size} bytes: one sequence takes {seq_length + 1}; set dataset_config.dataset_dir to a"
                " longer text, or lower model_config.seq_length"
            )
        self._text = text
        self._seq_length = seq_length
        self._seed = seed
        self._shuffle = shuffle

    def epoch(self, position: int) -> int:
        return position // self.count

    def sample(self, position: int) -> bytes:
        """Return the T + 1 bytes at `position`: inputs are all but the last, targets all but the first."""
        epoch, index = divmod(position, self.count)
        if self._shuffle:
            index = permute(index, self.count, key=f"{self._seed}:{epoch}".encode())
        start = index * self._seq_length
        return self._text.read(start, start + self._seq_length + 1)

    def batch(self, first: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (tokens_BT, targets_BT), int64, of the positions [first, first + size)."""
        joined = bytearray(b"".join(self.sample(first + i) for i in range(size)))
        both = torch.frombuffer(joined, dtype=torch.uint8).view(size, self._seq_length + 1).long()
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def open_sequences(config: Config) -> tuple[Text, Sequences]:
    """Return the configured text and its sequences. Raises DatasetError."""
    text = open_text(config.dataset_config.dataset_dir)
    seq_length, seed = config.model_config.seq_length, config.training_config.seed
    return text, Sequences(text, seq_length, seed=seed, shuffle=config.dataset_config.shuffle)


def micro_batch_starts(
    consumed: int, *, batch_size: int, micro_batch_num: int, dp_rank: int, dp_size: int
) -> Iterator[int]:
    """Yield the first position of each of this rank's micro-batches in the step that begins at `consumed`.

    A step takes the positions [consumed, consumed + batch_size * micro_batch_num * dp_size), each by one rank.
    """
    for micro in range(micro_batch_num):
        yield consumed + (micro * dp_size + dp_rank) * batch_size


def permute(index: int, count: int, key: bytes) -> int:
    """Map [0, count) onto itself, in an order fixed by `key`, without storing it.

    A Feistel network over the next even number of bits; values beyond `count` are mapped again until one falls inside
    (4 times at most on average). Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains (2002), method 2.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for number in range(_ROUNDS):
            digest = hashlib.blake2b(
                bytes([number]) + right.to_bytes(8, "little"), key=key[:64], digest_size=8
            ).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        index = left << half | right
        if index < count:
            return index


# --- files ---


def _list_files(root: Path) -> list[Path]:
    """Return `root`, or every file below it but hidden ones, sorted by path."""
    try:
        if root.is_file():
            files = [root]
        elif root.is_dir():
            found = [Path(base) / name for base, _, names in os.walk(root, onerror=_raise) for name in names]
            visible = (p for p in found if not any(part.startswith(".") for part in p.relative_to(root).parts))
            files = sorted((p for p in visible if p.is_file()), key=lambda p: p.relative_to(root).parts)
        else:
            raise DatasetError(
                f"{root}: no such file or folder; set dataset_config.dataset_dir to a text file or folder"
            )
    except OSError as exc:
        raise DatasetError(f"{root}: cannot be read ({exc.strerror}); give this user the right to read it") from None
    if not files:
        raise DatasetError(f"{root}: the folder has no files; set dataset_config.dataset_dir to a text file or folder")
    for path in files:
        if b"\0" in _read_range(path, 0, _SNIFFED_BYTES, short=True):
            raise DatasetError(
                f"{path}: holds zero bytes, so it is no text; take it out of the folder, or choose another"
            )
    return files


def _raise(error: OSError) -> None:
    raise error


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as exc:
        raise DatasetError(f"{path}: cannot be read ({exc.strerror})") from None


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
