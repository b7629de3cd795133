"""The state of processes by the operating system: running, exit status, and the processes of a session.

Owns the reading of `/proc` (Linux) and the ending of workers. Never reaps a process: the status is for the agent's own `Popen`, and the pid of
a worker that is not reaped cannot be reused, so that a signal never reaches another process.
"""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ttp.fork_server.kill import KILL_WAIT_S


class Lost(enum.Enum):
    """The exit status of a process that another process or library has reaped."""

    LOST = "gone, its status is lost"


LOST = Lost.LOST

_POLL_S = 0.02
_SWEEPS = 10


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """A line of `/proc/<pid>/stat`, as far as it is needed here."""

    pid: int
    state: str
    parent: int
    session: int

    @property
    def gone(self) -> bool:
        """The process has ended; only its status remains."""
        return self.state in "ZXx"

    @property
    def stopped(self) -> bool:
        """The process is stopped (SIGSTOP): it handles no signal but SIGKILL and SIGCONT. Stopped by a debugger does not count."""
        return self.state == "T"


def exit_status(pid: int) -> int | Lost | None:
    """Return how the child `pid` ended, without reaping it.

    Returns None while it runs (or is still being freed), else what `Popen.returncode` would be: the exit code, or
    minus the signal's number; `LOST` if it is not (or no longer) a child of this process.
    """
    try:
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return LOST
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def status_of(code: int) -> int | None:
    """Return the exit status that the kernel's `exit_code` encodes, as for wait(2); None for 0, which also means that it is not visible."""
    number, exited = code & 0x7F, (code >> 8) & 0xFF
    return -number if number else exited or None


def status_text(status: int | Lost) -> str:
    """Return an exit status as text: `signal SIGKILL`, `exit code 1`."""
    if isinstance(status, Lost):
        return status.value
    if status < 0:
        return f"signal {_signal_name(-status)}"
    if 128 < status <= 128 + signal.SIGRTMAX:
        return f"exit code {status} (a shell's code for {_signal_name(status - 128)})"
    return f"exit code {status}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def read_stat(pid: int) -> ProcessStat | None:
    """Read one process; None if there is none, or no `/proc`."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            line = file.read()
    except OSError:
        return None
    fields = line.rpartition(b")")[2].split(None, 4)
    return ProcessStat(pid, fields[0].decode(), int(fields[1]), int(fields[3]))


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped now; False if it has ended, or there is no `/proc`."""
    stat = read_stat(pid)
    return stat is not None and stat.stopped


def all_processes() -> list[ProcessStat]:
    """Read every visible process; empty where there is no `/proc`."""
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    return [stat for name in names if name.isdigit() and (stat := read_stat(int(name))) is not None]


def command_line(pid: int) -> list[str]:
    """Read the arguments of a process; empty if it has ended."""
    return _nul_list(f"/proc/{pid}/cmdline")


def environment(pid: int) -> list[str]:
    """Read the `NAME=value` entries that a process was started with; empty if it has ended or is another user's."""
    return _nul_list(f"/proc/{pid}/environ")


def _nul_list(path: str) -> list[str]:
    try:
        with open(path, "rb") as file:
            return [part.decode(errors="replace") for part in file.read().split(b"\0") if part]
    except OSError:
        return []


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, or ignores it; False if it has ended, or there is no `/proc`."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            masks = dict(line.split(":", 1) for line in file if line.startswith(("SigIgn:", "SigCgt:")))
    except OSError:
        return False
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks.values())


def end_workers(
    pids: Iterable[int], death_signal: signal.Signals | None, grace_s: float, kill_wait_s: float = KILL_WAIT_S
) -> list[int]:
    """Send `death_signal` to the workers' process groups (None: they have received it), and SIGKILL to those that still run after `grace_s`.

    `pids`: children of this process that it has not reaped. Returns those that needed SIGKILL. Does not wait longer than `kill_wait_s` after
    SIGKILL (uninterruptible sleep, or gigabytes to free).
    """
    living = [pid for pid in pids if exit_status(pid) is None]
    if death_signal is not None:
        for pid in living:
            _signal_group(pid, death_signal)
    living = _wait_for(living, grace_s, lambda pid: exit_status(pid) is None)
    for pid in living:
        _signal_group(pid, signal.SIGKILL)
    _wait_for(living, kill_wait_s, lambda pid: exit_status(pid) is None)
    return living


def signal_workers(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to the workers' process groups; those that have ended are skipped."""
    for pid in pids:
        if exit_status(pid) is None:
            _signal_group(pid, number)


def sweep_sessions(leaders: Iterable[int], spare: Callable[[int], bool], grace_s: float = 1.0) -> list[int]:
    """End leftover processes in the sessions of dead workers (data loaders, tools). Linux only; returns the processes found.

    `leaders`: workers; those that have been reaped are skipped, as their pids may be reused. A process that moved to a session of its own is
    left alone: it was meant to outlive the worker. `spare(pid)` excepts others.
    """
    sessions = {pid for pid in leaders if exit_status(pid) is not LOST}

    def members() -> list[int]:
        return [
            stat.pid
            for stat in all_processes()
            if stat.session in sessions and stat.pid not in sessions and not stat.gone and not spare(stat.pid)
        ]

    found = members()
    for pid in found:
        _signal(pid, signal.SIGTERM)
    if found:
        _wait_for(found, grace_s, _still_there)
        for _ in range(_SWEEPS):  # a process that was about to start another one may have done so before its end
            left = members()
            for pid in left:
                _signal(pid, signal.SIGKILL)
            if not left or _wait_for(left, grace_s, _still_there):
                break
    return found


def children_leading_sessions() -> list[int]:
    """List this process's own children that lead a session: the workers, also those that torch lost track of."""
    me = os.getpid()
    return [stat.pid for stat in all_processes() if stat.parent == me and stat.session == stat.pid]


def wait_until_gone(pid: int, timeout_s: float, replaced: Callable[[], bool] = lambda: False) -> bool:
    """Wait for a process that need not be a child; return whether it has ended. `replaced()`: whether its pid was reused."""
    return not _wait_for([pid], timeout_s, lambda pid: _still_there(pid) and not replaced())


def _still_there(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and not stat.gone


def _wait_for(pids: list[int], timeout_s: float, holds: Callable[[int], bool]) -> list[int]:
    """Wait until `holds` is false for all `pids`; return those for which it is still true after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while pids := [pid for pid in pids if holds(pid)]:
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    return pids


def _signal_group(pid: int, number: signal.Signals) -> None:
    """Signal the worker's process group, or the worker alone when it leads none (`--run-path`)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
