"""The processes that a standby waits for: the rank that started it, and that rank's launcher.

A standby to which no rank ever attaches would stay for good. It ends when both are gone: by then no rank of its node needs it,
and ranks of other nodes have had a while to come. Owns the watching only. A process is held by a descriptor of its own
(pidfd), so that its number, given to another process later, is never taken for it.
"""

from __future__ import annotations

import contextlib
import os
import select


class Guardians:
    """`alive` may be asked as often as one likes. Without any guardian, none is ever gone."""

    def __init__(self, pids: tuple[int, ...]) -> None:
        self._watched = bool(pids)
        self._handles: dict[int, int | None] = {}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                self._handles[pid] = _open(pid)

    def alive(self) -> bool:
        """Say whether one of them still runs."""
        for pid, handle in list(self._handles.items()):
            if not _runs(pid, handle):
                del self._handles[pid]
                if handle is not None:
                    os.close(handle)
        return bool(self._handles) or not self._watched

    def watch_over(self) -> bool:
        """Say whether there are any, and one of them still runs."""
        return self._watched and self.alive()


def _open(pid: int) -> int | None:
    """Return a descriptor of the process, None where the system has none. Raises ProcessLookupError when it is gone."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):  # not Linux, or an old kernel
        return None


def _runs(pid: int, handle: int | None) -> bool:
    if handle is not None:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return not poll.poll(0)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
