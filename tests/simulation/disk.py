"""A simulated shared file system: directories of files, an exclusive rename, a tracker, and ways to fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ttp.proto.messages import CommitRecord, FileEntry

WrittenPart = tuple[str, int, int, int]
"""What a file says about one part: (group id, index, count, value)."""

PART_BYTES = 10
OLDER_STEP = 0
"""The checkpoint that is there before the job begins is of this step."""


@dataclass
class File:
    parts: tuple[WrittenPart, ...]
    durable: bool

    @property
    def nbytes(self) -> int:
        return PART_BYTES * len(self.parts)


@dataclass(frozen=True)
class Manifest:
    step: int
    files: tuple[str, ...]
    host_state: int = 0
    """The data position and whatever else belongs to the step."""
    term: int = 0
    attempt: str = ""
    """Of the order to publish it; distinguished only where each node has directories of its own."""
    record: CommitRecord | None = None
    """The step's: a restart takes the learning rates and the loss scale from it."""


@dataclass
class Directory:
    files: dict[str, File] = field(default_factory=dict)
    manifest: Manifest | None = None


class DiskError(Exception):
    """The simulated disk refuses. `kind`: the injected fault that it comes from; empty: another process was faster. `torn`: ranks
    whose files are there and ended short."""

    def __init__(self, text: str, kind: str = "", torn: tuple[int, ...] = ()) -> None:
        super().__init__(text)
        self.kind, self.torn = kind, torn


def look_at(files: dict[str, File], entries: Sequence[FileEntry]) -> None:
    """Raise DiskError when a file is missing, or has not the size that its writer reported."""
    wrong = [entry for entry in entries if entry.name not in files or files[entry.name].nbytes != entry.nbytes]
    if wrong:
        torn = () if any(entry.name not in files for entry in wrong) else tuple(sorted({e.rank for e in wrong}))
        error = f"{wrong[0].name} is missing or has not the {wrong[0].nbytes} bytes that its writer reported"
        raise DiskError(error, torn=torn)


class Trackers(dict[str, int]):
    """By save directory, the step that its tracker names; remembers every step back."""

    def __init__(self) -> None:
        super().__init__()
        self.went_back: list[str] = []

    def __setitem__(self, root: str, step: int) -> None:
        if step < self.get(root, 0):
            self.went_back.append(f"the tracker of {root} went from step {self[root]} back to {step}")
        super().__setitem__(root, step)


class Disk:
    """Paths are (save directory, name). Each of `roots` begins with a complete checkpoint of `OLDER_STEP`."""

    def __init__(self, roots: tuple[str, ...] = ()) -> None:
        self.directories: dict[tuple[str, str], Directory] = {
            (root, final_name(OLDER_STEP)): older_checkpoint() for root in roots
        }
        self.tracker = Trackers()
        for root in roots:
            self.tracker[root] = OLDER_STEP
        self.before = {(root, OLDER_STEP) for root in roots}
        """(save directory, step) of complete checkpoints that were there before the job began."""
        self.full: set[str] = set()
        """Save directories without space."""
        self.broken_for: set[tuple[int, str]] = set()
        """(rank, save directory) pairs that fail."""
        self.tearing: set[tuple[int, str]] = set()
        """(rank, save directory) pairs where a file ends short without an error."""
        self.unsynced: set[tuple[int, str]] = set()
        """(rank, save directory) pairs where fsync fails."""
        self.torn_next: set[int] = set()
        """Ranks whose next write ends short and says so."""
        self.published: list[tuple[str, int]] = []
        """(save directory, step) in the order of the renames."""

    def check(self, rank: int, root: str) -> None:
        """Raise DiskError where `rank` cannot write to `root`."""
        if root in self.full:
            raise DiskError("no space left on device", "full disk")
        if (rank, root) in self.broken_for:
            raise DiskError("input/output error", "rank's disk")

    def check_fsync(self, rank: int, root: str) -> None:
        if (rank, root) in self.unsynced:
            raise DiskError("fsync: input/output error", "failed fsync")

    def serves(self, rank: int, root: str) -> bool:
        """True when nothing is wrong with a save directory for this rank."""
        return not (root in self.full or any((rank, root) in pairs for pairs in self._by_rank()))

    def spoiled(self) -> frozenset[str]:
        """Return the save directories that something was wrong with, for whatever rank."""
        return frozenset(self.full.union(*((r for _, r in pairs) for pairs in self._by_rank())))

    def _by_rank(self) -> tuple[set[tuple[int, str]], ...]:
        return self.broken_for, self.tearing, self.unsynced

    def write(self, root: str, name: str, file: str, content: File) -> None:
        """Put a file; a directory that was renamed away meanwhile is not made again."""
        if content.durable and (root, name) not in self.directories:
            raise DiskError(f"{name} is gone")
        torn = self.torn_next and content.durable and self._tears(int(file[1:].split("_")[0]))
        kept = File(content.parts[:-1], False) if torn else content
        self.directories.setdefault((root, name), Directory()).files[file] = kept
        if torn:
            raise DiskError("input/output error in fsync")

    def link(self, root: str, name: str, other: str, entries: Sequence[FileEntry]) -> bool:
        """Give files a second name in another directory; False where one of them is gone or has not the size that its writer reported."""
        there = self.directories.get((root, name), Directory()).files
        try:
            look_at(there, entries)
        except DiskError:
            return False
        files = self.directories.setdefault((root, other), Directory()).files
        files.update((entry.name, there[entry.name]) for entry in entries)
        return True

    def _tears(self, rank: int) -> bool:
        torn = rank in self.torn_next
        self.torn_next.discard(rank)
        return torn

    def rename(self, root: str, name: str, final: str) -> bool:
        """Move a directory; False when the target exists."""
        if (root, final) in self.directories:
            return False
        if (root, name) not in self.directories:
            raise DiskError(f"{name} is gone")
        self.directories[root, final] = self.directories.pop((root, name))
        return True

    def steps_in(self, root: str) -> list[int]:
        """Return the steps of a save directory's published checkpoints, as its names have them."""
        names = (name for where, name in self.directories if where == root)
        return [int(name.removeprefix("iter_")) for name in names if name.removeprefix("iter_").isdigit()]

    def newest_published(self) -> int:
        """Return the newest step of this job that was published; that of the older checkpoint when none was."""
        return max((step for _, step in self.published), default=OLDER_STEP)

    def recovered(self) -> int:
        """Return the step that a restart loads: the newest whose directory has a manifest of its step, and every file of it."""
        steps = [OLDER_STEP - 1]
        for (_, name), directory in self.directories.items():
            manifest = directory.manifest
            if manifest is None or name != final_name(manifest.step):
                continue
            files = [directory.files.get(file) for file in manifest.files]
            if all(file is not None and file.durable for file in files):
                steps.append(manifest.step)
        return max(steps)


def older_checkpoint() -> Directory:
    """Return what is there before the job begins."""
    return Directory({"older": File((), True)}, Manifest(OLDER_STEP, ("older",)))


def final_name(step: int) -> str:
    return f"iter_{step:07d}"
