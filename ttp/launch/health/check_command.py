"""One run of a node's health check: a command, its exit status, and the last line of what it printed.

Owns the process and its bounds: seconds, bytes of output that are kept, and the session that is killed when it is over. A process that not even
SIGKILL ends, as in uninterruptible sleep, is abandoned: the node is sick, and nothing waits for it. That also holds for a program on a file system
that hangs: a shell, which is on this node, executes it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from ttp.errors import ConfigError
from ttp.launch.health.builtin_options import parse_builtin
from ttp.launch.watch.processes import exit_status, status_text, sweep_sessions

CHECK_S = 30.0
"""A check that takes longer has failed."""
LOOK_S = 0.05
"""Between two looks whether the check has ended while it prints nothing, and whether it is to be stopped."""
END_S = 1.0
"""How long a check that was killed may take to end; then it is abandoned."""
SWEEP_S = 0.1
"""How long what it has started may take to end at each signal."""
KEPT_BYTES = 4096
"""Of the output, its end."""
SHOWN = 200
"""Characters of the last line."""

BUILTIN = "builtin"
"""In place of a command's name: the checks of `ttp.doctor.health_check`; its arguments follow."""


def split_check(text: str) -> list[str]:
    """Return the words of --health-check as a command. Raises ConfigError: it is none, or its program is not there. Exits with 2 for a wrong
    option of the built-in checks."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"invalid --health-check: got {text!r} ({error}), expected a command with its arguments, or builtin"
        ) from None
    if words[:1] == [BUILTIN]:
        parse_builtin(words[1:])
        return [sys.executable, "-m", "ttp.doctor.health_check", *words[1:]]
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(
            f"invalid --health-check: got {text!r}, expected a command whose program can be executed, or builtin. Name it by its path, or"
            " correct PATH"
        )
    return words


def run_check(words: Sequence[str], timeout_s: float, stop: threading.Event) -> str:
    """Run a check once; return why the node is sick, empty: it is not. `stop`: set, the check is killed and means nothing."""
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", 'exec "$@"', "sh", *words],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return f"its health check cannot be started: {error.strerror or error}"
    assert process.stdout is not None
    with process.stdout as output:
        try:
            printed = _read(process, output.fileno(), time.monotonic() + timeout_s, stop)
        finally:
            ended = exit_status(process.pid) is not None
            _kill(process)
    if stop.is_set():
        return ""
    said = last_line(printed)
    if not ended:
        return f"its health check took longer than {timeout_s:g} s and was killed{f'; it had printed: {said}' if said else ''}"
    if process.returncode == 0:
        return ""
    how = f"exit status {process.returncode}" if process.returncode > 0 else status_text(process.returncode)
    return f"its health check failed ({how}){f': {said}' if said else ', and printed nothing'}"


def last_line(printed: bytes) -> str:
    """Return the last line that is not empty, as text that a terminal can show."""
    lines = printed.decode(errors="replace").replace("\r", "\n").split("\n")
    cleaned = (" ".join("".join(each if each.isprintable() else " " for each in line).split()) for line in lines)
    found = [line for line in cleaned if line]
    text = found[-1] if found else ""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _read(process: subprocess.Popen[bytes], output: int, until_s: float, stop: threading.Event) -> bytes:
    """Return the end of what the check prints until it ends, or until its time is over. What it has started in the background may keep the
    output open: that is not waited for."""
    kept, open_ = b"", True
    os.set_blocking(output, False)
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while True:
            ended = exit_status(process.pid) is not None
            if open_:
                selector.select(0 if ended else LOOK_S)
            while open_:
                try:
                    found = os.read(output, 65536)
                except BlockingIOError:
                    break
                open_ = bool(found)
                kept = (kept + found)[-KEPT_BYTES:]
                if time.monotonic() >= until_s:
                    break
            if ended or stop.is_set() or time.monotonic() >= until_s:
                return kept
            if not open_:
                stop.wait(LOOK_S)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the check and what it has started in its session, and only then reap it: until then its pid is that of no other process."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    sweep_sessions([process.pid], lambda pid: False, SWEEP_S)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
