"""The agent's side of the mirror: one process that copies this node's published checkpoints into an object store.

Owns that process: its start once a rank has said which directories there are, its restart when it dies, its stop during a fault, and its end, for which the
agent waits a bounded time. What it reports goes to the log and to the reporter. Never waits while training runs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ttp.fork_server.kill import kill_and_wait
from ttp.launch.report.reporter import Reporter
from ttp.launch.report.summary import lag_text
from ttp.mirror import source
from ttp.mirror.source import MirrorSource
from ttp.text.wording import counted, size_text

log = logging.getLogger("ttp.launch")

RESTART_S = 1.0
"""Before a mirror process that died is started again; doubled each time."""
LONGEST_RESTART_S = 60.0
LAST_LINES_S = 5.0
"""For the lines that it has written before its end."""
_DOUBLED = 16
"""So many times at most: a process may die again and again for days."""
_LAST_STARTS = 5
"""A process that has died so many times at the job's end is not started again."""


class Mirror:
    """Used on the agent's main thread: the process dies with the thread that has started it."""

    def __init__(self, reporter: Reporter | None = None, end_s: float = 0.0) -> None:
        self._reporter = reporter
        self._end_s = end_s
        self._source: MirrorSource | None = None
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._deaths = 0
        self._start_at_s = 0.0
        self._newest = 0
        """The newest step in the mirror, by the process's last report."""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def look(self, attempt_dir: Path | None) -> None:
        """Start the process when there is something to copy, and again when it has died."""
        try:
            found = source.read(attempt_dir) if attempt_dir is not None else None
        except (OSError, ValueError) as error:
            log.warning("cannot read which directories are mirrored: %s", error)
            return
        if found is not None and found != self._source:
            self._kill()
            self._source, self._deaths, self._start_at_s = found, 0, 0.0
        if self._process is not None and (status := self._process.poll()) is not None:
            log.warning("the mirror process ended (status %d); starting it again in %g s", status, self._put_off())
            self._kill()
        if self._source is not None and self._process is None and time.monotonic() >= self._start_at_s:
            try:
                self._start(self._source)
            except OSError as error:
                log.warning("the mirror process cannot be started: %s; trying again in %g s", error, self._put_off())

    def _put_off(self) -> float:
        """Start it later, and later each time; return in how many seconds."""
        pause_s = min(RESTART_S * 2.0 ** min(self._deaths, _DOUBLED), LONGEST_RESTART_S)
        self._deaths, self._start_at_s = self._deaths + 1, time.monotonic() + pause_s
        return pause_s

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave disk and network to the survivors of a fault."""
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def finish(self) -> None:
        """Have the newest checkpoint copied, for at most TTP_MIRROR_END_S, and end the process. A signal to the agent ends the wait."""
        if self._source is None:
            return
        try:
            reason = self._await_copy(self._source)
            if reason:
                log.warning("%s: the newest checkpoint is not in the mirror", reason)
                self._report_expired(reason)
        finally:
            self._kill()
            if self._reader is not None:
                self._reader.join(LAST_LINES_S)

    def _await_copy(self, given: MirrorSource) -> str:
        """Start the process again where it dies before it has copied the newest checkpoint; return why that is not in the mirror; empty: it is."""
        deadline_s = time.monotonic() + self._end_s
        for deaths in range(_LAST_STARTS):
            if deaths:
                time.sleep(min(RESTART_S * 2.0 ** (deaths - 1), _left_s(deadline_s)))
            if self._process is None:
                try:
                    self._start(given)
                except OSError as error:
                    log.warning("the mirror process cannot be started: %s", error)
                    continue
            assert self._process is not None and self._process.stdin is not None
            self._process.stdin.close()  # a signal may come before it has its handler
            try:
                status = self._await_end(self._process, deadline_s)
            except subprocess.TimeoutExpired:
                return f"TTP_MIRROR_END_S ({self._end_s:g} s) expired"
            if status == 0:
                return ""
            log.warning("the mirror process ended (status %d) before the newest checkpoint was copied", status)
            self._kill()
        return f"the mirror process died, or could not be started, {_LAST_STARTS} times"

    @staticmethod
    def _await_end(process: subprocess.Popen[str], deadline_s: float) -> int:
        """Return the status. Raises subprocess.TimeoutExpired."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(LAST_LINES_S, _left_s(deadline_s)))
        log.info("waiting up to %g s for the mirror's copy of the newest checkpoint", round(_left_s(deadline_s), 1))
        return process.wait(_left_s(deadline_s))

    def _report_expired(self, reason: str) -> None:
        """Report how far the mirror is behind now: the process's last report is older."""
        from ttp.mirror.upload import lag  # fsspec takes a while

        if self._reporter is not None and self._source is not None:
            now = asdict(lag(self._source, self._newest, time.time()))
            self._reporter.mirror({"what": "expired", **now, "error": reason})

    def _start(self, given: MirrorSource) -> None:
        """Raises OSError: it does not run."""
        with open(os.memfd_create("ttp-mirror-source"), "w+b") as content:  # an argument has at most 128 KiB
            content.write(given.to_json().encode())
            content.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ttp.mirror.copier", str(content.fileno())],
                pass_fds=[content.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        reader = threading.Thread(target=self._read, args=(self._process,), name="ttp-mirror", daemon=True)
        try:
            reader.start()
        except RuntimeError as error:
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._kill()
            raise OSError(str(error)) from error
        self._reader = reader

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                try:
                    fields = json.loads(line)
                    self._newest = fields["step"]
                    _log(fields)
                    if self._reporter is not None:
                        self._reporter.mirror(fields)
                except (ValueError, KeyError, TypeError):
                    log.warning("mirror: %s", line.rstrip())

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.stdin is not None:
                process.stdin.close()
            kill_and_wait("the mirror process", [process])


def _left_s(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())


def _log(fields: dict[str, Any]) -> None:
    behind = f"; {lag_text(fields)}"
    match fields["what"]:
        case "mirrored":
            size = size_text(fields["nbytes"])
            log.info("mirrored %s: %s in %.1f s%s", fields["path"], size, fields["took_s"], behind)
        case "removed":
            log.info(
                "removed older checkpoints from the mirror: steps %s", ", ".join(map(str, fields["removed_steps"]))
            )
        case "aborted":
            log.info("aborted %s in the mirror", counted(fields["uploads"], "interrupted upload"))
        case "not conditional":
            log.warning(
                "the mirror's store does not refuse a second put of one name: two jobs with the same TTP_MIRROR may overwrite each other's manifest"
            )
        case "failed":
            log.warning("mirroring failed (%s so far): %s%s", fields["failures"], fields["error"], behind)
        case "given up":
            log.warning(
                "the newest checkpoint is not in the mirror, and is not waited for: %s%s", fields["error"], behind
            )
        case _:
            log.warning("not mirrored: %s", fields["error"])
