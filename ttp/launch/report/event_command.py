"""`--on-event COMMAND`: a command of the user's that is run for each event of the job.

Owns the thread that runs it, one event after another, and the bounds: seconds of one run, events that wait, seconds at the job's end. Whoever puts an
event never waits, and what becomes of a command is a line in the log alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shlex
import shutil
import signal
import subprocess
import threading
import time

from ttp.errors import ConfigError
from ttp.fork_server.kill import kill_and_wait

log = logging.getLogger("ttp.launch")

RUN_S = 30.0
"""A command that takes longer is killed, with what it has started in its session."""
END_S = 10.0
"""So long the job's end waits for the commands of its last events."""
START_S = 1.0
"""So long it waits then for one that is just being started, so as to kill it."""
MOST_WAITING = 64
"""Events that come while so many wait are left out."""
NICE = 10


def split_command(text: str) -> list[str]:
    """Return a command line's words. Raises ConfigError: it is none, or its program is not there."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"invalid --on-event: got {text!r} ({error}), expected a command with its arguments"
        ) from None
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(
            f"invalid --on-event: got {text!r}, expected a command whose program can be executed. Name it by its path, or correct PATH"
        )
    return words


class EventCommand:
    """`put` from any thread; `close` at the job's end."""

    def __init__(self, words: list[str], *, run_s: float = RUN_S, most_waiting: int = MOST_WAITING) -> None:
        self._words = words
        self._run_s = run_s
        self._waiting: queue.Queue[str | None] = queue.Queue(most_waiting)
        self._left_out = 0
        self._failures: dict[str, int] = {}
        self._lock = threading.Lock()
        self._closed = False  # guarded by the lock: nothing is started from then on
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="ttp-on-event", daemon=True)
        self._thread.start()

    def put(self, event: str) -> None:
        """Have the command run with this event, a line of JSON, as its stdin. Returns at once."""
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            self._left_out += 1
            if self._left_out == 1:
                log.warning(
                    "--on-event: %d events wait for the command already; others are left out", self._waiting.maxsize
                )

    def close(self, end_s: float = END_S) -> None:
        """Wait until the command has had every event, for `end_s` at most; then kill it. None is started from then on."""
        deadline = time.monotonic() + end_s
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=end_s)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            log.warning("--on-event: the command has not had all events within %g s of the job's end: killed", end_s)
            self._stop()
        if self._left_out:
            log.warning("--on-event: %d events were left out", self._left_out)

    def _stop(self) -> None:
        """Kill what runs, and leave out what waits."""
        held = self._lock.acquire(timeout=START_S)
        self._closed = True
        if held:
            self._lock.release()
        self._kill()
        with contextlib.suppress(queue.Empty):
            while True:
                self._left_out += self._waiting.get_nowait() is not None

    def _run(self) -> None:
        while not self._closed and (event := self._waiting.get()) is not None:
            failure = self._run_once(event.encode())
            if failure and not self._closed:
                self._failures[failure] = count = self._failures.get(failure, 0) + 1
                if count == 1:  # the same again and again is one line
                    log.warning("--on-event: %s: %s", self._words[0], failure)  # its arguments may be secret

    def _run_once(self, event: bytes) -> str:
        """Run the command; return what went wrong, empty: nothing."""
        try:
            with self._lock:
                if self._closed:
                    self._left_out += 1
                    return ""
                self._process = process = subprocess.Popen(
                    self._words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
                )
        except OSError as error:
            return f"it cannot be started: {error.strerror or error}"
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
        try:
            process.communicate(event, self._run_s)
        except subprocess.TimeoutExpired:
            self._kill()
            kill_and_wait("the command of --on-event", [process])
            return f"it ran for more than {self._run_s:g} s: killed"
        finally:
            self._process = None
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        return f"it ended with exit status {process.returncode}" if process.returncode else ""

    def _kill(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
