"""`ttp ckpt prune` for nodes that have directories of their own: the folders of all nodes, seen from one place.

Owns the choice. A step is whole when one attempt at it has every file that its pieces list, checksums compared, in some of the folders, and
their tables of contents hold every tensor once: what a start of the job would find. Older steps that are whole as well go; a step that
is not whole here may be whole with a node that is not seen, and is kept unless it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ttp.checkpoint import dcp
from ttp.checkpoint.contents import Contents, read_contents
from ttp.checkpoint.durable import sha256_of
from ttp.checkpoint.manifest import Manifest, read_manifest
from ttp.checkpoint.pieces import list_pieces, pieces_behind
from ttp.checkpoint.publish import check_complete
from ttp.checkpoint.removal import LINKED, remove_tree, take_away
from ttp.checkpoint.survey import PRUNED, Leftover, list_leftovers, size_of
from ttp.errors import CheckpointError, CorruptCheckpoint
from ttp.proto.messages import FileEntry, ShareResult

Attempt = tuple[int, int, str]
"""Start, term and name: the pieces of one attempt have the same."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One node's directory of one attempt at a step."""

    path: Path
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Step:
    """All that is seen of one step."""

    step: int
    attempts: Mapping[Attempt, Sequence[Piece]]
    missing: str = ""
    """What is missing of it, or why it is left; empty: it is whole, or was not looked at."""

    @property
    def may_be_finite(self) -> bool:
        """False where a manifest says that the state holds NaN or infinity."""
        return all(piece.manifest.finite is not False for pieces in self.attempts.values() for piece in pieces)

    @property
    def paths(self) -> list[Path]:
        return sorted(piece.path for pieces in self.attempts.values() for piece in pieces)


@dataclass(frozen=True, slots=True)
class PiecesPlan:
    """What would be done with each step, newest first."""

    kept: tuple[Step, ...]
    removed: tuple[Step, ...]
    left: tuple[Step, ...]
    """Not whole here, or with a link among its pieces, and not touched."""
    broken: tuple[tuple[Path, str], ...]
    """Directories without a readable manifest, with the reason: not touched."""
    unfinished: tuple[Leftover, ...]

    @property
    def going(self) -> list[Path]:
        return [path for step in self.removed for path in step.paths] + [entry.path for entry in self.unfinished]

    @property
    def nbytes(self) -> int:
        return sum(map(size_of, self.going))


def plan_pieces(folders: Sequence[Path], keep: int, partial: bool, advance: Callable[[int], None]) -> PiecesPlan:
    """Choose by reading: steps are proved whole, newest first, until `keep` are found; `advance` is told of bytes read.

    Where none of those kept has a finite state, the newest step that has one stays as well. partial: steps that are not whole here go as
    well, where they are older than all that stay. Raises CheckpointError where no step is whole, or where a folder has a checkpoint that
    is no piece.
    """
    steps, broken = _found(folders)
    kept: list[Step] = []
    removed: list[Step] = []
    left: list[Step] = []
    for step in steps:
        goes = len(kept) >= keep and (any(one.may_be_finite for one in kept) or not step.may_be_finite)
        lacking = _lacking(step, advance, deep=not goes)
        if goes and any(path.is_symlink() for path in step.paths):
            left.append(Step(step.step, step.attempts, LINKED))
        elif not lacking:
            (removed if goes else kept).append(step)
        elif partial and goes:
            removed.append(step)
        else:
            left.append(Step(step.step, step.attempts, lacking))
    if not kept:
        raise CheckpointError(
            f"no step is whole in {', '.join(map(str, folders))}, so nothing is removed: "
            f"{'; '.join(f'step {step.step}: {step.missing}' for step in left[:3])}. Each node has its own pieces: name the folders of"
            " all nodes, PATH PATH ..., in one command"
        )
    unfinished = [entry for folder in folders for entry in list_leftovers(folder) if PRUNED in entry.path.name]
    return PiecesPlan(tuple(kept), tuple(removed), tuple(left), tuple(broken), tuple(unfinished))


def remove_pieces(plan: PiecesPlan) -> None:
    """Remove what the plan says, oldest first. Raises OSError."""
    for half in plan.unfinished:
        remove_tree(half.path)
    for step in reversed(plan.removed):
        for path in step.paths:
            take_away(path, step.step)


def _found(folders: Sequence[Path]) -> tuple[list[Step], list[tuple[Path, str]]]:
    steps: dict[int, dict[Attempt, list[Piece]]] = {}
    broken: list[tuple[Path, str]] = []
    for path in pieces_behind(list_pieces(folders)):
        try:
            manifest = read_manifest(path)
        except (CorruptCheckpoint, OSError) as error:
            broken.append((path, str(error)))
            continue
        if not manifest.hosts:
            raise CheckpointError(
                f"{path} is a whole checkpoint, and others here are pieces of nodes: was TTP_SHARED_DIRS changed? Move the one kind"
                " to a folder of its own"
            )
        attempt = (manifest.start, manifest.term, manifest.attempt)
        steps.setdefault(manifest.step, {}).setdefault(attempt, []).append(Piece(path, manifest))
    return [Step(step, steps[step]) for step in sorted(steps, reverse=True)], broken


def _lacking(step: Step, advance: Callable[[int], None], *, deep: bool) -> str:
    """Say what the best attempt at a step lacks; empty: it is whole. deep: checksums and tables, not sizes alone."""
    lacking = ""
    for attempt in sorted(step.attempts, reverse=True):
        try:
            _check_attempt(step.attempts[attempt], advance, deep=deep)
        except (CorruptCheckpoint, OSError) as error:
            lacking = lacking or str(error)
        else:
            return ""
    return lacking


def _check_attempt(pieces: Sequence[Piece], advance: Callable[[int], None], *, deep: bool) -> None:
    """Raise CorruptCheckpoint unless every file that a piece lists is in one of them."""
    files = {file.name: file for piece in pieces for file in piece.manifest.files if file.name != dcp.METADATA_NAME}
    owners: dict[Path, list[FileEntry]] = {}
    for file in files.values():
        owners.setdefault(_owner(file, pieces, advance, deep=deep), []).append(file)
    if deep:
        parts = [read_contents(path, [ShareResult(tuple(mine))]) for path, mine in owners.items()]
        tensors = tuple(entry for part in parts for entry in part.tensors)
        blobs = tuple(entry for part in parts for entry in part.blobs)
        check_complete(Contents(tuple(files.values()), tensors, blobs))


def _owner(file: FileEntry, pieces: Sequence[Piece], advance: Callable[[int], None], *, deep: bool) -> Path:
    """Return a piece that has a file, as it was written."""
    altered = ""
    for path in _having(file, pieces):
        if not deep:
            return path
        digest = sha256_of(path / file.name)
        advance(file.nbytes)
        if digest == file.sha256:
            return path
        altered = altered or f"{path / file.name} was altered since rank {file.rank} wrote it"
    host = pieces[0].manifest.hosts[file.rank]
    raise CorruptCheckpoint(
        altered or f"{file.name}, which rank {file.rank} wrote on node {host}, is in none of the folders"
    )


def _having(file: FileEntry, pieces: Sequence[Piece]) -> Iterator[Path]:
    if Path(file.name).name != file.name:
        raise CorruptCheckpoint(f"{pieces[0].path}: the manifest names the file {file.name!r}, outside the checkpoint")
    for piece in pieces:
        there = piece.path / file.name
        if there.is_file() and there.stat().st_size == file.nbytes:
            yield piece.path
