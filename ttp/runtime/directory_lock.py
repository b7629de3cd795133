"""The checkpoint directories of one run: that no other run writes there, and which checkpoints the run may resume from.

Called by rank 0 alone, or by the keeper of each node that has directories of its own; `ttp.runtime.directory_agreement` informs
the others. Owns the lock file and the run's note beside the checkpoints:

    .ttp_lock       held (flock) by that rank of the job that writes here, released by the kernel when it ends, however it ends
    .ttp_run.json   what was there when the job was first started: a restart after a fault must not take it for its own
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from ttp import files
from ttp.checkpoint import find
from ttp.checkpoint.format.durable import step_of_directory, write_durably
from ttp.checkpoint.staging import clean_stale
from ttp.checkpoint.store import SharedStore, Store
from ttp.errors import CheckpointError, NotWritable
from ttp.inputs.input_file import read_text

log = logging.getLogger("ttp")

LOCK_NAME = ".ttp_lock"
NOTE_NAME = ".ttp_run.json"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
LOCK_WAIT_S = 10.0
"""A rank 0 that was killed holds its lock until the kernel has freed it."""


def check_same(directory: str, mark: str, keeper: int, own_host: str = "") -> None:
    """Make sure that `directory` is the one that rank `keeper` has claimed under this name. Raises NotWritable.

    own_host: this rank's node as the job names it, where each node has directories of its own; empty where all share them.
    """
    if not (Path(directory) / mark).exists() and own_host:
        raise NotWritable(
            f"checkpoint directory {directory} is another one here than for rank {keeper}, whose node is named {own_host!r} as"
            " well, expected a name for each node, for TTP_SHARED_DIRS is False; set TTP_HOST to another one on each"
        )
    if not (Path(directory) / mark).exists():
        raise NotWritable(
            f"checkpoint directory {directory}: got another one than on rank {keeper}, expected one that all nodes share; if"
            " every node has its own, set TTP_SHARED_DIRS=False on all of them"
        )


def why_unusable(save_dirs: Sequence[str], failing: Mapping[str, str], first_start: bool) -> str:
    """Return why this run cannot save in its directories, empty if it can: at its first start all must serve, at a restart one.

    failing: what some rank found out, by directory.
    """
    if not failing or (not first_start and len(failing) < len(save_dirs)):
        return ""
    return next(iter(failing.values()))


class RunDirectories:
    """The view of the checkpoint directories, in order of preference, of the rank that keeps them."""

    def __init__(self, save_dirs: Sequence[str], job_id: str, first_start: bool, store: Store | None = None) -> None:
        """`first_start`: this is not a restart after a fault. `store`: what kind of directories they are; None: shared by all ranks."""
        self._save_dirs = tuple(save_dirs)
        self._job_id = job_id
        self._first_start = first_start
        self._store = store or SharedStore()
        self._locks: dict[str, int] = {}
        self.mark = ""
        """Name of a file that is in each directory between `claim` and `remove_mark`: other ranks look for it."""
        self.failing: dict[str, str] = {}
        """Directories that could not be claimed, and why: a restart goes on without them, but reads those whose lock it has."""

    def claim(self) -> None:
        """Lock all directories and remove what interrupted writes, and an earlier job's note, left.

        Raises NotWritable where another job writes, and at the job's first start for a directory that fails. At a restart that
        one is left out (`failing`): a disk that had filled up is what the fault may have been, and others have the step.
        """
        mark = f".ttp_probe_mark_{uuid.uuid4().hex}"
        for directory in self._save_dirs:
            try:
                os.makedirs(directory, exist_ok=True)
                self._lock(directory)
                clean_stale(directory)
                if self._first_start:
                    (Path(directory) / NOTE_NAME).unlink(missing_ok=True)
                open(Path(directory) / mark, "x", opener=files.opener).close()
            except OSError as error:
                reason = (
                    f"checkpoint directory {directory} cannot be used: {error.strerror or error} ({error.filename});"
                    " choose another directory, or correct its permissions and free space"
                )
                if self._first_start:
                    raise NotWritable(reason) from None
                self.failing[directory] = reason
        self.mark = mark

    def take_over(self, used: Sequence[str]) -> None:
        """Lock those that the attempt uses, in the place of a process that was lost while the job runs. Nothing is removed: other ranks may be writing.
        Raises NotWritable: another job writes there, or it cannot be locked."""
        for directory in used:
            try:
                self._lock(directory)
            except OSError as error:
                raise NotWritable(
                    f"checkpoint directory {directory}: got {error.strerror or error}, expected that it can be locked as before"
                ) from error

    def remove_mark(self) -> None:
        """Every rank has looked."""
        for directory in self._save_dirs if self.mark else ():
            with contextlib.suppress(OSError):  # of a disk that fails; the next attempt removes it
                (Path(directory) / self.mark).unlink(missing_ok=True)

    def release(self) -> None:
        """Give the locks back."""
        while self._locks:
            os.close(self._locks.popitem()[1])

    def forget_superseded(self, step: int) -> None:
        """All ranks have loaded the checkpoint of `step`: of older ones, the parts that later writes have superseded go."""
        for directory in self._readable:
            try:
                removed = self._store.remove_superseded([directory], step)
            except OSError as error:
                log.warning("superseded parts in %s stay, for it cannot be read: %s", directory, error)
                continue
            for path in removed:
                log.info(
                    "removed %s: a later write of that step is there, and all ranks have loaded step %d", path, step
                )

    def candidates(self, choice: str) -> list[str]:
        """Return the checkpoints that `Session.resume(choice)` may load, newest first. Raises CheckpointError, and OSError where
        a directory cannot be read: at a restart where none can."""
        found = [str(path) for path in find.list_readable(self._readable, self._pass_over, self._store.list_published)]
        if choice == "auto":
            return found
        named = [] if choice == "never" else [str(Path(choice).resolve())]
        if named and step_of_directory(Path(named[0])) is None:
            raise CheckpointError(
                f"resume: got {choice!r}, expected auto, never, or the path of a checkpoint (.../iter_0000042)"
            )
        if named:
            self._store.check_choice(Path(named[0]), self._save_dirs)
        after = find.step_of(named[0]) if named else 0
        earlier = self._note_of_this_job()
        if earlier is not None:  # a restart: what was not there at the first start is this run's
            return [path for path in found if path not in earlier] + named
        if self._store.began_after is not None:  # this node comes later: the store knows what is this run's
            return found
        newer = [path for path in found if find.step_of(path) > after]
        if newer:
            raise CheckpointError(
                f"resume is {choice!r}, but {Path(newer[0]).parent} holds newer checkpoints (the newest: {Path(newer[0]).name}),"
                " which this run's would be mixed up with; resume 'auto', use an empty directory, or move them away"
            )
        self._write_note(found)
        return named

    def _note_of_this_job(self) -> set[str] | None:
        """Return what was there at this job's first start, None if this is the first start, or it was refused."""
        if self._first_start:
            return None
        for directory in self._readable:
            try:
                note = json.loads(read_text(Path(directory) / NOTE_NAME))
                if note["job_id"] == self._job_id:
                    return set(note["found"])
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                continue
        return None

    def _write_note(self, found: Sequence[str]) -> None:
        """Leave the note in every directory: at a restart some may not be readable. Raises OSError; at a restart where none takes
        it."""
        body = json.dumps({"job_id": self._job_id, "found": list(found)}).encode()
        problems = []
        for directory in self._readable:
            try:
                write_durably(Path(directory) / NOTE_NAME, body, private=True)
            except OSError as error:
                problems.append(error)
        if problems and (self._first_start or len(problems) == len(self._readable)):
            raise problems[0]

    @property
    def _readable(self) -> list[str]:
        """Those that are claimed, and those that failed afterwards: another job does not write there."""
        return [each for each in self._save_dirs if each not in self.failing or each in self._locks]

    def _pass_over(self, directory: Path, error: OSError) -> None:
        """A directory cannot be read."""
        if self._first_start:
            raise error
        log.warning("checkpoints in %s are passed over, for it cannot be read: %s", directory, error)

    def _lock(self, directory: str) -> None:
        path = Path(directory) / LOCK_NAME
        descriptor = files.opener(str(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.1)
                    continue
                owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "unknown"
                os.close(descriptor)
                raise NotWritable(
                    f"checkpoint directory {path.parent} is in use by another job (its rank 0: {owner}); two jobs would publish"
                    f" over each other: end that job, or choose another directory{self._store.in_use_advice}"
                ) from None
        self._locks[directory] = descriptor
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"pid {os.getpid()} on {os.uname().nodename}".encode(), 0)
        except OSError as error:  # a full disk: the lock counts, not its owner's name
            if error.errno not in NO_ROOM:
                raise
