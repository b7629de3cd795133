"""The thread that starts controllers and looks for those of other ranks: either may take seconds.

Owns that thread, which begins with the first such order: most ranks never get one. Whatever goes wrong is its answer; never decides.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from ttp.processor.async_log import AsyncLog
from ttp.processor.core.events import ControllersFound, ControllerStarted, Event, LookForControllers, StartController
from ttp.processor.ports import ControllerStarter


class Starting:
    """Carries out StartController and LookForControllers, one after the other. `post` gets the answers, on its thread."""

    def __init__(self, starter: ControllerStarter, log: AsyncLog, post: Callable[[Event], None]) -> None:
        self._starter = starter
        self._log = log
        self._post = post
        self._tasks: queue.SimpleQueue[StartController | LookForControllers | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, task: StartController | LookForControllers) -> None:
        """Call on one thread only."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ttp-controllers", daemon=True)
            self._thread.start()
        self._tasks.put(task)

    def stop(self) -> None:
        """End the thread after what it does now, which is not waited for."""
        self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            if isinstance(task, LookForControllers):
                self._look()
            else:
                self._start(task)

    def _look(self) -> None:
        try:
            self._post(ControllersFound(self._starter.look()))
        except Exception as error:  # the store is gone, or slow: this rank looks again
            self._log.log(logging.DEBUG, f"looking for controllers failed: {type(error).__name__}: {error}")

    def _start(self, task: StartController) -> None:
        try:
            self._post(ControllerStarted(self._starter.start(task.known)))
        except Exception as error:  # another rank is asked, or this one tries again
            self._post(ControllerStarted("", f"{type(error).__name__}: {error}"))
