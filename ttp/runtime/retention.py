"""How many checkpoints a run keeps: after each save the older ones go, as `ttp ckpt prune` removes them.

Owns when it is looked, on one thread of the rank that keeps the directories, beside training. Never decides what goes: the newest
valid checkpoints stay, checksums compared, and what is not valid is left alone (`ttp.checkpoint.prune`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ttp.checkpoint import verify
from ttp.checkpoint.format.signature import VerifyKey
from ttp.checkpoint.prune import plan_prune, remove
from ttp.errors import CheckpointError, ConfigError

log = logging.getLogger("ttp")


def check_keep(keep: object, shared_dirs: bool) -> None:
    """Raise ConfigError for a number of checkpoints that cannot be kept. None: all."""
    if keep is None:
        return
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
        raise ConfigError(
            f"invalid keep_checkpoint_max: got {keep!r}, expected an integer >= 1, or none to keep all. Change it"
        )
    if not shared_dirs:
        raise ConfigError(
            f"invalid keep_checkpoint_max: got {keep} with TTP_SHARED_DIRS=False, expected none: no node sees whether a step is whole on the"
            " others. Run `ttp ckpt prune` over the folders of all nodes"
        )


class Retention:
    """The newest `keep` valid checkpoints of each directory stay."""

    def __init__(
        self, keep: int, key: VerifyKey | None = None, passed_over: Callable[[], Mapping[str, int]] = dict
    ) -> None:
        """`key`: who must have signed what counts as valid. `passed_over()`: checkpoints, inode by path, that are not the run's: they stay, and
        do not count."""
        self._keep = keep
        self._passed_over = passed_over
        self._key = key
        self._thread: threading.Thread | None = None
        self._again: Sequence[str] | None = None
        self._lock = threading.Lock()
        self._valid: dict[Path, float] = {}
        """Checkpoints whose checksums were compared, with the time of their manifest: each is read once."""

    def saved_in(self, directories: Sequence[str]) -> None:
        """A checkpoint was published in one of these: look through them, soon."""
        with self._lock:
            self._again = tuple(directories)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="ttp-retention", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Wait until the checkpoints of the last save were looked through."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._lock:
                directories, self._again = self._again, None
                if directories is None:
                    self._thread = None
                    return
            for directory in directories:
                self._prune(Path(directory))

    def _prune(self, folder: Path) -> None:
        try:
            remove(plan_prune(folder, self._keep, self._check, self._passed_over()))
        except CheckpointError as error:  # nothing valid is there, so nothing goes
            log.debug("%s: no checkpoint was removed: %s", folder, error)
        except OSError as error:
            log.warning(
                "%s: not all older checkpoints were removed: %s; remove them with `ttp ckpt prune`", folder, error
            )

    def _check(self, path: Path) -> None:
        written = (path / "manifest.json").stat().st_mtime if (path / "manifest.json").exists() else -1.0
        if self._valid.get(path) != written:
            verify.verify(path, key=self._key)
            self._valid[path] = written
