"""The folder that a campaign, the kills, the demo or a matrix writes into: held by one of them at a time, and emptied of an earlier one only.

.ttp_chaos      says that one of these tools made the folder's content; locked (flock) by the one that runs, released when it ends
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from ttp import files
from ttp.errors import ConfigError

MARK = ".ttp_chaos"
_MADE = r"run_\d+|baseline(\.json)?|result\.json|report\.html|killed|in_place|kills\.json|loss\.png"
"""What these tools make; a matrix, which is never removed, makes others."""
_MATRIX = "cells*.jsonl"
"""In the folder of a matrix, also in one that was put together by hand."""


@contextlib.contextmanager
def taken(output: Path, *, keep: bool = False) -> Iterator[None]:
    """Hold the folder, made if it is missing, without what an earlier run left (`keep`: with it). Raises ConfigError for a folder that none of
    these tools made, or with anything else in it, for one that is in use, and for one that cannot be used."""
    with contextlib.ExitStack() as stack:
        try:
            _check(output)
            files.make_folder(output)
            lock = stack.enter_context(open(output / MARK, "ab", opener=files.opener))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not keep:
                _empty(output)
        except BlockingIOError:
            raise ConfigError(
                f"--output: got {output}, in use by another process, expected a folder for each; name another one, or wait for its end"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"--output: got {output}: {error.strerror}, expected a folder that can be written and locked"
            ) from None
        yield


def _check(output: Path) -> None:
    """Raises ConfigError for a folder that is not empty and that none of these tools made."""
    if not output.exists():
        return
    if not output.is_dir():
        raise ConfigError(f"--output: got {output}, a file, expected a folder")
    found = sorted(path.name for path in output.iterdir())
    if found and MARK not in found and not any(output.glob(_MATRIX)):
        raise ConfigError(
            f"--output: got {output}, which holds {found[0]!r} and no {MARK}, expected an empty folder, or one of an earlier run;"
            " name another folder, or empty it"
        )


def _empty(output: Path) -> None:
    found = [path for path in output.iterdir() if path.name != MARK]
    if strange := sorted(path.name for path in found if not re.fullmatch(_MADE, path.name)):
        raise ConfigError(
            f"--output is {output}: it holds {strange[0]!r}, which no campaign makes; name another folder, or empty it"
        )
    for path in found:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
