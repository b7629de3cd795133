"""The death watch: detects within milliseconds that a worker of this node is exiting.

Owns one thread that polls each worker's kernel flags. Waiting for the process is slow for a large one: the kernel first frees its memory (0.6 s
at 4 GiB), and only then closes sockets and wakes the parent. The flag PF_EXITING is set before that. Never reaps, never signals, never decides
what a death means.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from ttp.launch.watch.processes import LOST, Lost, exit_status, status_of, status_text

PF_EXITING = 0x4
"""Bit of the flags in `/proc/<pid>/stat`: the kernel has begun to end the process (include/linux/sched.h)."""

POLL_S = 0.01
"""Default time between two looks at every worker: the wakeup is what costs, so half the time is nearly twice the processor time."""
ACCELERATOR_POLL_S = 0.02
"""The same on a node with accelerators: their steps and restarts are longer, and a wakeup there delays a thread that launches kernels."""
LONGEST_POLL_S = 1.0
"""With a longer interval every other sign of a death would come first."""

_SHORT_S = 0.05
"""Up to this interval the thread sleeps, and `stop` waits for it: a sleep takes a sixth less processor time than a wait on an event."""

_RUNNING = (b"R", b"S", b"D")
"""States of a process that runs, or sleeps until something happens; T and t: it is stopped or traced."""

_GONE = (errno.ENOENT, errno.ESRCH)

_WHOLE_LINE = 1024
_EXIT_CODE = 49
"""Field 52 of the line, counted from the state, which is field 3. The kernel sets it shortly before or after PF_EXITING, and shows it to
processes that may trace this one; others read 0."""


@dataclass(frozen=True, slots=True)
class Death:
    """A worker that exits. `status` is as `Popen.returncode`; None while the kernel still frees the process, or if it is lost."""

    rank: int
    pid: int
    seen_unix_s: float
    seen_monotonic_s: float
    text: str
    """`signal SIGKILL` or `exit code 1`, with the reason of a kill where it is known; `exiting` while the status is not known."""
    status: int | None
    settled: bool
    """The process has ended: its status will not change."""

    @property
    def failed(self) -> bool:
        return self.status is not None and self.status != 0

    @property
    def lost(self) -> bool:
        """Return whether the status is lost: another process or library has reaped this one."""
        return self.settled and self.status is None


class Probe(Protocol):
    """Reads the state of one process, often."""

    def ending(self) -> bool:
        """Return whether the process is exiting or has ended."""

    def gone(self) -> bool:
        """Return whether the process has ended. It need not be a child."""

    def running(self) -> bool:
        """Return whether the process runs: neither exiting nor stopped nor traced. False where that is not visible."""

    def status(self) -> int | None:
        """Return the status of an exiting process; None: not known, or 0."""

    def close(self) -> None: ...


class FlagsProbe:
    """Reads the flags of the process's first thread on an open descriptor (Linux).

    It reads `/proc/<pid>/task/<pid>/stat`: `/proc/<pid>/stat` sums the times of all threads at every read. Without a free descriptor it polls the
    exit status until there is one: only a missing process counts as ended.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._file: int | None = None
        self._missing = False
        self._flags_at, self._flags = slice(0), b"unknown"
        """Where the line of a living process had its parent, groups, terminal and flags, and these: most looks find them the same."""
        self._open()

    def _open(self) -> None:
        try:
            self._file = os.open(f"/proc/{self._pid}/task/{self._pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self._missing = error.errno in _GONE

    def _line(self) -> bytes:
        """Return the line's beginning; empty when the process is missing. Raises OSError: it cannot be read."""
        if self._file is None and not self._missing:
            self._open()
        if self._missing:
            return b""
        if self._file is None:
            raise OSError(errno.EMFILE, "no descriptor")
        try:
            return os.pread(self._file, 256, 0)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            self._missing = True
            return b""

    def _fields(self) -> list[bytes]:
        """Return the line's fields from the state on; empty when the process is missing. Raises OSError: it cannot be read."""
        return _split(self._line())

    def status(self) -> int | None:
        try:
            line = os.pread(self._file, _WHOLE_LINE, 0) if self._file is not None else b""
        except OSError:
            return None
        fields = line.rpartition(b")")[2].split()
        return status_of(int(fields[_EXIT_CODE])) if len(fields) > _EXIT_CODE else None

    def ending(self) -> bool:
        try:
            line = self._line()
        except OSError:
            return exit_status(self._pid) not in (None, LOST)
        if line[self._flags_at] == self._flags:
            return False
        fields = _split(line)
        if len(fields) < 7 or fields[0] in (b"Z", b"X", b"x") or int(fields[6]) & PF_EXITING:
            return True
        begin, self._flags = line.rindex(b")") + len(b") S "), b" ".join(fields[1:7])
        self._flags_at = slice(begin, begin + len(self._flags))
        return False

    def gone(self) -> bool:
        try:
            fields = self._fields()
        except OSError:
            return exit_status(self._pid) not in (None, LOST)
        return not fields or fields[0] in (b"Z", b"X", b"x")

    def running(self) -> bool:
        try:
            fields = self._fields()
        except OSError:
            return False
        return len(fields) >= 7 and fields[0] in _RUNNING and not int(fields[6]) & PF_EXITING

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
            self._missing = True


def _split(line: bytes) -> list[bytes]:
    return line.rpartition(b")")[2].split(None, 7)


class StatusProbe:
    """Polls the exit status, without reaping: late for a large process, but works without `/proc`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def ending(self) -> bool:
        return exit_status(self._pid) is not None

    def gone(self) -> bool:
        return self.ending()

    def running(self) -> bool:
        return False

    def status(self) -> int | None:
        status = exit_status(self._pid)
        return None if isinstance(status, Lost) else status or None

    def close(self) -> None:
        pass


def default_probe(pid: int) -> Probe:
    """Make the fastest probe that this system has."""
    return FlagsProbe(pid) if sys.platform == "linux" else StatusProbe(pid)


class DeathWatch:
    """Watches the workers of one node from `start` to `stop`.

    `report(death)` is called on the watch's own thread: once when a worker begins to exit, and again when its status is known (one call if both
    are seen at once), each time before the death is shown to others. It must not block: it delays the next poll.
    """

    def __init__(
        self,
        pids: Mapping[int, int],
        report: Callable[[Death], None],
        *,
        poll_s: float = POLL_S,
        probe: Callable[[int], Probe] = default_probe,
        explain_kill: Callable[[int], str] = lambda pid: "",
    ) -> None:
        """`explain_kill(pid)`: the reason of a worker's SIGKILL, or empty; called once for each, on the watch's thread."""
        self._pids = dict(pids)
        self._explain_kill = explain_kill
        self._report = report
        self._poll_s = poll_s
        self._probe = probe
        self._probes = {rank: probe(pid) for rank, pid in self._pids.items()}
        self._unsettled = [(rank, probe.ending) for rank, probe in sorted(self._probes.items())]
        """The ranks whose processes have not ended, sorted, with their probes' question: a pass of the thread is one call each."""
        self._deaths: dict[int, Death] = {}
        self._followed: dict[int, tuple[int, Probe]] = {}
        """By rank, the rank's own process where the worker is a shell that has started it, and its probe."""
        self._changed = threading.Condition()  # guards _unsettled, _deaths, _followed, _stopping and _error
        self._stopping = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="ttp-death-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close its descriptors; the deaths stay readable."""
        with self._changed:
            self._stopping.set()
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()
        for probe in (*self._probes.values(), *(probe for _, probe in self._followed.values())):
            probe.close()

    def follow(self, rank: int, pid: int) -> None:
        """Watch process `pid` for this rank from now on: the worker is a shell that has started it. The death begins when that process exits, and
        its status is the shell's; a shell that exits first is not a death."""
        with self._changed:
            if rank not in self._deaths and not self._stopping.is_set():
                self._followed[rank] = (pid, probe := self._probe(pid))
                self._unsettled = [(each, probe.ending if each == rank else ending) for each, ending in self._unsettled]

    def replace(self, rank: int, pid: int) -> None:
        """Another process has the place of this rank's, which has ended (its death is settled): watch that one, and forget the death."""
        with self._changed:
            if self._stopping.is_set():
                return
            assert self._deaths[rank].settled
            self._probes[rank].close()
            self._pids[rank], self._probes[rank] = pid, self._probe(pid)
            del self._deaths[rank]
            self._unsettled = sorted([*self._unsettled, (rank, self._probes[rank].ending)], key=lambda each: each[0])
            self._changed.notify_all()

    def deaths(self) -> dict[int, Death]:
        """Return the deaths so far, by rank."""
        with self._changed:
            return dict(self._deaths)

    def living(self) -> list[int]:
        """Return the ranks whose processes have not ended, sorted. Raises RuntimeError if the watch has failed."""
        with self._changed:
            return self._living()

    def begun(self) -> list[int]:
        """Return the ranks that are exiting now, by a fresh read."""
        with self._changed:
            self._living()
            return [rank for rank, ending in self._unsettled if ending()]

    def running(self) -> dict[int, int]:
        """Return the processes that run now, by rank, by a fresh read: neither exiting nor stopped. Never raises."""
        with self._changed:
            if self._error is not None or self._stopping.is_set():
                return {}
            probes = {rank: self._followed.get(rank, (pid, self._probes[rank])) for rank, pid in self._pids.items()}
            return {rank: pid for rank, (pid, probe) in probes.items() if rank not in self._deaths and probe.running()}

    def learn(self, rank: int, status: int) -> None:
        """Set the status of a worker that another process or library has reaped."""
        with self._changed:
            death = self._deaths.get(rank)
            if death is not None and death.lost:
                self._deaths[rank] = replace(death, status=status, text=status_text(status))
                self._changed.notify_all()

    def learn_lost(self, statuses: Mapping[int, int]) -> list[int]:
        """Set those of these statuses that are not known here; return the ranks whose status was not known before."""
        lost = [rank for rank, death in self.deaths().items() if death.lost]
        for rank in statuses.keys() & set(lost):
            self.learn(rank, statuses[rank])
        return lost

    def wait(self, timeout_s: float, until: Callable[[dict[int, Death]], bool]) -> bool:
        """Wait until `until(deaths)` is true; return whether it is. Called again at every change."""
        with self._changed:
            return self._changed.wait_for(lambda: until(dict(self._deaths)), timeout_s)

    def wait_all(self, timeout_s: float) -> bool:
        """Wait until every worker has ended; return whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._living(), timeout_s)

    def _living(self) -> list[int]:
        if self._error is not None:  # a job that fails is better than one whose deaths are not detected
            raise RuntimeError(f"the death watch has failed: {self._error}") from self._error
        return [rank for rank, _ in self._unsettled]

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._unsettled or self._stopping.is_set())
                    if self._stopping.is_set():
                        return
                    begun = [rank for rank, ending in self._unsettled if ending()]
                for rank in begun:
                    self._look(rank)
                if self._poll_s > _SHORT_S:
                    self._stopping.wait(self._poll_s)
                else:
                    time.sleep(self._poll_s)
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _ending(self, rank: int) -> bool:
        return (self._followed[rank][1] if rank in self._followed else self._probes[rank]).ending()

    def _early_status(self, rank: int) -> int | None:
        with self._changed:
            return (self._followed[rank][1] if rank in self._followed else self._probes[rank]).status()

    def _look(self, rank: int) -> None:
        before = self._deaths.get(rank)
        with self._changed:
            pid, followed = self._followed.get(rank, (self._pids[rank], None))
            if before is None and not self._ending(rank):
                return
        status = exit_status(self._pids[rank])
        if followed is not None and not followed.gone():
            status = None
        if before is None:
            early = status if status is not None else self._early_status(rank)
            text = "exiting" if early is None else status_text(early)
            death = Death(rank, pid, time.time(), time.monotonic(), text, None, False)
        elif status is None:
            return
        else:
            death = before
        if status is not None:
            known = None if isinstance(status, Lost) else status
            why = self._explain_kill(self._pids[rank]) if known == -signal.SIGKILL else ""
            text = f"{status_text(status)}, {why}" if why else status_text(status)
            death = replace(death, text=text, status=known, settled=True)
        self._report(death)
        with self._changed:
            self._deaths[rank] = death
            if death.settled:
                self._unsettled = [each for each in self._unsettled if each[0] != rank]
            self._changed.notify_all()
