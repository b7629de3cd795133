"""The model's shared file system, as a value: directories of files, an exclusive rename, a tracker, and no space left."""

from __future__ import annotations

from dataclasses import dataclass

from tests.model.gate import State
from ttp.proto.frozen import replace
from ttp.proto.messages import Part, PublishOrder, WriteOrder

Piece = tuple[Part, State]
Directory = tuple[tuple[tuple[str, tuple[Piece, ...] | None], ...], tuple[str, ...] | None]
"""(files by name, None for one that is not durable yet; the manifest's names, None before it is written)."""


@dataclass(frozen=True, slots=True)
class Disk:
    """`directories`: ((root, name), directory), sorted."""

    directories: tuple[tuple[tuple[str, str], Directory], ...] = ()
    tracker: tuple[tuple[str, int], ...] = ()
    published: tuple[tuple[str, int], ...] = ()
    """(root, step) in the order of the renames."""
    full: frozenset[str] = frozenset()

    def find(self, root: str, name: str) -> Directory | None:
        return dict(self.directories).get((root, name))

    def put(self, root: str, name: str, directory: Directory) -> Disk:
        known = dict(self.directories)
        known[root, name] = directory
        return replace(self, directories=tuple(sorted(known.items(), key=_place)))


def _place(item: tuple[tuple[str, str], Directory]) -> tuple[str, str]:
    return item[0]


def begin_write(disk: Disk, order: WriteOrder, name: str) -> Disk:
    """Make the file, empty."""
    files, manifest = disk.find(order.directory, order.tmp_name) or ((), None)
    return disk.put(order.directory, order.tmp_name, (_with(files, name, None), manifest))


def end_write(disk: Disk, order: WriteOrder, name: str, content: State) -> tuple[Disk, str]:
    """Make the file whole and durable; return the disk and an error."""
    directory = disk.find(order.directory, order.tmp_name)
    if order.directory in disk.full or directory is None:
        return disk, "no space left" if directory is not None else "the directory is gone"
    files, manifest = directory
    pieces = tuple((part, content) for part in order.parts)
    return disk.put(order.directory, order.tmp_name, (_with(files, name, pieces), manifest)), ""


def write_manifest(disk: Disk, order: PublishOrder) -> tuple[Disk, str]:
    """List what was written; a directory of that step that is there already is kept as it is."""
    if disk.find(order.directory, final_name(order)) is not None:
        return disk, ""
    directory = disk.find(order.directory, order.tmp_name)
    if order.directory in disk.full or directory is None:
        return disk, "no space left" if directory is not None else "the directory is gone"
    names = tuple(file.name for result in order.results for file in result.files)
    return disk.put(order.directory, order.tmp_name, (directory[0], names)), ""


def rename(disk: Disk, order: PublishOrder) -> tuple[Disk, str]:
    """Give the directory its final name, unless there is one of that name."""
    final = final_name(order)
    if disk.find(order.directory, final) is not None:
        return disk, ""
    known = dict(disk.directories)
    directory = known.pop((order.directory, order.tmp_name), None)
    if directory is None:
        return disk, "the directory is gone"
    moved = replace(disk, directories=tuple(sorted(known.items(), key=_place))).put(order.directory, final, directory)
    return replace(moved, published=(*disk.published, (order.directory, order.step))), ""


def track(disk: Disk, order: PublishOrder) -> Disk:
    """Point the tracker to the step; it never goes back."""
    known = dict(disk.tracker)
    known[order.directory] = max(order.step, known.get(order.directory, 0))
    return replace(disk, tracker=tuple(sorted(known.items())))


def final_name(order: PublishOrder) -> str:
    return f"iter_{order.step:07d}"


def faults_of(disk: Disk, root: str, step: int, groups: tuple[str, ...]) -> str:
    """Return what is wrong with a published directory (I1, I2, I3, I5); empty: nothing."""
    directory = disk.find(root, f"iter_{step:07d}")
    if directory is None or directory[1] is None:
        return f"I1: step {step} was published without a manifest"
    files, manifest = dict(directory[0]), directory[1]
    contents = [files.get(name) for name in manifest]
    if any(content is None for content in contents):
        return f"I1: step {step}: a listed file is missing or not durable"
    pieces = [piece for content in contents if content is not None for piece in content]
    for group in groups:
        mine = sorted((part.index, part.count) for part, _ in pieces if part.group_id == group)
        count = mine[0][1] if mine else 1
        if mine != [(index, count) for index in range(count)]:
            return f"I5: step {step}, {group}: parts {mine}, expected each once"
    if any(state != (step, True) for _, state in pieces):
        return f"I3: step {step}: its bytes are not those of a fault-free run"
    return ""


def _with(
    files: tuple[tuple[str, tuple[Piece, ...] | None], ...], name: str, content: tuple[Piece, ...] | None
) -> tuple[tuple[str, tuple[Piece, ...] | None], ...]:
    return tuple(sorted({**dict(files), name: content}.items()))
