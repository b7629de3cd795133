"""Finding the newest valid checkpoint and reading what a rank needs of it, at any world size and layout.

Owns the search and the reading; changes nothing on disk and uses no collective (`Voters` is where a caller's ranks agree).
The tracker file is a hint for people and other tools: the search looks at the directories themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch.distributed.checkpoint.metadata import Metadata

from ttp.checkpoint import dcp
from ttp.checkpoint import manifest as manifests
from ttp.checkpoint.durable import step_of_directory, steps_in
from ttp.checkpoint.held import HeldTensor
from ttp.checkpoint.manifest import Manifest, TensorSpec
from ttp.checkpoint.verify import metadata_entry, share_of_files, verify
from ttp.errors import CheckpointError, CheckpointMismatch, CorruptCheckpoint

__all__ = [
    "Alone",
    "Found",
    "Voters",
    "check_matches",
    "check_tensors",
    "find_newest_valid",
    "first_valid",
    "list_checkpoints",
    "list_readable",
    "newest_finite",
    "read_into",
    "read_manifest",
    "share_of_files",
    "step_of",
    "verify",
]


@dataclass(frozen=True, slots=True)
class Found:
    path: Path
    manifest: Manifest
    skipped: tuple[str, ...]
    """Newer checkpoints that were not valid: path and reason each."""
    metadata: Metadata | None = None
    """Torch's index, where the manifest does not vouch for the one in the directory: of a checkpoint of several nodes."""


class Voters(Protocol):
    """How the ranks of a job agree on one checkpoint; each method is called by all of them, in the same order."""

    index: int
    count: int

    def same_list(self, paths: list[str]) -> list[str]:
        """Return the first rank's list to all."""

    def first_failure(self, reason: str) -> str:
        """Return the first non-empty reason of any rank to all, or empty."""


class Alone:
    """One process votes by itself."""

    index = 0
    count = 1

    def same_list(self, paths: list[str]) -> list[str]:
        return paths

    def first_failure(self, reason: str) -> str:
        return reason


def list_checkpoints(dirs: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return all published checkpoints of these directories, newest step first (then in the directories' order)."""
    found = [(-step, order, path) for order, directory in enumerate(dirs) for step, path in steps_in(Path(directory))]
    return [path for _, _, path in sorted(found, key=lambda entry: entry[:2])]


def newest_finite(dirs: Sequence[str | os.PathLike[str]]) -> Path | None:
    """Return the newest checkpoint of these directories whose manifest says that its state has neither NaN nor infinity; None: there is none.
    What cannot be read is passed over; no checksum is compared."""
    for directory in list_readable(dirs, lambda path, error: None):
        try:
            if read_manifest(directory).finite:
                return directory
        except (CheckpointError, OSError):
            continue
    return None


def list_readable(
    dirs: Sequence[str | os.PathLike[str]],
    on_skip: Callable[[Path, OSError], None],
    listed: Callable[[Sequence[str | os.PathLike[str]]], list[Path]] = list_checkpoints,
) -> list[Path]:
    """Return what `listed` finds in these directories, newest step first; one that cannot be read is passed over, and `on_skip`
    hears of it. Raises OSError when none can be read."""
    found: list[Path] = []
    problems: list[OSError] = []
    for directory in dirs:
        try:
            found += listed([directory])
        except OSError as error:
            problems.append(error)
            on_skip(Path(directory), error)
    if problems and len(problems) == len(dirs):
        raise problems[0]
    return sorted(found, key=lambda path: -step_of(path))


def step_of(path: str | os.PathLike[str]) -> int:
    """Return the step that a published checkpoint's directory is named for. Raises CheckpointError for another name."""
    step = step_of_directory(Path(path))
    if step is None:
        raise CheckpointError(f"{path} is not named iter_<step>: wanted a published checkpoint's directory")
    return step


def find_newest_valid(
    dirs: Sequence[str | os.PathLike[str]],
    *,
    deep: bool = True,
    voters: Voters | None = None,
    on_skip: Callable[[Path, str], None] | None = None,
) -> Found | None:
    """Return the newest checkpoint of `dirs` that is valid, or None; `on_skip` hears of every newer one that is not, and
    why, and of a directory that cannot be read. With `voters`, every rank calls this, each checks its share of the files, and all
    return the same checkpoint. Raises OSError when none of `dirs` can be read."""

    def unreadable(directory: Path, error: OSError) -> None:
        if on_skip is not None:
            on_skip(directory, str(error))

    names = (voters or Alone()).same_list([str(path) for path in list_readable(dirs, unreadable)])
    return first_valid(names, deep=deep, voters=voters, on_skip=on_skip)


def first_valid(
    paths: Sequence[str],
    *,
    deep: bool = True,
    voters: Voters | None = None,
    on_skip: Callable[[Path, str], None] | None = None,
    check: Callable[[Manifest], None] = lambda manifest: None,
) -> Found | None:
    """Return the first of `paths` (the same on every rank) that is valid, as `find_newest_valid` does. `check`: raises
    CorruptCheckpoint for a manifest that the caller cannot use."""
    voters = voters or Alone()
    skipped: list[str] = []
    for name in paths:
        path, found, reason = Path(name), None, ""
        try:
            found = verify(path, deep=deep, share=(voters.index, voters.count))
            check(found)
        except (CheckpointError, OSError) as error:
            reason = str(error)
        reason = voters.first_failure(reason)
        if not reason and found is not None:
            return Found(path, found, tuple(skipped))
        skipped.append(f"{path}: {reason}")
        if on_skip is not None:
            on_skip(path, reason)
    return None


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read a checkpoint's manifest. Raises CorruptCheckpoint."""
    return manifests.read_manifest(Path(path))


def check_matches(path: str | os.PathLike[str], expected: Mapping[str, Sequence[int]]) -> Manifest:
    """Compare a checkpoint's tensors with what this job has (shape by key), both ways; return its manifest.

    Raises CheckpointMismatch naming the first difference: a sharded rank, which reads but a part, would not see a
    checkpoint of a deeper model.
    """
    found = read_manifest(path)
    check_tensors(path, found.tensors, expected)
    return found


def check_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, TensorSpec], expected: Mapping[str, Sequence[int]]
) -> None:
    """Compare a checkpoint's tensors with what this job has, as `check_matches` does."""
    for key, shape in sorted(expected.items()):
        if key not in tensors:
            raise CheckpointMismatch(
                f"{path} has no tensor {key!r} (wanted, of shape {tuple(shape)}): it was written by another model or "
                "optimizer; start with the configuration that wrote it, or name another checkpoint"
            )
        if tensors[key].shape != tuple(shape):
            raise CheckpointMismatch(
                f"{path}: {key!r} has shape {tensors[key].shape}, wanted {tuple(shape)}: it was written by another "
                "model; start with the configuration that wrote it, or name another checkpoint"
            )
    for key, spec in sorted(tensors.items()):
        if key not in expected:
            raise CheckpointMismatch(
                f"{path} has a tensor {key!r} of shape {spec.shape} that this job has not: it was written by another model "
                "or optimizer; start with the configuration that wrote it, or name another checkpoint"
            )


def read_into(path: str | os.PathLike[str], targets: Sequence[HeldTensor], metadata: Metadata | None = None) -> None:
    """Fill every target's `values` in place; only the stored boxes that overlap them are read, each once.

    Any rank may call this alone, with any cut; the dtype is converted where it differs. The caller has verified the
    checkpoint. `metadata`: torch's index, where it is known already. Raises CheckpointMismatch naming the first missing key or other shape (nothing is changed then) and
    CorruptCheckpoint when the bytes cannot be read (the values are undefined then).
    """
    root = Path(path)
    if not root.is_dir():
        raise CorruptCheckpoint(f"{root} is not a directory: no checkpoint is there")
    if metadata is None:
        ours = os.path.lexists(root / manifests.MANIFEST_NAME)  # else torch wrote it alone
        metadata = dcp.read_metadata(root, metadata_entry(root, read_manifest(root)) if ours else None)
    dcp.read_runs(root, targets, metadata)
