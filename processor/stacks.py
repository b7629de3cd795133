"""What every thread of this process is doing, written down while it still can be: when the job hangs, and when the launcher asks.

For a hang a thread of its own writes: the disk may be what hangs. It needs Python's lock, which a thread in C code may hold for
good; so a signal, STACKS_SIGNAL, has the stacks written too, by `faulthandler`'s own handler, which is C and takes no
lock. A process whose Python code runs at that moment can crash in it (it reads frames that change; 1 in 10 times where three threads
do nothing else): only one that is about to be killed is asked. Python frames only; C and device stacks are a debugger's. Never raises
and never makes the processor wait.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

from ttp import files
from ttp.processor.async_log import AsyncLog

STACKS_SIGNAL = signal.SIGRTMIN + 9 if sys.platform == "linux" else 0
"""Has a process that listens (`StackWriter.listen`) write its stacks; 0: there is none here."""
ASKED_NAME = "stacks_asked.log"
"""The file for them, beside `stacks.log`."""


def opening(reason: str) -> str:
    """Return the first lines of an entry: when, why, and which of the threads is the main one."""
    when, main = time.strftime("%Y-%m-%d %H:%M:%S"), threading.main_thread().ident or 0
    return f"{when} {reason}\nmain thread {main:#018x}\n"


def process_text(pid: int) -> str:
    """Return the reason that an entry has which the launcher asked for."""
    return f"process {pid}: stacks follow where its launcher asked for them"


def _open(path: Path) -> TextIO:
    """Open a file of a rank's own folder in the folder of the journals. Raises OSError."""
    files.make_folder(path.parent.parent)
    files.make_folder(path.parent)
    return open(path, "a", encoding="utf-8", opener=files.opener)


def _is_handled(number: int) -> bool:
    """Say whether this process has a handler for a signal, be it C's or Python's, or ignores it. Raises OSError."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        masks = [line.split(":", 1)[1] for line in file if line.startswith(("SigIgn:", "SigCgt:"))]
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


class StackWriter:
    """Appends to one file, and to another when a signal asks. `save` and `finish` are called on the processor's thread."""

    def __init__(self, path: Path | None, log: AsyncLog) -> None:
        self._path = path
        self._log = log
        self._thread: threading.Thread | None = None
        self._asked: TextIO | None = None

    def listen(self) -> None:
        """Have STACKS_SIGNAL write the stacks from now on, even while no Python code can run."""
        if self._path is None or not STACKS_SIGNAL:
            return
        path = self._path.with_name(ASKED_NAME)
        try:
            if _is_handled(STACKS_SIGNAL):
                why = f"signal {STACKS_SIGNAL} (SIGRTMIN+9) is handled or ignored by this process already, and stays so"
                self._log.log(logging.WARNING, f"stacks cannot be asked for: {why}")
                return
            asked = _open(path)  # the handler writes to it as long as it lives
            try:
                asked.write(opening(process_text(os.getpid())))
                asked.flush()
                faulthandler.register(STACKS_SIGNAL, asked, all_threads=True)
            except BaseException:
                asked.close()
                raise
            self._asked = asked
        except (
            OSError,
            RuntimeError,
            ValueError,
        ) as error:  # register raises the latter two: no room for a stack, a bad signal
            self._log.log(logging.ERROR, f"stacks cannot be asked for: {path}: {error}")

    def close(self) -> None:
        """Listen no more; the signal does nothing then."""
        asked, self._asked = self._asked, None
        if asked is not None:
            faulthandler.unregister(STACKS_SIGNAL)
            asked.close()

    def save(self, reason: str) -> None:
        """Begin to write all threads' stacks; one that is still writing is enough."""
        if self._path is None or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = threading.Thread(target=self._write, args=(self._path, reason), name="ttp-stacks", daemon=True)
        self._thread.start()

    def finish(self, timeout_s: float) -> None:
        """Wait for what is being written."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _write(self, path: Path, reason: str) -> None:
        try:
            with _open(path) as file:
                file.write(opening(reason))
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                file.write("\n")
        except OSError as error:
            self._log.log(logging.ERROR, f"the stacks could not be written to {path}: {error}")
        else:
            self._log.log(logging.WARNING, f"the stacks of all threads are in {path}")
