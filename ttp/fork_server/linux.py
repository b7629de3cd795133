"""What Linux offers to processes and Python does not: orphans' parent, death with the parent, low priority, and what `ps` shows.

Every function does nothing where the system has no such thing; `adopting_orphans` raises OSError.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ARG_START = 45
"""Field 48 of `/proc/self/stat`, counted from the state, which is field 3; the end of the arguments and both ends of the environment follow."""


def _prctl(option: int, value: int) -> int:
    return int(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0))


def end_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when the thread that started it ends."""
    with contextlib.suppress(AttributeError, OSError):
        _prctl(_PR_SET_PDEATHSIG, number)


def lower_priority(nice: int) -> None:
    """Run this process, the only one of its session, behind others, and behind those of other sessions."""
    with contextlib.suppress(OSError):
        os.nice(nice)
    set_session_priority(nice)


def set_session_priority(nice: int) -> None:
    """Set the share of the CPU of this process's session, 0 to 19 (0: that of any other).

    Linux may give each session an equal share (`sched_autogroup_enabled`): a process's own nice then counts within its session alone. Without
    privileges the whole machine may do so once in 100 ms: it is tried again for a while.
    """
    until = time.monotonic() + 1.0
    while True:
        try:
            Path("/proc/self/autogroup").write_text(str(nice))
        except BlockingIOError:
            if time.monotonic() < until:
                time.sleep(0.05)
                continue
        except OSError:
            pass  # the kernel has no such thing
        return


class LowShare:
    """While one thread or several are within it, this process's session has a low share of the CPU."""

    def __init__(self, nice: int) -> None:
        self._nice = nice
        self._lock = threading.Lock()
        self._within = 0  # guarded by the lock

    def __enter__(self) -> None:
        with self._lock:
            self._within += 1
            if self._within == 1:
                set_session_priority(self._nice)

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._within -= 1
            if not self._within:
                set_session_priority(0)


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Be the parent of descendants whose own parents end meanwhile (PR_SET_CHILD_SUBREAPER). Raises OSError."""
    if _prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), f"PR_SET_CHILD_SUBREAPER: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def show_as(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
    """Have `ps`, `pgrep` and `/proc/<pid>/environ` show these; what does not fit in the room that this process has is cut.

    The room is that of the arguments and variables that the process, or the one that it was forked from, was started with. Nothing may
    refer to them any more: `os.environ` has been replaced. Without `environ` the variables stay.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        arg_start, arg_end, env_start, env_end = (int(field) for field in fields[_ARG_START : _ARG_START + 4])
        _fill(arg_start, arg_end, [os.fsencode(word) for word in argv])
        if environ is None:
            return
        variables = sorted(environ.items(), key=lambda item: not item[0].startswith("TTP_"))  # these are looked for
        _fill(env_start, env_end, [os.fsencode(f"{name}={value}") for name, value in variables])


def _fill(start: int, end: int, entries: Sequence[bytes]) -> None:
    """Write entries with a zero behind each; the first that does not fit ends the list, and the rest is zeros."""
    room = end - start
    if start <= 0 or room <= 0:
        return
    content = b""
    for entry in entries:
        if len(content) + len(entry) + 1 > room:
            break
        content += entry + b"\0"
    ctypes.memmove(start, content.ljust(room, b"\0"), room)
