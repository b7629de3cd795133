"""The exhaustive model's shared file system: a value. What it publishes is checked the moment it becomes visible."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.simulation.training import Training


class DiskError(Exception):
    """The disk refuses."""


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """What a file says about one part: the step of the state that it was read from, and whether that state was right."""

    group_id: str
    index: int
    count: int
    state_step: int
    tainted: bool


@dataclass(frozen=True, slots=True, order=True)
class Attempt:
    """A directory that is being written. Files in it are durable: one that is not is as good as absent."""

    root: str
    name: str
    files: tuple[tuple[str, tuple[Piece, ...]], ...] = ()
    manifest: tuple[int, tuple[str, ...]] | None = None


@dataclass(frozen=True, slots=True)
class Disk:
    attempts: tuple[Attempt, ...] = ()
    published: tuple[tuple[str, int, Attempt], ...] = ()
    """(directory, step, what was in it at the rename), in the order of the renames."""
    tracker: tuple[tuple[str, int], ...] = ()

    def _find(self, root: str, name: str) -> Attempt | None:
        return next((a for a in self.attempts if (a.root, a.name) == (root, name)), None)

    def _put(self, attempt: Attempt) -> Disk:
        others = [a for a in self.attempts if (a.root, a.name) != (attempt.root, attempt.name)]
        return replace(self, attempts=tuple(sorted((*others, attempt), key=lambda a: (a.root, a.name))))

    def has(self, root: str, step: int) -> bool:
        return any((root, step) == (there, done) for there, done, _ in self.published)

    def write(self, root: str, name: str, file: str, pieces: tuple[Piece, ...]) -> Disk:
        """Put a durable file. A directory is made by whoever comes first."""
        if any(a.root == root and a.name == name for _, _, a in self.published):
            raise DiskError(f"{name} is gone")
        attempt = self._find(root, name) or Attempt(root, name)
        files = dict(attempt.files) | {file: pieces}
        return self._put(replace(attempt, files=tuple(sorted(files.items()))))

    def put_manifest(self, root: str, name: str, step: int, files: tuple[str, ...]) -> Disk:
        attempt = self._find(root, name)
        if self.has(root, step):
            return self
        if attempt is None:
            raise DiskError(f"{name} is gone")
        return self._put(replace(attempt, manifest=(step, tuple(sorted(files)))))

    def rename(self, root: str, name: str, step: int) -> Disk:
        """Exclusive: a checkpoint of that step that is there already is kept."""
        attempt = self._find(root, name)
        if self.has(root, step):
            return self
        if attempt is None:
            raise DiskError(f"{name} is gone")
        attempts = tuple(a for a in self.attempts if a is not attempt)
        return replace(self, attempts=attempts, published=(*self.published, (root, step, attempt)))

    def track(self, root: str, step: int) -> Disk:
        newest = dict(self.tracker)
        newest[root] = max(step, newest.get(root, 0))
        return replace(self, tracker=tuple(sorted(newest.items())))


def published_wrong(disk: Disk, training: Training) -> str:
    """I1 to I5 of everything that is visible; empty when all is well."""
    for root, step, attempt in disk.published:
        where = f"{root}/iter_{step:07d}"
        if attempt.manifest is None or attempt.manifest[0] != step:
            return f"I1: {where} has no manifest of its step"
        files = dict(attempt.files)
        if not set(files) >= set(attempt.manifest[1]):
            return f"I1: {where} lists a file that is missing or not durable"
        pieces = sorted(piece for name in attempt.manifest[1] for piece in files[name])
        for group in training.groups:
            mine = [piece for piece in pieces if piece.group_id == group]
            count = mine[0].count if mine else 1
            if [(piece.index, piece.count) for piece in mine] != [(index, count) for index in range(count)]:
                return f"I5: {where}, {group}: parts {[(p.index, p.count) for p in mine]}, wanted each once"
            if any(piece.state_step != step for piece in mine):
                return f"I2: {where}, {group}: its parts are of steps {[piece.state_step for piece in mine]}"
            if any(piece.tainted for piece in mine):
                return f"I3: {where}, {group}: its bytes are not those of a fault-free run"
    if len({step for _, step, _ in disk.published}) > 1:
        return f"I2: one fault published several steps: {[(r, s) for r, s, _ in disk.published]}"
    if len({(r, s) for r, s, _ in disk.published}) != len(disk.published):
        return "I4: a step was published twice in one directory"
    if any(not disk.has(root, step) for root, step in disk.tracker):
        return f"I4: the tracker names {disk.tracker}, which is not there"
    return ""
