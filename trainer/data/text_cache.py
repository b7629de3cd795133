"""Tokenized text, kept in a folder: prepared once, by one of the processes that ask for it.

Owns the names in the cache, the hashes of the text's files, the turn among processes, and what becomes of the leftovers of dead
ones. A prepared data set appears whole or not at all (a rename), under a name made of the text's content, the tokenizer and
FORMAT: ranks that start together wait for the one that prepares, and whoever dies leaves nothing that another would take for
whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import select
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ttp.errors import DatasetError
from ttp.inputs import checked
from ttp.inputs.input_file import read_json

from . import prepare
from .megatron_indexed import IndexedTokens
from .prepare import Progress, is_saved_dataset, unfinished_beside
from .tokenizer import Tokenizer
from .tokens import list_files

log = logging.getLogger("ttp.trainer")

FORMAT = 2
"""Part of the name in the cache: another way of preparing is another data set."""

_POLL_S = 0.2
_DAY_S = 86400.0
_MOST_NOTE_BYTES = 256 << 20
_RECENT_NS = 2 * 10**9
"""A file that changed so shortly before it was hashed may have changed again under the same time."""
_READ_BYTES = 4 << 20
_UNFINISHED = re.compile(r".*_tmp_(.+)_(\d{1,9})_[0-9a-f]{32}")


def prepared(root: Path, tokenizer: Tokenizer, cache_dir: Path, column: str) -> IndexedTokens:
    """Return the tokens of a text or data set, from the cache or prepared now (any number of processes may call together).

    Raises DatasetError for text that cannot be read, or a cache that cannot be written.
    """
    with _keeping(cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True)
    key = cache_key(root, tokenizer, column, cache_dir)
    home = cache_dir / key
    if not home.is_dir():
        with _keeping(cache_dir), _turn(cache_dir / f"{key}.lock", f"preparing {root}") as progress:
            if not home.is_dir():
                _prepare_into(home, root, tokenizer, column, progress)
    try:
        return IndexedTokens(home / "tokens", key)
    except DatasetError as exc:
        raise DatasetError(f"{exc}: remove {home}, and the next attempt does so") from None


def cache_key(root: Path, tokenizer: Tokenizer, column: str, cache_dir: Path) -> str:
    """Return the name of what a text becomes: a hash over names and contents of its files, the tokenizer and FORMAT."""
    digest = hashlib.sha256(f"{FORMAT} {tokenizer.fingerprint()} {column}\n".encode())
    for name, (size, content) in sorted(hash_files(root, cache_dir).items()):
        digest.update(f"{name} {size} {content}\n".encode())
    return digest.hexdigest()[:24]


@contextlib.contextmanager
def _keeping(cache_dir: Path) -> Iterator[None]:
    """Say of an error within that it is the cache's: what reads text makes a DatasetError of its own."""
    try:
        yield
    except OSError as exc:
        raise DatasetError(
            f"{cache_dir}: prepared text cannot be kept here ({exc}); set dataset_config.cache_dir to a folder that this user can"
            " write and that has room"
        ) from None


# --- hashes of the text's files ---


def hash_files(root: Path, cache_dir: Path) -> dict[str, tuple[int, str]]:
    """Return (size, hash of the content) of each file of a text by its path below `root`.

    What a file was is noted in the cache with its hash, so that a start reads only what has changed since; and of the processes
    that start together one reads. Raises DatasetError.
    """
    asked_ns = time.time_ns()
    files = {path.relative_to(root).as_posix(): path for path in _content_files(root)}
    home = cache_dir / f"hashes_{hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]}.json"
    known = _noted(home, files, asked_ns)
    if len(known) < len(files):
        what = f"reading {root}"
        lock = home.with_suffix(".lock")
        # A cache that may only be read, or is another user's, is one, too.
        turn = _turn(lock, what) if os.access(lock if lock.exists() else cache_dir, os.W_OK) else _alone(what)
        with _keeping(cache_dir), turn as progress:
            known = _noted(home, files, asked_ns)
            if len(known) < len(files):
                known |= _hash_all({name: path for name, path in files.items() if name not in known}, progress)
                _note(home, known)
    return {name: (entry[0], entry[4]) for name, entry in known.items()}


def _noted(home: Path, files: Mapping[str, Path], asked_ns: int) -> dict[str, list[Any]]:
    """Return the noted entries [size, mtime_ns, inode, when it was hashed, hash] of the files that are still what they were."""
    try:
        noted = read_json(home, _MOST_NOTE_BYTES)
    except (OSError, ValueError):  # there is none, or it is not a note
        return {}
    known = {}
    for name, path in files.items():
        entry = noted.get(name) if isinstance(noted, dict) else None
        if not isinstance(entry, list) or [type(value) for value in entry] != [int, int, int, int, str]:
            continue
        if entry[:3] != _identity(path):
            continue
        if entry[3] - entry[1] > _RECENT_NS or entry[3] >= asked_ns:
            known[name] = entry
    return known


def _note(home: Path, known: Mapping[str, list[Any]]) -> None:
    unfinished = unfinished_beside(home)
    try:
        unfinished.write_text(json.dumps(known), encoding="utf-8")
        unfinished.replace(home)
    except OSError as exc:
        log.warning("%s cannot be written (%s): each attempt reads the whole text again", home, exc)
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _hash_all(files: Mapping[str, Path], progress: Progress) -> dict[str, list[Any]]:
    total, done = sum(_identity(path)[0] for path in files.values()), 0
    found: dict[str, list[Any]] = {}
    for name, path in files.items():
        began_ns, identity, digest = time.time_ns(), _identity(path), hashlib.sha256()
        for block in _blocks(path):
            digest.update(block)
            done += len(block)
            progress(min(1.0, done / max(total, 1)))
        found[name] = [*identity, began_ns, digest.hexdigest()]
    return found


def _identity(path: Path) -> list[int]:
    try:
        found = path.stat()
    except OSError as exc:
        raise DatasetError(f"{path}: cannot be read ({exc.strerror})") from None
    return [found.st_size, found.st_mtime_ns, found.st_ino]


def _blocks(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            while block := file.read(_READ_BYTES):
                yield block
    except OSError as exc:
        raise DatasetError(f"{path}: cannot be read ({exc.strerror}); give this user the right to read it") from None


def _content_files(root: Path) -> list[Path]:
    try:
        if is_saved_dataset(root):
            return sorted(path for path in root.rglob("*") if path.is_file() and not path.name.startswith("cache-"))
    except OSError as exc:
        raise DatasetError(f"{root}: cannot be read ({exc.strerror}); give this user the right to read it") from None
    return list_files(root)


# --- preparing ---


def _prepare_into(home: Path, root: Path, tokenizer: Tokenizer, column: str, progress: Progress) -> None:
    for left in home.parent.glob(f"{home.name}_tmp_*"):
        if _is_abandoned(left):
            shutil.rmtree(left, ignore_errors=True)
    unfinished = unfinished_beside(home)
    unfinished.mkdir()
    log.info("preparing %s with the tokenizer %s, kept in %s", root, tokenizer.name, home)
    try:
        count = prepare.write_tokens(unfinished / "tokens", root, tokenizer, column, progress)
        with contextlib.suppress(OSError):  # another process was faster: its files are the same
            unfinished.rename(home)
        if not home.is_dir():
            raise DatasetError(
                f"{home}: {unfinished} cannot be renamed to it; set dataset_config.cache_dir to another folder"
            )
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    log.info("prepared %s: %s tokens", root, f"{count:,}")


def _is_abandoned(unfinished: Path) -> bool:
    """True when the process that wrote it is dead, or may be: of another host's nothing can be known, but nothing of theirs has
    changed for a day."""
    made_by = _UNFINISHED.fullmatch(unfinished.name)
    if made_by and made_by[1] == socket.gethostname() and not _runs(int(made_by[2])):
        return True
    try:
        newest = max(path.stat().st_mtime for path in (unfinished, *unfinished.iterdir()))
    except OSError:  # someone removes it just now
        return False
    return time.time() - newest > _DAY_S


def _runs(pid: int) -> bool:
    """True for a process of this host that has not ended, and where that cannot be known."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except (AttributeError, OSError):  # not Linux, or an old kernel
        return True
    try:
        ended = select.poll()
        ended.register(handle, select.POLLIN)
        return not ended.poll(0)
    finally:
        os.close(handle)


# --- whose turn it is ---


@contextlib.contextmanager
def _turn(path: Path, what: str) -> Iterator[Progress]:
    """Wait until no other process does the same; give how to say what is done.

    The lock's file says how far its holder is. Where the file system has no locks no process waits, and each works for itself.
    """
    with open(path, "a+b", buffering=0) as file:
        tell = _tenths(f"waiting for another rank that is {what}")
        locked = True
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                tell(_share_in(path))
                time.sleep(_POLL_S)
            except OSError:
                locked = False
                break
        own, noted = _tenths(what), -1.0

        def progress(share: float) -> None:
            nonlocal noted
            own(share)
            if locked and share >= noted + 0.001:
                noted = share
                with contextlib.suppress(OSError):  # a full disk: a waiting process sees no progress, and still waits
                    file.truncate(0)
                    file.write(f"{share:.3f}".encode())

        yield progress


@contextlib.contextmanager
def _alone(what: str) -> Iterator[Progress]:
    yield _tenths(what)


def _share_in(path: Path) -> float:
    try:
        return checked.number(float(path.read_text(encoding="utf-8") or 0), "share", 0, 1)
    except (OSError, ValueError):  # it is being written, or is damaged
        return 0.0


def _tenths(what: str) -> Progress:
    """Return what says in the log each new tenth that is done."""
    logged = -1

    def tell(share: float) -> None:
        nonlocal logged
        if int(10 * share) > logged:
            logged = int(10 * share)
            log.info("%s: %d %%", what, round(100 * share))

    return tell
