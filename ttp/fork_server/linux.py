"""What Linux offers to processes and Python does not: orphans' parent, death with the parent, low priority, and what `ps` shows.

Every function does nothing where the system has no such thing; `adopting_orphans` raises OSError.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
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
    """Run this process, the only one of its session, behind those of other sessions.

    Linux may give each session an equal share of the CPU (`sched_autogroup_enabled`): nice then counts within the session alone, and the session's
    own nice decides.
    """
    with contextlib.suppress(OSError):
        os.nice(nice)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(nice))


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
