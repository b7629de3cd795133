"""The parts of checkpoints in one node's directories: their names, which of them belong together, and which may go.

Owns the names under which parts are found. Never changes a part.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ttp.checkpoint.find import OnSkip, StrPath, ignore, step_of
from ttp.checkpoint.format.durable import step_of_directory, steps_in
from ttp.checkpoint.format.manifest import MANIFEST_NAME, Manifest, from_bytes, read_bytes
from ttp.checkpoint.format.signature import VerifyKey, read_signature
from ttp.checkpoint.prune import take_away
from ttp.checkpoint.staging import SUPERSEDED, free_name
from ttp.errors import CorruptCheckpoint

logger = logging.getLogger(__name__)

_ASIDE = re.compile(rf"(iter_[0-9]{{7,}}){SUPERSEDED}[0-9]+")


@dataclass(frozen=True, slots=True)
class NodePart:
    """One node's directory of one write of a step."""

    path: Path
    manifest: Manifest
    content: bytes
    """Of the manifest's file."""
    signature: bytes | None


def read_parts(names: Iterable[StrPath], on_skip: OnSkip, key: VerifyKey | None = None) -> Iterator[NodePart]:
    """Yield the parts behind published names; `on_skip` is called with a directory that has no readable manifest, or none that `key` has
    signed."""
    for path in parts_behind(names):
        try:
            content, signature = read_bytes(path), read_signature(path)
            manifest = from_bytes(content, str(path / MANIFEST_NAME), key, signature)
        except (CorruptCheckpoint, OSError) as error:
            on_skip(path, str(error))
        else:
            yield NodePart(path, manifest, content, signature)


def write_of(manifest: Manifest) -> tuple[int, int, str, str]:
    """Return attempt of the job, term, staging directory and launch: the parts of one write of a step have the same, and the highest is the newest."""
    return manifest.start, manifest.term, manifest.attempt, manifest.launch


def supersede(final: Path) -> None:
    """Give a published part another name, under which it is found as well."""
    os.rename(final, free_name(final, SUPERSEDED))


def next_start(save_dirs: Iterable[StrPath]) -> int:
    """Return a number above those of all attempts that have left parts in these directories, as far as they can be read."""
    newest = 0
    for directory in save_dirs:
        with contextlib.suppress(OSError):  # whether the attempt uses it, its claim decides
            newest = max([newest, *(part.manifest.start for part in read_parts(list_parts([directory]), ignore))])
    return newest + 1


def list_parts(save_dirs: Iterable[StrPath]) -> list[Path]:
    """Return the published names of all parts of these directories, newest step first (then in the directories' order).

    A name may have superseded parts only: a publisher that is killed between two renames leaves it so.
    """
    found: set[tuple[int, int, Path]] = set()
    for order, folder in enumerate(map(Path, save_dirs)):
        found |= {(-step, order, path) for step, path in steps_in(folder)}
        for name in os.listdir(folder) if folder.is_dir() else []:
            match = _ASIDE.fullmatch(name)
            if match and (step := step_of_directory(Path(match.group(1)))) is not None:
                found.add((-step, order, folder / match.group(1)))
    return [path for _, _, path in sorted(found)]


def parts_behind(names: Iterable[StrPath]) -> list[Path]:
    """Return the directories of published names: each that is there, and those that a later write has superseded."""
    found = []
    for path in map(Path, names):
        beside = os.listdir(path.parent) if path.parent.is_dir() else []
        aside = re.compile(rf"{re.escape(path.name)}{SUPERSEDED}[0-9]+")
        found += [path] if path.is_dir() else []
        found += sorted(path.parent / name for name in beside if aside.fullmatch(name))
    return found


def remove_superseded(save_dirs: Iterable[StrPath], below: int) -> list[Path]:
    """Remove the superseded parts of all steps below `below`, and return them (one rank of each node calls).

    To be called when every file of the checkpoint of `below` was verified and all ranks have loaded it. A step of which only a
    superseded part remains here keeps it. One that cannot be removed takes room, no more.
    """
    removed = []
    for path in list_parts(save_dirs):
        if not path.is_dir() or step_of(path) >= below:
            continue
        for aside in (behind for behind in parts_behind([path])[1:] if not behind.is_symlink()):
            try:
                take_away(aside, step_of(path))
            except OSError as error:
                logger.warning("%s, which a later write has superseded, cannot be removed: %s", aside, error)
            else:
                removed.append(aside)
    return removed
