"""What every thread of this process is doing, written down while it still can be: when the job hangs.

A thread of its own writes: the disk may be what hangs. Python frames only, by `faulthandler`; C and device stacks are a
debugger's. Never raises and never makes the processor wait.
"""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
from pathlib import Path

from ttp.processor.voice import Voice


class StackWriter:
    """Appends to one file. `save` and `finish` are called on the processor's thread."""

    def __init__(self, path: Path | None, voice: Voice) -> None:
        self._path = path
        self._voice = voice
        self._thread: threading.Thread | None = None

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
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {reason}\n")
                file.write(f"main thread {threading.main_thread().ident or 0:#018x}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                file.write("\n")
        except OSError as error:
            self._voice.say(logging.ERROR, f"the stacks could not be written to {path}: {error}")
        else:
            self._voice.say(logging.WARNING, f"the stacks of all threads are in {path}")
