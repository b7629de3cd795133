"""The directory of one attempt on one node, in which ranks write for their agent (`ttp.exchange.controller_file`).

Owns its making and its removal. Never read by another user: it is made with mode 0700, under a new name each time. Where it cannot be made the
agent asks the workers' store alone.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path

log = logging.getLogger("ttp.launch")

PREFIX = "ttp_attempt_"


class AttemptDirectory:
    """The directory of the attempt that goes on; used on the agent's thread."""

    def __init__(self) -> None:
        self._path: Path | None = None

    @property
    def path(self) -> Path | None:
        return self._path

    def make(self) -> Path | None:
        """Make the next attempt's directory in the place of the last one; None, with a warning: no place for temporary files takes it."""
        self.remove()
        try:
            self._path = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
        except OSError as error:
            log.warning(
                "no directory for temporary files can be written (%s): controllers are found through the workers' store alone, which may be"
                " too late for a fault in the first seconds. Free space there, or set TMPDIR",
                error,
            )
        return self._path

    def remove(self) -> None:
        path, self._path = self._path, None
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)
