"""`python -m ttp.trainer.prepare INPUT OUTPUT [--tokenizer PATH]`: text to token files, once; and the cache of a run that does it
by itself.

Owns tokenizing, its progress and the cache. A document's tokens are followed by the end of text. A prepared data set appears whole
or not at all (a rename), under a name made of the text's content, the tokenizer and this format: ranks that start together wait for
the one that prepares, and whoever dies leaves nothing that another would take for whole.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from ttp.errors import DatasetError, TTPError

from .indexed import IndexedTokens, IndexedWriter, token_type
from .tokenizer import Tokenizer, open_tokenizer
from .tokens import file_size, list_files

log = logging.getLogger("ttp.trainer")

FORMAT = 1
"""Part of the name in the cache: another way of preparing is another data set."""

_PIECE_BYTES = 1 << 20
"""A longer document is tokenized in pieces that end with a line."""
_BATCH_BYTES = 4 << 20
"""Text handed to the tokenizer at a time, which may use several threads."""
_ROWS = 1000
"""Rows of a saved data set read at a time."""
_POLL_S = 0.2

Told = Callable[[float], None]
"""Hears which share of the work is done."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of a document: text, or ids where it has been tokenized before."""

    content: str | Sequence[int]
    ends_document: bool
    done: float
    """Share of all text up to its end."""


def is_saved_dataset(root: Path) -> bool:
    """True for a folder that `datasets` saved."""
    return (root / "dataset_dict.json").is_file() or all(
        (root / name).is_file() for name in ("dataset_info.json", "state.json")
    )


def prepared(root: Path, tokenizer: Tokenizer, cache_dir: Path, column: str) -> IndexedTokens:
    """Return the tokens of a text or data set, from the cache or prepared now (any number of processes may call together).

    Raises DatasetError for text that cannot be read, or a cache that cannot be written.
    """
    key = cache_key(root, tokenizer, column)
    home = cache_dir / key
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        if not home.is_dir():
            with _turn(cache_dir / f"{key}.lock", root) as (alone, said):
                if not home.is_dir():
                    _prepare_into(home, root, tokenizer, column, said, alone)
    except OSError as exc:
        raise DatasetError(
            f"{cache_dir}: prepared text cannot be kept here ({exc}); set dataset_config.cache_dir to a folder that this user can"
            " write and that has room"
        ) from None
    return IndexedTokens(home / "tokens")


def cache_key(root: Path, tokenizer: Tokenizer, column: str) -> str:
    """Return the name of what a text becomes: a hash over names and contents of its files, the tokenizer and FORMAT."""
    digest = hashlib.sha256(f"{FORMAT} {tokenizer.fingerprint()} {column}\n".encode())
    for path in _content_files(root):
        digest.update(f"{path.relative_to(root).as_posix()} {file_size(path)}\n".encode())
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:24]


def write_tokens(prefix: Path, root: Path, tokenizer: Tokenizer, column: str, told: Told) -> int:
    """Tokenize a text or data set into PREFIX.bin and PREFIX.idx; return the number of tokens."""
    writer = IndexedWriter(prefix, token_type(tokenizer.vocab_size))
    try:
        for batch in _batches(pieces(root, column)):
            texts = [piece.content for piece in batch if isinstance(piece.content, str)]
            encoded = iter(tokenizer.encode(texts) if texts else [])
            for piece in batch:
                ids = list(next(encoded) if isinstance(piece.content, str) else piece.content)
                if piece.ends_document and tokenizer.end_of_text is not None:
                    ids.append(tokenizer.end_of_text)
                writer.add(ids, ends_document=piece.ends_document)
            told(batch[-1].done)
        writer.finish()
    finally:
        writer.abandon()
    return writer.size


def pieces(root: Path, column: str) -> Iterator[Piece]:
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
            raise DatasetError(f"{path}: is no UTF-8 text ({exc}); convert it, or take it out of the folder") from None
        except OSError as exc:
            raise DatasetError(f"{path}: cannot be read ({exc.strerror})") from None
        done += size


def _of_file(file: TextIO, before: int, size: int, total: int) -> Iterator[Piece]:
    lines: list[str] = []
    room, read = _PIECE_BYTES, 0
    for line in file:
        if room <= 0:
            yield Piece("".join(lines), False, (before + min(read, size)) / total)
            lines, room = [], _PIECE_BYTES
        lines.append(line)
        room -= len(line)
        read += len(line)
    yield Piece("".join(lines), True, (before + size) / total)


def _rows(root: Path, column: str) -> Iterator[Piece]:
    try:
        library = importlib.import_module("datasets")
    except ImportError as exc:
        raise DatasetError(
            f"{root}: was saved by the package datasets, which is not here ({exc}); pip install datasets, or prepare the text elsewhere"
        ) from None
    found: Any = library.load_from_disk(str(root))
    if not hasattr(found, "column_names") or isinstance(found, dict):
        if "train" not in found:
            raise DatasetError(
                f"{root}: has the splits {', '.join(found)}: wanted train; name the folder of one of them"
            )
        found = found["train"]
    if column not in found.column_names:
        raise DatasetError(
            f"{root}: has no column {column!r}, but {', '.join(found.column_names)}; set dataset_config.text_column"
        )
    number = 0
    for rows in found.select_columns([column]).iter(batch_size=_ROWS):
        for content in rows[column]:
            number += 1
            yield Piece(content, True, number / len(found))


def _batches(found: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in found:
        batch.append(piece)
        size += len(piece.content)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _content_files(root: Path) -> list[Path]:
    if not is_saved_dataset(root):
        return list_files(root)
    return sorted(path for path in root.rglob("*") if path.is_file() and not path.name.startswith("cache-"))


# --- the cache ---


def _prepare_into(home: Path, root: Path, tokenizer: Tokenizer, column: str, said: Told, alone: bool) -> None:
    if alone:  # whoever held the lock before is dead: what it left is nobody's
        for left in home.parent.glob(f"{home.name}_tmp_*"):
            shutil.rmtree(left, ignore_errors=True)
    unfinished = home.with_name(f"{home.name}_tmp_{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    log.info("preparing %s with the tokenizer %s, kept in %s", root, tokenizer.name, home)
    try:
        count = write_tokens(unfinished / "tokens", root, tokenizer, column, said)
        with contextlib.suppress(OSError):  # another process was faster: its files are the same
            unfinished.rename(home)
        if not home.is_dir():
            raise DatasetError(
                f"{home}: {unfinished} cannot be renamed to it; set dataset_config.cache_dir to another folder"
            )
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    log.info("prepared %s: %s tokens", root, f"{count:,}")


@contextlib.contextmanager
def _turn(path: Path, root: Path) -> Iterator[tuple[bool, Told]]:
    """Wait until no other process prepares the same; give (nobody else writes here, how to say what is done).

    The lock's file says how far its holder is. Where the file system knows no locks nobody waits, and each prepares for itself.
    """
    with open(path, "a+", encoding="utf-8") as file:
        tell = _tenths(f"waiting for another rank to prepare {root}")
        alone = True
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                tell(_share_in(path))
                time.sleep(_POLL_S)
            except OSError:
                alone = False
                break
        own = _tenths(f"preparing {root}")

        def said(share: float) -> None:
            own(share)
            if alone:
                file.truncate(0)
                file.write(f"{share:.3f}")
                file.flush()

        yield alone, said


def _share_in(path: Path) -> float:
    try:
        return float(path.read_text(encoding="utf-8") or 0)
    except (OSError, ValueError):  # it is being written
        return 0.0


def _tenths(what: str) -> Told:
    """Return what says in the log each new tenth that is done."""
    told = -1

    def tell(share: float) -> None:
        nonlocal told
        if int(10 * share) > told:
            told = int(10 * share)
            log.info("%s: %d %%", what, round(100 * share))

    return tell


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
    unfinished = given.output.with_name(f"{given.output.name}_tmp_{os.getpid()}")
    ends = ("bin", "idx")
    try:
        tokenizer = open_tokenizer(given.tokenizer)
        with Progress() as bar:
            task = bar.add_task("preparing", total=1.0)
            count = write_tokens(
                unfinished, given.input, tokenizer, given.text_column, lambda share: bar.update(task, completed=share)
            )
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
    sys.exit(main())
