"""This node's health: the newest verdict of its check, and the check that runs.

Owns one thread for each run, so that no thread of the agent waits: a fault's survivors are held and save while it runs. Who seats a rank here waits for a
verdict that is newer than the last fault on this node. Never decides what follows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from ttp.launch.health.check_command import CHECK_S, END_S, run_check

log = logging.getLogger("ttp.launch")

STOP_S = 3.0
"""How long the agent's end waits for a check that it has stopped."""
SLACK_S = 10.0
"""So much longer than two checks in a row, the longest that one waits for, `judge` waits."""


class SickNode(RuntimeError):
    """This node's health check has failed: it takes no part in the job."""


class NodeHealth:
    """`begin`, `verdict` and `wait` may be called from any thread."""

    def __init__(self, words: Sequence[str], *, timeout_s: float = CHECK_S) -> None:
        """`words`: the check's command line."""
        self._words = words
        self._timeout_s = timeout_s
        self._changed = threading.Condition()  # guards all below
        self._since_s = -1.0
        """The verdict that counts is of a check that began after this moment."""
        self._began_s = -1.0
        """When the last check began."""
        self._running = False
        self._sick = ""
        self._stop = threading.Event()

    def begin(self, since_monotonic_s: float) -> None:
        """Have the node checked, unless a check has begun since then. Returns at once."""
        with self._changed:
            self._since_s = max(self._since_s, since_monotonic_s)
            if self._running or self._began_s >= self._since_s or self._stop.is_set():
                return
            self._running = True
        try:
            threading.Thread(target=self._run, name="ttp-health-check", daemon=True).start()
        except RuntimeError as error:  # no thread can be started
            with self._changed:
                self._began_s, self._sick, self._running = time.monotonic(), _not_run(error), False
                self._changed.notify_all()

    def verdict(self) -> str | None:
        """Return why this node is sick, empty: it is not; None: the check has not ended, or none has begun."""
        with self._changed:
            return self._sick if self._began_s >= self._since_s > 0.0 and not self._running else None

    def wait(self, timeout_s: float | None = None) -> str | None:
        """Return the verdict as soon as it is there; None: not within this time, or the check was stopped."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running, timeout_s)
        return self.verdict()

    def judge(self, since_monotonic_s: float) -> str:
        """Have the node checked, unless a check has begun since then, and wait; return why it is sick, empty: it is not, or the check was stopped."""
        self.begin(since_monotonic_s)
        limit_s = 2 * (self._timeout_s + END_S) + SLACK_S
        sick = self.wait(limit_s)
        if sick is None and not self._stop.is_set():
            return f"its health check does not end: no verdict within {limit_s:g} s, though it may take {self._timeout_s:g} s"
        return sick or ""

    def close(self) -> None:
        """Stop a check that runs; none begins from then on."""
        self._stop.set()
        with self._changed:
            self._changed.wait_for(lambda: not self._running, STOP_S)

    def _run(self) -> None:
        again = True
        while again:
            began_s = time.monotonic()
            try:
                sick = run_check(self._words, self._timeout_s, self._stop)
            except Exception as error:  # whatever it is, who waits must learn of it
                sick = _not_run(error)
            took_s = time.monotonic() - began_s
            with self._changed:
                self._began_s, self._sick = began_s, sick
                again = began_s < self._since_s and not self._stop.is_set()  # a fault came while the check ran
                self._running = again
                self._changed.notify_all()
            if not self._stop.is_set():
                log.log(
                    logging.ERROR if sick else logging.INFO,
                    "health check of this node, in %.1f s: %s",
                    took_s,
                    sick or "passed",
                )


def _not_run(error: Exception) -> str:
    return f"its health check cannot be run: {' '.join(str(error).split()) or type(error).__name__}"
