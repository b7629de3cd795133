"""The umask of a test, and the modes of what it made."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    """Within the block new files get all that their makers ask for but these bits, in processes that it starts too."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode_of(path: Path) -> int:
    """Return the permissions of what is at `path`."""
    return stat.S_IMODE(os.lstat(path).st_mode)


def modes(folder: Path) -> dict[str, int]:
    """Return the permissions of all that is in a folder, by path below it."""
    return {str(path.relative_to(folder)): mode_of(path) for path in folder.rglob("*")}
