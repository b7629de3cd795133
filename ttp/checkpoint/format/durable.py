"""Small acts on the file system that survive a power cut, and the tracker file.

Owns how bytes are made durable and how names are replaced; knows nothing of tensors. Never removes a published
checkpoint. Every call goes through the `os` module, where tests make any one of them fail.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ttp import files
from ttp.errors import CheckpointError, CorruptCheckpoint, TTPError
from ttp.inputs import input_file
from ttp.text.wording import size_text

logger = logging.getLogger(__name__)

TRACKER_NAME = "latest_checkpointed_iteration.txt"
_TRACKER_BYTES = 32
"""A longer file names no step."""
_STEP_DIRECTORY = re.compile(r"iter_([0-9]{7,19})")
"""A step fits into 64 bits."""
_LOCK_PATIENCE_S = 2.0


def step_directory_name(step: int) -> str:
    """`iter_0000042`."""
    return f"iter_{step:07d}"


def step_of_directory(path: Path) -> int | None:
    """Return the step of a published directory's name, None for any other name (temporary, renamed as broken, foreign)."""
    match = _STEP_DIRECTORY.fullmatch(path.name)
    return int(match.group(1)) if match and step_directory_name(int(match.group(1))) == path.name else None


def steps_in(directory: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of all published directories, newest first; none when the directory is not there."""
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [(step, directory / name) for name in names if (step := step_of_directory(Path(name))) is not None]
    return sorted(found, key=lambda pair: -pair[0])


def inodes_in(folders: Iterable[str]) -> dict[str, int]:
    """Return the inode of each published checkpoint by its path, of folders that can be read: with it one is known from another that takes its
    name later."""
    found: dict[str, int] = {}
    for folder in folders:
        with contextlib.suppress(OSError):
            for _, path in steps_in(Path(folder)):
                with contextlib.suppress(OSError):  # removed meanwhile
                    found[str(path)] = os.lstat(path).st_ino
    return found


def steps_of_run(folders: Iterable[str], passed_over: Mapping[str, int]) -> list[tuple[int, Path]]:
    """Return (step, path) of all published in these folders, newest first, but for those in `passed_over` (inodes by path). Of a folder that cannot
    be read: none."""
    paths = [Path(path) for path, _ in inodes_in(folders).items() - passed_over.items()]
    found = [(step, path) for path in paths if (step := step_of_directory(path)) is not None]
    return sorted(found, key=lambda pair: (-pair[0], pair[1]))


def newest_step(folders: Iterable[str], passed_over: Mapping[str, int]) -> int:
    """Return the newest step of those; 0: there is none."""
    return next((step for step, _ in steps_of_run(folders, passed_over)), 0)


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def written_by_library(path: Path) -> Iterator[None]:
    """Within the block a library writes `path`. What it raises in a form of its own becomes CheckpointError.

    torch (RuntimeError, "unexpected pos") and safetensors (SafetensorError) say of a full disk something of their own.
    """
    try:
        yield
    except (OSError, TTPError):
        raise
    except Exception as error:
        free = shutil.disk_usage(path.parent).free if path.parent.is_dir() else 0
        raise CheckpointError(
            f"{path} could not be written: {type(error).__name__}: {error} ({size_text(free)} are free there); make room, or"
            " choose another place"
        ) from error


def write_durably(path: Path, content: bytes, *, private: bool = False, like: os.stat_result | None = None) -> None:
    """Write a file by way of a temporary neighbour, so that `path` is never seen half written. Fsyncs the file only:
    the caller makes the name durable. `private`: it is not part of a checkpoint, and has the mode of TTP's own files. `like`: it
    has the mode of that file, and its owner and group where this user may give it away."""
    neighbour = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    descriptor = files.opener(str(neighbour), flags) if private else os.open(neighbour, flags, 0o666)
    try:
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(descriptor, view) :]
            if like is not None:
                _make_alike(descriptor, like)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(neighbour, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(neighbour)
        raise


def _make_alike(descriptor: int, like: os.stat_result) -> None:
    os.fchmod(descriptor, stat.S_IMODE(like.st_mode))
    for owner in (like.st_uid, -1):
        with contextlib.suppress(OSError):  # a container may not know them
            os.fchown(descriptor, owner, like.st_gid)
            break


def open_regular(path: Path) -> io.FileIO:
    """Open a regular file of a checkpoint for reading. Raises OSError; CorruptCheckpoint for a pipe, a device or the like."""
    try:
        return input_file.open_regular(path)
    except input_file.NotRegular:
        raise CorruptCheckpoint(f"{path} is invalid: expected a regular file") from None


def read_tracker(directory: Path) -> int | None:
    """Return the step that the tracker names, None when it cannot be read or holds anything else. A hint, never a proof."""
    try:
        with open_regular(directory / TRACKER_NAME) as stream:
            content = stream.read(_TRACKER_BYTES + 1) or b""
    except (OSError, CorruptCheckpoint):
        return None
    if len(content) > _TRACKER_BYTES or not content.strip().isdigit():
        return None
    step = int(content)
    return step if step < 2**63 else None


def advance_tracker(directory: Path, step: int) -> int:
    """Make the tracker name the newest of `step`, what it names now, and what is published; return that step.

    Two publishers may be here at once (one of them slow and long replaced), so this is done under a lock, and once more
    when a newer checkpoint appeared meanwhile: the tracker ends at the newest whatever the order. The lock is a help only:
    where the file system has none, or its owner is stopped, the second look still puts it right.
    """
    with _locked(directory):
        while True:
            newest = max([step, read_tracker(directory) or 0, *(s for s, _ in steps_in(directory))])
            if read_tracker(directory) != newest:
                write_durably(directory / TRACKER_NAME, f"{newest}\n".encode())
                fsync_directory(directory)
            if all(s <= newest for s, _ in steps_in(directory)):
                return newest


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the directory's advisory lock, or go on without it after a short patience."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + _LOCK_PATIENCE_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    logger.warning(
                        "%s: another process holds its lock for %.0f s; continuing", directory, _LOCK_PATIENCE_S
                    )
                    break
                time.sleep(0.01)
            except OSError as error:  # no locks on directories here (some network file systems)
                logger.debug("%s: no lock: %s", directory, error)
                break
        yield
    finally:
        os.close(descriptor)
