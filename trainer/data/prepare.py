"""`python -m ttp.trainer.prepare INPUT OUTPUT [--tokenizer PATH]`: text to token files, once, before a job.

Owns what the documents of a text are, and their tokens: a document's are followed by the end of text. `text_cache.py` does the same
for a run by itself.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from ttp.errors import DatasetError, TTPError

from .megatron_indexed import IndexedTokens, IndexedWriter, token_type
from .tokenizer import Tokenizer, open_tokenizer
from .tokens import file_size, list_files

log = logging.getLogger("ttp.trainer")

_PIECE_BYTES = 1 << 20
"""A longer document is tokenized in pieces that end with a line."""
_BEFORE_CHARS = 4096
"""So much of the line before a piece is tokenized with it, at most."""
_BATCH_BYTES = 4 << 20
"""Text handed to the tokenizer at a time, which may use several threads."""
_ROWS = 1000
"""Rows of a saved data set read at a time."""

Progress = Callable[[float], None]
"""Called with the share of the work that is done."""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Some of a document: text, or ids where it has been tokenized before."""

    content: str | Sequence[int]
    ends_document: bool
    done: float
    """Share of all text up to its end."""
    before: str = ""
    """What stands before it in the document, as far as its tokens may depend on that."""


def unfinished_beside(path: Path) -> Path:
    """Return a name for what shall become `path`, of no other process of any host."""
    return path.with_name(f"{path.name}_tmp_{socket.gethostname()}_{os.getpid()}_{uuid.uuid4().hex}")


def is_saved_dataset(root: Path) -> bool:
    """True for a folder that `datasets` saved."""
    return (root / "dataset_dict.json").is_file() or all(
        (root / name).is_file() for name in ("dataset_info.json", "state.json")
    )


def write_tokens(prefix: Path, root: Path, tokenizer: Tokenizer, column: str, progress: Progress) -> int:
    """Tokenize a text or data set into PREFIX.bin and PREFIX.idx; return the number of tokens."""
    writer = IndexedWriter(prefix, token_type(tokenizer.vocab_size))
    try:
        for batch in _batches(pieces(root, column)):
            for piece, ids in zip(batch, _encode(tokenizer, batch), strict=True):
                if piece.ends_document and tokenizer.end_of_text is not None:
                    ids.append(tokenizer.end_of_text)
                writer.add(ids, ends_document=piece.ends_document)
            progress(batch[-1].done)
        writer.finish()
    finally:
        writer.abandon()
    return writer.size


def _encode(tokenizer: Tokenizer, batch: Sequence[TextPiece]) -> Iterator[list[int]]:
    """Yield the ids of each piece. One that goes on with a document is tokenized with the line before it, whose ids are taken off
    again: a tokenizer that marks where a text begins would mark where the piece does."""
    texts = [piece.before + piece.content for piece in batch if isinstance(piece.content, str)]
    befores = [piece.before for piece in batch if piece.before]
    whole = iter(tokenizer.encode(texts) if texts else [])
    heads = iter(tokenizer.encode(befores) if befores else [])
    for piece in batch:
        if not isinstance(piece.content, str):
            yield list(piece.content)
            continue
        ids = next(whole)
        if piece.before:
            head = next(heads)
            apart = ids[: len(head)] == head  # no token reaches over the cut
            ids = ids[len(head) :] if apart else tokenizer.encode([piece.content])[0]
        yield ids


def pieces(root: Path, column: str) -> Iterator[TextPiece]:
    """Yield the documents of text files (a file each) or of a saved data set (a row each), in order. Raises DatasetError."""
    if is_saved_dataset(root):
        yield from _rows(root, column)
        return
    files = [(path, size) for path in list_files(root) if (size := file_size(path))]
    total, done = sum(size for _, size in files), 0
    for path, size in files:
        try:
            with open(path, encoding="utf-8", newline="") as file:
                yield from _of_file(file, done, size, total)
        except UnicodeDecodeError as exc:
            raise DatasetError(f"{path}: is not UTF-8 ({exc}); convert it, or take it out of the folder") from None
        except OSError as exc:
            raise DatasetError(f"{path}: cannot be read ({exc.strerror})") from None
        done += size


def _of_file(file: TextIO, before: int, size: int, total: int) -> Iterator[TextPiece]:
    lines: list[str] = []
    room, read, line_before = _PIECE_BYTES, 0, ""
    for line in file:
        # A token may reach over a cut into spaces: better no cut there, but for a file that has no other place.
        if room <= 0 and (not line[0].isspace() or room <= -_PIECE_BYTES):
            yield TextPiece("".join(lines), False, (before + min(read, size)) / total, line_before)
            line_before = lines[-1][-_BEFORE_CHARS:]
            lines, room = [], _PIECE_BYTES
        lines.append(line)
        room -= len(line)
        read += len(line)
    yield TextPiece("".join(lines), True, (before + size) / total, line_before)


def _rows(root: Path, column: str) -> Iterator[TextPiece]:
    try:
        library = importlib.import_module("datasets")
    except ImportError as exc:
        raise DatasetError(
            f"{root}: was saved by the package datasets, which is not here ({exc}); pip install datasets, or prepare the text elsewhere"
        ) from None
    try:
        found: Any = library.load_from_disk(str(root))
        yield from _rows_of(found, root, column)
    except OSError as exc:
        raise DatasetError(f"{root}: cannot be read as a saved data set ({exc}); save it again") from None


def _rows_of(found: Any, root: Path, column: str) -> Iterator[TextPiece]:
    if not hasattr(found, "column_names") or isinstance(found, dict):
        if "train" not in found:
            raise DatasetError(
                f"{root}: got the splits {', '.join(found)}, expected train; name the folder of one of them"
            )
        found = found["train"]
    if column not in found.column_names:
        raise DatasetError(
            f"{root}: has no column {column!r}, but {', '.join(found.column_names)}; set dataset_config.text_column"
        )
    number = nulls = 0
    for rows in found.select_columns([column]).iter(batch_size=_ROWS):
        for content in rows[column]:
            number += 1
            if content is None:
                nulls += 1
            elif isinstance(content, str | list):
                yield TextPiece(content, True, number / len(found))
            else:
                raise DatasetError(
                    f"{root}: row {number - 1} of the column {column!r}: got {type(content).__name__}, expected strings or token ids; set"
                    " dataset_config.text_column"
                )
    if nulls:
        log.warning("%s: %s of %s rows of the column %r are null: left out", root, f"{nulls:,}", f"{number:,}", column)
    if nulls == number:
        raise DatasetError(f"{root}: no row of the column {column!r} has anything; set dataset_config.text_column")


def _batches(found: Iterator[TextPiece]) -> Iterator[list[TextPiece]]:
    batch: list[TextPiece] = []
    size = 0
    for piece in found:
        batch.append(piece)
        size += len(piece.content)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# --- the command ---


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare as the command line says; return the exit status: 0 done, 2 refused. argparse itself exits with 2."""
    from rich.progress import Progress

    parser = argparse.ArgumentParser(
        prog="python -m ttp.trainer.prepare",
        description="Tokenize text into OUTPUT.bin and OUTPUT.idx, which dataset_config.dataset_dir takes.",
    )
    parser.add_argument("input", type=Path, help="a text file, a folder of them, or a folder that `datasets` saved")
    parser.add_argument("output", type=Path, help="name of the two files, without .bin and .idx")
    parser.add_argument("--tokenizer", help="a tokenizer.json or a folder with a tokenizer; default: bytes")
    parser.add_argument("--text-column", default="text", help="column of a `datasets` folder (default: text)")
    given = parser.parse_args(argv)
    unfinished = unfinished_beside(given.output)
    ends = ("bin", "idx")
    try:
        tokenizer = open_tokenizer(given.tokenizer)
        with Progress() as bar:
            task = bar.add_task("preparing", total=1.0)
            count = write_tokens(
                unfinished, given.input, tokenizer, given.text_column, lambda share: bar.update(task, completed=share)
            )
        # An old index with the new tokens would be a wrong data set.
        Path(f"{given.output}.idx").unlink(missing_ok=True)
        for end in ends:  # the index last: without it there is no data set
            os.replace(f"{unfinished}.{end}", f"{given.output}.{end}")
    except (TTPError, OSError) as exc:
        print(f"ttp.trainer.prepare: {type(exc).__name__}: {exc}", file=sys.stderr)
        return 2
    finally:
        for end in ends:
            Path(f"{unfinished}.{end}").unlink(missing_ok=True)
    documents = len(IndexedTokens(given.output).documents) - 1
    dtype = np.dtype(token_type(tokenizer.vocab_size)).name
    print(f"{given.output}.bin, .idx: {count:,} tokens ({dtype}) of {documents:,} documents")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it as any filter
    sys.exit(main())
