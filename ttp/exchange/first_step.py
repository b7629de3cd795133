"""An attempt's first new step, reported to the launcher: one key in the workers' store, written once.

The launcher must know whether an attempt that failed had progressed at all, and whether it has gone on from the newest checkpoint. One
rank of each node reports it, right after its first update, so that nothing is sent in any later step.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

from ttp.checkpoint.format.durable import step_of_directory
from ttp.exchange import imported_modules

log = logging.getLogger("ttp")


def progress_key(round_number: int) -> str:
    """Return the key under which an attempt's first finished step is recorded, and after a space the newest checkpoint that it skipped; the
    launcher looks there."""
    return f"ttp/progress/{round_number}"


class FirstStep:
    """Reports to the launcher a step that this attempt has finished."""

    def __init__(self, store: Store, round_number: int, attempt_dir: str = "") -> None:
        """`attempt_dir`: where the agent learns what the workers import; empty: it does not."""
        self._store = store
        self._attempt_dir = attempt_dir
        self._key = progress_key(round_number)
        self._skipped = ""

    def skip(self, path: Path) -> None:
        """This attempt found a checkpoint broken: the newest one of them is reported (in any order: where nodes have their own disks, each
        reads all of its manifests first)."""
        if _step(path) > _step(Path(self._skipped)):
            self._skipped = str(path)

    def tell(self, step: int) -> None:
        """Write the key (the rank's own thread: the store does not answer, so nothing is waited for)."""
        try:
            self._store.set(self._key, f"{step} {self._skipped}".strip())
        except RuntimeError as error:  # torch's DistError: the node that hosts the store is gone, and this attempt ends
            log.debug("could not report step %d to the launcher: %s", step, error)
        if self._attempt_dir:
            with contextlib.suppress(OSError):  # a full disk: later workers import for themselves
                imported_modules.write(Path(self._attempt_dir))


def _step(path: Path) -> int:
    return step_of_directory(path) or 0
