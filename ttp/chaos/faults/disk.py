"""Faults in the middle of a dump: at the n-th system call by which a rank makes bytes or names durable.

A tap stands in front of `os.mkdir`, `os.fsync`, `os.rename`, `os.replace` and `os.unlink` for one thread while it writes
or publishes; what the checkpoint code does between two of them is not seen by a crash. So a kill at every count is a death
between any two steps of a dump. (Bytes that another thread brings to the disk meanwhile, by `os.fdatasync`, are not tapped: the `os.fsync` of their
file, which comes after them on this thread, is.) Owns the tap only: no checkpoint code knows of it. At its end the tap puts back the functions that it
found: whatever else replaces one of them in the middle of a dump is undone.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from ttp.chaos.faults.inject import DUMP_POINTS, Injection, commit

TAPPED = ("mkdir", "fsync", "rename", "replace", "unlink")
_ERRNO = {"enospc": errno.ENOSPC, "eio": errno.EIO}

Dump = Callable[[str, int, str], contextlib.AbstractContextManager[None]]
"""`with dump(point, step, path):` around the writing or publishing of a step into `path`."""


def dump_faults(faults: tuple[Injection, ...]) -> Dump:
    """Return what a holder wraps its writing and publishing in; does nothing where no fault is meant."""
    mine = {(fault.point, fault.step): fault for fault in faults if fault.point in DUMP_POINTS}
    uses: collections.Counter[Injection] = collections.Counter()

    def dump(point: str, step: int, path: str) -> contextlib.AbstractContextManager[None]:
        fault = mine.get((point, step))
        if fault is None or uses[fault] >= fault.times:
            return contextlib.nullcontext()
        uses[fault] += 1
        return tap(fault, Path(path))

    return dump


@contextlib.contextmanager
def tap(fault: Injection, path: Path, commit: Callable[[Injection], None] = commit) -> Iterator[None]:
    """Count this thread's system calls; a disk fault lasts from its call on, any other comes once. `commit` is called as it begins, at the call
    that is hit, and does the others."""
    me, calls, begun = threading.get_ident(), 0, False

    def tapped(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls, begun
            if threading.get_ident() == me:
                counts = fault.call_name in ("", name, _target(args))
                if fault.action in _ERRNO:
                    hit = calls >= fault.call and name != "unlink"
                elif fault.action == "slowdisk":
                    hit = calls >= fault.call
                else:
                    hit = calls == fault.call and counts and fault.action != "torn"
                if hit and not begun:
                    begun = True
                    commit(fault)
                if hit and fault.action in _ERRNO:
                    code = _ERRNO[fault.action]
                    raise OSError(code, os.strerror(code), str(args[0]))
                if hit and fault.action == "slowdisk":
                    time.sleep(fault.for_s)
                calls += counts
            return real(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in TAPPED:
            stack.enter_context(mock.patch.object(os, name, tapped(name)))
        yield
    if fault.action == "torn":
        commit(fault)
        _tear(path)


def _target(args: tuple[Any, ...]) -> str:
    """Return the name of the file or directory that a system call makes, moves to or removes; empty for a descriptor."""
    return Path(args[-1]).name if args and isinstance(args[-1], str | os.PathLike) else ""


def _tear(path: Path) -> None:
    """Cut the newest file in half: the disk had promised it."""
    newest = max(path.glob("*.distcp"), key=lambda file: file.stat().st_mtime_ns)
    os.truncate(newest, newest.stat().st_size // 2)
