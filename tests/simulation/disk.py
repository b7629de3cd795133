"""A simulated shared file system: directories of files, an exclusive rename, a tracker, and ways to fail."""

from __future__ import annotations

from dataclasses import dataclass, field

Piece = tuple[str, int, int, int]
"""What a file says about one part: (group id, index, count, value)."""


@dataclass
class File:
    pieces: tuple[Piece, ...]
    durable: bool


@dataclass(frozen=True)
class Manifest:
    step: int
    files: tuple[str, ...]


@dataclass
class Directory:
    files: dict[str, File] = field(default_factory=dict)
    manifest: Manifest | None = None


class DiskError(Exception):
    """The simulated disk refuses."""


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
    """Paths are (save directory, name)."""

    def __init__(self) -> None:
        self.directories: dict[tuple[str, str], Directory] = {}
        self.tracker = Trackers()
        self.before: set[tuple[str, int]] = set()
        """(save directory, step) of complete checkpoints that were there before the job began."""
        self.full: set[str] = set()
        """Save directories without space."""
        self.broken_for: set[tuple[int, str]] = set()
        """(rank, save directory) pairs that fail."""
        self.published: list[tuple[str, int]] = []
        """(save directory, step) in the order of the renames."""

    def check(self, rank: int, root: str) -> None:
        if root in self.full or (rank, root) in self.broken_for:
            raise DiskError("no space left on device")

    def write(self, root: str, name: str, file: str, content: File) -> None:
        """Put a file; a directory that was renamed away meanwhile is not made again."""
        if content.durable and (root, name) not in self.directories:
            raise DiskError(f"{name} is gone")
        self.directories.setdefault((root, name), Directory()).files[file] = content

    def rename(self, root: str, name: str, final: str) -> bool:
        """Move a directory; False when the target exists."""
        if (root, final) in self.directories:
            return False
        if (root, name) not in self.directories:
            raise DiskError(f"{name} is gone")
        self.directories[root, final] = self.directories.pop((root, name))
        return True
