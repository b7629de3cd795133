"""Shutdown of this attempt's controllers on this node: by request first, then by SIGKILL.

Owns the proof that a process is a controller of this attempt: its command line (`ttp.controller`), and the attempt's unique id in the
environment that it inherited from its rank. Never signals a process without that proof.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from ttp.launch.links.controller_client import ControllerEntry
from ttp.launch.watch.processes import all_processes, command_line, environment, wait_until_gone

log = logging.getLogger("ttp.launch")

MODULE = "ttp.controller"
START_VARIABLE = "TTP_START_ID"
"""Set by the agent for its workers: unique to one attempt on one node of one job."""
LEAVE_S = 5.0
"""Time for a controller to exit on request: longer than the lease (3 s) for which it waits, at SIGTERM, for ranks to reconnect."""

RequestShutdown = Callable[[str], None]
"""`request_shutdown(address)`: ask the controller at `host:port` to exit. May raise: it is killed then."""


def is_controller(pid: int) -> bool:
    """Return whether a process was started as a controller: `python -m ttp.controller...`, or its installed script."""
    return any(word == MODULE or word.startswith(f"{MODULE}.") for word in command_line(pid))


def controllers_of(start_id: str) -> list[int]:
    """Find the controllers that this attempt's workers on this node have started, published or not, standbys included."""
    return [stat.pid for stat in all_processes() if not stat.gone and _proven(stat.pid, start_id)]


def _proven(pid: int, start_id: str) -> bool:
    """Return whether a process is a controller of this attempt now. Called before every signal: the pid may have been reused."""
    return is_controller(pid) and f"{START_VARIABLE}={start_id}" in environment(pid)


def end_controllers(
    start_id: str,
    published: ControllerEntry | None,
    request_shutdown: RequestShutdown,
    *,
    patience_s: float = 0.0,
    leave_s: float = LEAVE_S,
) -> list[int]:
    """End every controller of this attempt on this node; called when all its workers have ended.

    `patience_s`: how long they may first finish by themselves; other nodes' ranks may still be writing.
    Returns the processes that were killed. Does nothing without `/proc`: a controller exits by itself in the end.
    """
    running = controllers_of(start_id)
    found = _await_their_end(running, start_id, patience_s) if patience_s > 0 else running
    for pid in found:
        _ask(pid, start_id, published, request_shutdown)
    stayed = _remaining(found, start_id, leave_s)
    for pid in stayed:
        log.warning("killed controller (pid %d): no exit within %.0f s of the shutdown request", pid, leave_s)
        _signal(pid, start_id, signal.SIGKILL)
    _remaining(stayed, start_id, leave_s)
    return stayed


def _await_their_end(pids: list[int], start_id: str, patience_s: float) -> list[int]:
    """Wait for controllers to finish with other nodes' ranks, with a log line when it takes long; return those that have not in time."""
    _release_idle_standbys(pids, start_id)
    soon_s = min(LEAVE_S, patience_s)
    left = _remaining(pids, start_id, soon_s)
    if left and patience_s > soon_s:
        log.info(
            "waiting up to %.0f s for %s: ranks on other nodes may still be writing",
            patience_s - soon_s, _named(left),
        )  # fmt: skip
        left = _remaining(left, start_id, patience_s - soon_s)
    return left


def _named(pids: list[int]) -> str:
    """`controller (pid 71)`, `controllers (pids 71, 80)`."""
    several = "s" if len(pids) > 1 else ""
    return f"controller{several} (pid{several} {', '.join(map(str, pids))})"


def _release_idle_standbys(pids: list[int], start_id: str) -> None:
    """Release the standbys that lead no ranks; one that has taken over ignores the signal."""
    for pid in pids:
        if "--standby" in command_line(pid):
            _signal(pid, start_id, signal.SIGUSR1)


def _remaining(pids: list[int], start_id: str, timeout_s: float) -> list[int]:
    """Wait for these to end; return those that have not in time. A reused pid counts as ended."""
    deadline = time.monotonic() + timeout_s

    def stays(pid: int) -> bool:
        left_s = max(0.0, deadline - time.monotonic())
        return not wait_until_gone(pid, left_s, lambda: bool(command_line(pid)) and not _proven(pid, start_id))

    return [pid for pid in pids if stays(pid)]


def _ask(pid: int, start_id: str, published: ControllerEntry | None, request_shutdown: RequestShutdown) -> None:
    """Ask by message where the address is known, by SIGTERM otherwise; an idle standby whose agent runs handles SIGUSR1 only."""
    if published is not None and pid == published.pid:
        try:
            request_shutdown(published.address)
            return
        except Exception as error:  # any transport error: the signal below does as well
            log.debug("controller at %s does not answer (%s): sending SIGTERM", published.address, error)
    _release_idle_standbys([pid], start_id)
    _signal(pid, start_id, signal.SIGTERM)  # one that has taken over exits when its ranks have


def _signal(pid: int, start_id: str, number: signal.Signals) -> None:
    if _proven(pid, start_id):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
