"""The status page, as a process beside a controller that leads ranks.

Owns its start, and that it is started again when it ends. It is a process, not a thread: whatever its clients do, the controller's interpreter and
its decisions have nothing to do with it. Never reads anything from it, and neither its start nor its end is waited for by the controller's event loop.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

REFUSED = 2
"""Its exit status where what it was given cannot be used: it is not started again."""
LEADS_POLL_S = 0.5
AGAIN_S = 10.0
"""From its end until it is started again."""


class PageProcess:
    """Serves the page from the moment on at which this controller leads ranks, until `stop`. No method waits or raises."""

    def __init__(
        self, job_id: str, log_dir: Path, bind: str, advertise: str, port: int, leads: Callable[[], bool]
    ) -> None:
        """`leads()`: say whether the controller does; called on another thread. port: 0: any free one."""
        self._command = [
            *(sys.executable, "-P", "-m", "ttp.status_page", "--parent", str(os.getpid()), "--job-id", job_id),
            *("--log-dir", str(log_dir), "--bind", bind, "--advertise", advertise, "--port", str(port)),
        ]
        self._leads = leads
        self._stopped = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        # One thread starts the page and lives as long as it: the kernel ends the page with the thread that has started it.
        try:
            threading.Thread(target=self._run, name="ttp-page", daemon=True).start()
        except RuntimeError as error:
            print(f"ttp-controller: the status page cannot be started: {error}", file=sys.stderr)

    def stop(self) -> None:
        """Have the kernel end it; when it has ended is not waited for."""
        self._stopped.set()
        self._kill()

    def _run(self) -> None:
        while not self._leads():
            if self._stopped.wait(LEADS_POLL_S):
                return
        while not self._stopped.is_set():
            try:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True
                )
            except OSError as error:
                print(f"ttp-controller: the status page cannot be started: {error}", file=sys.stderr)
            else:
                if self._stopped.is_set():  # meanwhile
                    self._kill()
                if self._process.wait() == REFUSED:
                    return
            self._stopped.wait(AGAIN_S)

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.kill()
