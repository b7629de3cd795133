"""Detects out-of-memory kills: distinguishes a worker that the OOM killer ended from one that another process sent SIGKILL.

It has two sources, where they are readable. The workers' memory cgroup counts OOM kills for any limit, the host's included (version 2:
`oom_kill` in `memory.events`; version 1: in `memory.oom_control`). The kernel's log names the process. The counter has no pids: each kill
explains one worker that ended by SIGKILL. Owns both readers; never writes. Without both, no kill is explained.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("ttp.launch")

PROC = Path("/proc")
KERNEL_LOG = Path("/dev/kmsg")
FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the host's own pid namespace (PROC_PID_INIT_INO): only there do the log's pids match this process's."""

_KILLED = re.compile(rb"[Kk]illed process (\d+)")


@dataclass(frozen=True, slots=True)
class Counter:
    """A cgroup's counter of out-of-memory kills: a line `oom_kill N` in `path`."""

    path: Path

    def read(self) -> int | None:
        """Return the count; None when it is not readable, or the kernel has none."""
        with contextlib.suppress(OSError, ValueError):
            for line in self.path.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
        return None


def counter_of(pid: int | str, proc: Path = PROC) -> Counter | None:
    """Find the counter of a process's memory cgroup; None: there is no readable one."""
    try:
        groups = (proc / str(pid) / "cgroup").read_text().splitlines()
        mounts = (proc / "self" / "mountinfo").read_text().splitlines()
    except OSError:
        return None
    for line in sorted(groups, key=lambda line: line.startswith("0:")):  # version 1's memory controller goes first
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            place, name = _place(mounts, "cgroup", "memory", path), "memory.oom_control"
        elif line.startswith("0::"):
            place, name = _place(mounts, "cgroup2", "", path), "memory.events"
        else:
            continue
        if place is not None and (counter := Counter(place / name)).read() is not None:
            return counter
    return None


def _place(mounts: Iterable[str], kind: str, controller: str, path: str) -> Path | None:
    """Return the directory of cgroup `path` under the mount of this kind; a container may see only a part of the tree."""
    for line in mounts:
        before, _, after = line.partition(" - ")
        if not after:
            continue
        root, point = before.split()[3:5]
        found, _, *options = after.split()
        if found != kind or (controller and controller not in options[-1].split(",")):
            continue
        inside = root == "/" or path == root or path.startswith(root + "/")
        return Path(point) / (path[len(root.rstrip("/")) :] if inside else "").lstrip("/")
    return None


class KernelLog:
    """The kernel's log from now on."""

    def __init__(self, path: Path = KERNEL_LOG, proc: Path = PROC) -> None:
        self._file: int | None = None
        self._killed: set[int] = set()
        with contextlib.suppress(OSError):
            if os.stat(proc / "self" / "ns" / "pid").st_ino == FIRST_PID_NAMESPACE:
                self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.lseek(self._file, 0, os.SEEK_END)

    def has_killed(self, pid: int) -> bool:
        """Return whether the log has an out-of-memory kill of this process."""
        while self._file is not None:
            try:
                record = os.read(self._file, 8192)
            except BrokenPipeError:  # old records were overwritten meanwhile
                continue
            except OSError:  # no more for now
                break
            if not record:
                break
            self._killed |= {int(number) for number in _KILLED.findall(record)}
        return pid in self._killed

    def close(self) -> None:
        file, self._file = self._file, None  # first: after a signal it may be closed again
        if file is not None:
            os.close(file)


class OutOfMemory:
    """Explains SIGKILLs of one attempt's workers. Made when they run; used by one thread at a time."""

    def __init__(self, pids: Iterable[int], *, proc: Path = PROC, kernel_log: Path = KERNEL_LOG) -> None:
        self._log = KernelLog(kernel_log, proc)
        self._proc = proc
        self._inherited = counter_of("self", proc)  # of a worker that has ended before its own could be found
        self._counters: dict[int, Counter | None] = {}
        self._explained: dict[Counter, int] = {}
        for pid in pids:
            self.add(pid)

    def add(self, pid: int) -> None:
        """Another worker runs."""
        counter = self._counters[pid] = counter_of(pid, self._proc) or self._inherited
        if counter is not None and counter not in self._explained:
            self._explained[counter] = counter.read() or 0

    def explain(self, pid: int) -> str:
        """Return why the kernel killed this worker, or empty: another process sent the signal. Called once for each worker that ended by
        SIGKILL, in the order of their ends."""
        counter = self._counters.get(pid)
        counted = counter.read() if counter is not None else None
        more = counter is not None and counted is not None and counted > self._explained[counter]
        if counter is not None and more:
            self._explained[counter] += 1
        if self._log.has_killed(pid):
            return "out of memory (the kernel's log names the process)"
        return f"out of memory (oom_kill in {counter.path} rose to {counted})" if counter is not None and more else ""

    def close(self) -> None:
        self._log.close()
