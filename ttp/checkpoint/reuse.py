"""Shares that are durable already, used again by a later attempt of the same step.

A controller that dies in the middle of a dump is replaced, and its successor orders the step to be written anew, in a
directory of its own. What this rank had written by then it gives a second name there: a hard link, no byte is written again.
Owns the memory of what was written and the linking. Files are never changed once they are durable, so two names of one do no
harm; where linking is not possible (another file system, the old directory already published or gone), the caller writes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ttp.checkpoint.durable import fsync_directory
from ttp.checkpoint.staging import make_staging
from ttp.proto.messages import Part, ShareResult


@dataclass(frozen=True, slots=True)
class WrittenShare:
    """What one write order left behind, durable."""

    directory: str
    tmp_name: str
    parts: frozenset[Part]
    result: ShareResult


def link_files(directory: str, share: WrittenShare, tmp_name: str) -> bool:
    """Give all files of a share a name in another attempt; False, with nothing left there, when one cannot have it."""
    root = Path(directory)
    linked: list[Path] = []
    try:
        make_staging(root, tmp_name)
        for file in share.result.files:
            name = root / tmp_name / file.name
            os.link(root / share.tmp_name / file.name, name)
            linked.append(name)
            if name.stat().st_size != file.nbytes:
                raise OSError(f"{name} is not what was written")
        fsync_directory(root / tmp_name)
    except OSError:
        for name in linked:
            with contextlib.suppress(OSError):
                os.unlink(name)
        return False
    return True


class WrittenShares:
    """One rank's shares of one step, in whatever attempts. Used by one thread."""

    def __init__(self, link: Callable[[str, WrittenShare, str], bool] = link_files) -> None:
        """`link(directory, share, tmp_name)`: see `link_files`; the simulation has disks of its own."""
        self._link = link
        self._step = -1
        self._shares: list[WrittenShare] = []

    def add(self, step: int, share: WrittenShare) -> None:
        """Remember a share; those of every other step are forgotten."""
        if step != self._step:
            self._step, self._shares = step, []
        self._shares.append(share)

    def take(self, step: int, directory: str, tmp_name: str, parts: Iterable[Part]) -> tuple[ShareResult, set[Part]]:
        """Bring what is there into the attempt `directory/tmp_name`; return it, and the parts that remain to be written.

        The files are durable under their new names when this returns.
        """
        left = set(parts)
        result = ShareResult(())
        for share in self._shares if step == self._step else []:
            if share.directory != directory or not share.parts <= left:
                continue
            if share.tmp_name != tmp_name and self._link(directory, share, tmp_name):
                left -= share.parts
                result = joined(result, share.result)
        return result, left


def joined(first: ShareResult, second: ShareResult) -> ShareResult:
    """Return both shares as one."""
    return ShareResult(first.files + second.files)
