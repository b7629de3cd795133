"""Can a checkpoint be written into these directories, how fast, and is there room?

Tries it for real, beside what is there: should this process be killed, the next job that starts there removes its probes by their names. Owns the
measuring of the disk.
"""

from __future__ import annotations

import errno
import os
import shutil
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ttp.checkpoint.format.durable import fsync_directory
from ttp.checkpoint.staging import probe_writable
from ttp.doctor.finding import FAILED, OK, WARNING, Finding, judged
from ttp.errors import NotWritable
from ttp.text.wording import size_text

MEASURED_BYTES = 128 << 20
"""Written to measure the disk; less where it takes longer than MEASURED_S."""
MEASURED_S = 3.0
BRIEF_BYTES = 4 << 20
"""Written where a job waits for the answer."""
CHUNK = 4 << 20
SYNCS = 8
SLOW_SYNC_S = 0.5
"""Every dump has some dozens of fsyncs, one after the other on a rank: files, staging directory, manifest, rename."""
CHECKPOINTS_MORE = 2
"""Than are kept: one that is written, and one staging directory that was given up (docs/operating.md)."""
MOST_OF_TIME = 1 / 4
"""The part of TTP_OT that a dump may take: what one rank never ends, others write again."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What a disk does, for one writer."""

    bytes_per_s: float
    """Written and synced."""
    sync_s: float
    """The median of a small write's fsync."""


@dataclass(frozen=True, slots=True)
class CheckpointSize:
    """A checkpoint of the job."""

    nbytes: int
    """Of all ranks together."""
    on_node: int
    """The part that this node's ranks write."""
    local: bool
    """Each node has directories of its own."""
    timeout_s: float
    """TTP_OT."""

    @property
    def in_directory(self) -> int:
        """Bytes of one checkpoint in a directory of this node."""
        return self.on_node if self.local else self.nbytes


def check(
    directory: Path, dump: CheckpointSize | None, clock: Callable[[], float] = time.perf_counter
) -> Iterator[Finding]:
    """Yield what is found of one directory. Nothing of it stays."""
    name = f"directory {directory}"
    found, place = takes_files(directory)
    yield found
    if place is None:
        return
    try:
        with _Probe(place) as probe:
            yield _links(name, probe.folder)
            speed = measure(probe.folder, clock)
        room = _room(name, place, dump)
    except OSError as error:
        yield _not_measured(name, error, MEASURED_BYTES)
        return
    yield _speed(name, speed)
    yield room
    if dump is not None:
        yield _time(name, speed, dump)


def check_briefly(directory: Path) -> Iterator[Finding]:
    """Yield what is found of one directory in a fraction of a second: a little is written and synced there. Nothing of it stays."""
    name = f"directory {directory}"
    found, place = takes_files(directory)
    yield found
    if place is None:
        return
    try:
        with _Probe(place) as probe:
            yield _speed(name, measure(probe.folder, nbytes=BRIEF_BYTES))
    except OSError as error:
        yield _not_measured(name, error, BRIEF_BYTES)


def takes_files(directory: Path) -> tuple[Finding, Path | None]:
    """Return whether files can be made in a directory, and where they can: there, or in the nearest one above that exists. None: nowhere."""
    name = f"directory {directory}"
    place = directory
    try:
        place = next((each for each in (directory, *directory.absolute().parents) if each.exists()), Path("/"))
        if not place.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        probe_writable(place)
    except (OSError, NotWritable) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        found = f"{place} cannot be written: {getattr(cause, 'strerror', None) or cause}"
        do = "Name another one in save_dirs, or correct its permissions and free space"
        return Finding(name, FAILED, found, "a directory that takes a checkpoint", do), None
    missing = "" if place == directory else f"is not there, will be made in {place}; "
    return Finding(name, OK, f"{missing}files are written, synced and renamed there"), place


def _not_measured(name: str, error: OSError, nbytes: int) -> Finding:
    found = f"could not be measured: {error.strerror or error}"
    return Finding(
        name, FAILED, found, f"room for a file of {size_text(nbytes)}", "Make room, or name another directory"
    )


class _Probe:
    """A folder that is gone with the block."""

    def __init__(self, place: Path) -> None:
        self.folder = place / f".ttp_probe_{uuid.uuid4().hex}"

    def __enter__(self) -> _Probe:
        self.folder.mkdir()
        return self

    def __exit__(self, *exc: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _links(name: str, folder: Path) -> Finding:
    try:
        (folder / "one").touch()
        os.link(folder / "one", folder / "two")
        linked, found = True, "hard links are made there"
    except OSError as error:
        linked, found = False, f"hard links are refused ({error.strerror or error})"
    do = "It works without: what a rank has written is written again when a standby takes over in the middle of a dump"
    return judged(f"{name}, links", linked, found, "a file system with hard links", do)


def measure(folder: Path, clock: Callable[[], float] = time.perf_counter, nbytes: int | None = None) -> Speed:
    """Measure a disk by what a dump does: bytes that do not compress, written and synced, then small files with an fsync each. Raises OSError."""
    chunk, written, began = os.urandom(CHUNK), 0, clock()
    with open(folder / "bytes", "xb", buffering=0) as file:
        while written < (MEASURED_BYTES if nbytes is None else nbytes) and clock() - began < MEASURED_S:
            written += file.write(chunk)
        os.fsync(file.fileno())
    took_s = max(1e-9, clock() - began)
    (folder / "bytes").unlink()
    syncs = []
    for number in range(SYNCS):
        began = clock()
        with open(folder / f"small_{number}", "xb") as file:
            file.write(b"probe")
            file.flush()
            os.fsync(file.fileno())
        fsync_directory(folder)
        syncs.append(clock() - began)
    return Speed(written / took_s, statistics.median(syncs))


def _speed(name: str, speed: Speed) -> Finding:
    return judged(
        f"{name}, speed", speed.sync_s < SLOW_SYNC_S, f"{size_text(speed.bytes_per_s)}/s for one writer, {1e3 * speed.sync_s:.1f} ms a small fsync",
        f"fsyncs below {1e3 * SLOW_SYNC_S:.0f} ms", "Each dump waits for dozens of them: use a faster disk, or one that others use less",
        bytes_per_s=round(speed.bytes_per_s), fsync_ms=round(1e3 * speed.sync_s, 3),
    )  # fmt: skip


def _room(name: str, place: Path, dump: CheckpointSize | None) -> Finding:
    free = shutil.disk_usage(place).free
    needed = CHECKPOINTS_MORE * dump.in_directory if dump is not None else 0
    return judged(
        f"{name}, room", free >= needed, f"{size_text(free)} are free",
        f"{size_text(needed)}, for {CHECKPOINTS_MORE} checkpoints more than are kept",
        "Make room, keep fewer (keep_checkpoint_max, `ttp ckpt prune`), or name a second directory",
        bad=FAILED, free_bytes=free, needed_bytes=needed,
    )  # fmt: skip


def _time(name: str, speed: Speed, dump: CheckpointSize) -> Finding:
    """A fault's time must hold a dump, and others that write again what one rank never ends."""
    seconds = dump.on_node / speed.bytes_per_s + SYNCS * speed.sync_s
    most = MOST_OF_TIME * dump.timeout_s
    found = f"{size_text(dump.on_node)} of this node take about {seconds:.1f} s, by one writer's speed; TTP_OT is {dump.timeout_s:g} s"
    return judged(
        f"{name}, dump", seconds <= most, found, f"at most {most:g} s, a quarter of TTP_OT", f"Set TTP_OT={4 * seconds:.0f} or more, or use a faster disk",
        bad=FAILED if seconds > dump.timeout_s else WARNING, seconds=round(seconds, 3), timeout_s=dump.timeout_s,
    )  # fmt: skip
