"""The directory of one attempt on one node, in which ranks write for their agent (`ttp.exchange.controller_file`).

Owns its creation and its removal, and that the next attempt's has what the ranks wrote of their launch (`ttp.exchange.launch_file`). Never readable by another user, under a new name each time. Where it cannot be
created the agent reads the workers' store only.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from ttp import files
from ttp.exchange import launch_file
from ttp.exchange.launch_file import Launch

log = logging.getLogger("ttp.launch")

PREFIX = "ttp_attempt_"


class AttemptDirectory:
    """The directory of the current attempt; used on the agent's thread."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._launch: Launch | None = None

    @property
    def path(self) -> Path | None:
        return self._path

    def make(self) -> Path | None:
        """Replace the last attempt's directory by a new one; None, with a warning: no directory for temporary files is writable."""
        self.remove()
        try:
            self._path = files.make_temporary(PREFIX).resolve()
        except OSError as error:
            log.warning(
                "no directory for temporary files is writable (%s): the agent finds controllers through the workers' store alone, which may be"
                " too late for a fault in the first seconds. Free space there, or set TMPDIR",
                error,
            )
            return None
        if self._launch is not None:
            try:
                launch_file.write(self._path, self._launch)
            except OSError as error:
                log.warning(
                    "%s cannot be written (%s): this node's ranks learn from another node's which launch theirs is",
                    self._path,
                    error,
                )
        return self._path

    def remove(self) -> None:
        path, self._path = self._path, None
        if path is not None:
            try:
                self._launch = launch_file.read(path) or self._launch
            except (OSError, ValueError) as error:
                log.warning("cannot read which launch this attempt belonged to: %s", error)
            shutil.rmtree(path, ignore_errors=True)
