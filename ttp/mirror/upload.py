"""Copy published checkpoints of one node into a mirror: data files first, each checked as it is read, the manifest last.

    iter_0000042/.ttp_write        which write of the step this is: a second one with other bytes is refused
    iter_0000042/__0_....distcp    as in the directory, so that `torch.distributed.checkpoint` loads it from there
    iter_0000042/manifest.json     last, and only if there is none: then the checkpoint is whole

Owns that order, the choice of what is copied next (the newest), and which older ones go. Never changes a directory. Where each node has directories of its
own, each copies its own files, and the node of the lowest rank that wrote one puts its manifest when all are there. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ttp.checkpoint.format.checksum import check_file
from ttp.checkpoint.format.durable import step_directory_name, step_of_directory, steps_of_run
from ttp.checkpoint.format.manifest import MANIFEST_NAME, Manifest, from_bytes, read_bytes
from ttp.checkpoint.format.signature import SIGNATURE_NAME
from ttp.errors import CheckpointError, CorruptCheckpoint
from ttp.mirror.remote import Remote
from ttp.mirror.source import MirrorSource

CLAIM_NAME = ".ttp_write"


class Conflict(CheckpointError):
    """The mirror has this step with other bytes: nothing is overwritten."""


class NotYet(Exception):
    """Other nodes have not copied all of their files."""


@dataclass(frozen=True, slots=True)
class Lag:
    """How far the mirror is behind the directories."""

    step: int
    """The newest that is whole in the mirror, as far as this process knows; 0: none."""
    behind_steps: int
    behind_s: float
    """Since the first checkpoint that is newer than `step` was published; 0: there is none."""


@dataclass
class Uploader:
    remote: Remote
    source: MirrorSource
    clock: Callable[[], float] = time.time
    newest: int = 0
    """The newest step that is whole in the mirror, as far as is known."""
    _settled: dict[Path, float] = field(default_factory=dict)
    """Copied, or passed over for good, with the time of the manifest."""
    _finite: dict[int, bool] = field(default_factory=dict)

    def begin(self) -> int:
        """Remove what interrupted uploads of these directories left, and return how many; learn which step is the newest. Raises RemoteError."""
        self._learn_newest()
        paths = {path.name: path for path in published(self.source)}
        found = self.remote.unfinished()
        own = {each.folder: self._own_names(paths[each.folder]) for each in found if each.folder in paths}
        mine = [each for each in found if each.name in own.get(each.folder, ())]
        for each in mine:
            self.remote.abort(each)
        return len(mine)

    def _own_names(self, path: Path) -> set[str]:
        """Return the names of this node's files of a checkpoint; none where the mirror has no claim of it, or that of another write. Raises RemoteError."""
        try:
            content = read_bytes(path)
            claim = _write_name(from_bytes(content, str(path / MANIFEST_NAME)), content)
        except CheckpointError:  # broken, or removed meanwhile
            return set()
        names = {file.name for file in path.glob("*")}
        return names if self.remote.read(f"{path.name}/{CLAIM_NAME}") == claim else set()

    def pending(self) -> list[Path]:
        """Return the published checkpoints that are to be copied, newest first: with `keep`, none that would be removed again."""
        found = published(self.source)[: self.source.keep or None]
        return [path for path in found if self._settled.get(path) != _written(path)]

    def has_newest(self) -> bool:
        """Return whether the newest published checkpoint needs no copy any more."""
        return all(self._settled.get(path) == _written(path) for path in published(self.source)[:1])

    def lag(self) -> Lag:
        """Compare with what is published now."""
        return lag(self.source, self.newest, self.clock())

    def copy(self, path: Path) -> int:
        """Copy one checkpoint; return the bytes that were uploaded. Raises Conflict and CorruptCheckpoint (the directory is broken), and like after
        a copy it is not looked at again unless it is published anew; NotYet, RemoteError, FileNotFoundError (it was removed meanwhile)."""
        written = _written(path)
        try:
            nbytes = self._copy(path)
        except CheckpointError:
            self._settled[path] = written
            raise
        except FileNotFoundError as error:
            if not written or _written(path) != written:
                raise
            self._settled[path] = written
            raise CorruptCheckpoint(f"{path} lacks a file: {error}") from error
        self._settled[path] = written
        return nbytes

    def _copy(self, path: Path) -> int:
        content = read_bytes(path)
        manifest = from_bytes(content, str(path / MANIFEST_NAME))
        folder, nbytes = step_directory_name(manifest.step), 0
        there = self.remote.read(f"{folder}/{MANIFEST_NAME}")
        if there is None:
            nbytes = self._copy_files(path, manifest, content, folder)
            if self._publishes(manifest):
                there = self._put_manifest(path, manifest, content, folder)
        if there is not None and not _same_write(there, content, manifest):
            raise self._conflict(folder)
        if there is None:
            self._learn_newest()  # another node makes checkpoints whole
        else:
            self.newest = max(self.newest, manifest.step)
            self._finite[manifest.step] = manifest.finite is not False
        return nbytes

    def _copy_files(self, path: Path, manifest: Manifest, content: bytes, folder: str) -> int:
        claim, name = _write_name(manifest, content), f"{folder}/{CLAIM_NAME}"
        new = self.remote.put_new(name, claim)
        if not new and self.remote.read(name) != claim:
            raise self._conflict(folder)
        try:
            return self._put_files(path, manifest, folder, {} if new else self.remote.sizes(folder))
        except (CorruptCheckpoint, FileNotFoundError):
            if not manifest.hosts and self.remote.read(f"{folder}/{MANIFEST_NAME}") is None:
                self.remote.remove(folder)  # so that another write of the step can take its place
            raise

    def _put_files(self, path: Path, manifest: Manifest, folder: str, there: Mapping[str, int]) -> int:
        """Put the files that are not `there`."""
        nbytes = 0
        for file in manifest.files:
            if there.get(file.name) == file.nbytes:
                continue  # of this write, and uploads are whole or not there
            elsewhere = bool(manifest.hosts) and manifest.hosts[file.rank] != self.source.host
            if elsewhere and not (path / file.name).exists():
                continue
            check_file(path / file.name, file)
            self.remote.put(path / file.name, f"{folder}/{file.name}")
            nbytes += file.nbytes
        return nbytes

    def _put_manifest(self, path: Path, manifest: Manifest, content: bytes, folder: str) -> bytes | None:
        """Return the manifest that is there then."""
        there = self.remote.sizes(folder)
        if any(there.get(file.name) != file.nbytes for file in manifest.files):
            if manifest.hosts:
                raise NotYet
            raise CorruptCheckpoint(f"{self.remote.place(folder)} lacks files that were just uploaded")
        if (path / SIGNATURE_NAME).exists():
            self.remote.put(path / SIGNATURE_NAME, f"{folder}/{SIGNATURE_NAME}")
        name = f"{folder}/{MANIFEST_NAME}"
        return content if self.remote.put_new(name, content) else self.remote.read(name)

    def _publishes(self, manifest: Manifest) -> bool:
        """This node puts the manifest: all nodes know who wrote, and the lowest of those ranks is on one of them."""
        if not manifest.hosts:
            return True
        return manifest.hosts[min(file.rank for file in manifest.files)] == self.source.host

    def remove_older(self) -> list[int]:
        """Remove what is older than the newest `keep` whole ones from the mirror; return the steps. Where the state of none of those is finite,
        the newest one that is stays as well. Raises RemoteError."""
        if not self.source.keep:
            return []
        kept: list[int] = []
        removed: list[int] = []
        for step in self._steps():
            if len(kept) >= self.source.keep and (any(map(self._is_finite, kept)) or not self._is_finite(step)):
                folder = step_directory_name(step)
                self.remote.remove(f"{folder}/{MANIFEST_NAME}")  # from here on it is not whole
                self.remote.remove(folder)
                removed.append(step)
            elif self._is_whole(step):
                kept.append(step)
        return removed

    def _learn_newest(self) -> None:
        whole = (step for step in self._steps() if step > self.newest and self._is_whole(step))
        self.newest = next(whole, self.newest)

    def _steps(self) -> list[int]:
        """Return the steps that have a folder in the mirror, newest first, but for those that are not the run's."""
        others = {step_of_directory(Path(path)) for path in self.source.passed_over}
        found = {step_of_directory(Path(name)) for name in self.remote.folders()} - others
        return sorted(filter(None, found), reverse=True)

    def _is_whole(self, step: int) -> bool:
        return MANIFEST_NAME in self.remote.sizes(step_directory_name(step))

    def _is_finite(self, step: int) -> bool:
        if step not in self._finite:
            content = self.remote.read(f"{step_directory_name(step)}/{MANIFEST_NAME}")
            try:
                self._finite[step] = content is not None and from_bytes(content, "manifest").finite is not False
            except CorruptCheckpoint:
                self._finite[step] = False
        return self._finite[step]

    def _conflict(self, folder: str) -> Conflict:
        return Conflict(
            f"{self.remote.place(folder)} is another write of that step: nothing is overwritten. Use another TTP_MIRROR for another run, or remove it"
        )


def published(source: MirrorSource) -> list[Path]:
    """Return one published directory of each step, newest first."""
    found: dict[int, Path] = {}
    for folder in source.save_dirs:
        for step, path in steps_of_run([folder], source.passed_over):
            found.setdefault(step, path)
    return [found[step] for step in sorted(found, reverse=True)]


def lag(source: MirrorSource, newest: int, now_unix_s: float) -> Lag:
    """Return how far a mirror whose newest step is `newest` is behind the directories."""
    newer = [path for path in published(source) if (step_of_directory(path) or 0) > newest]
    if not newer:
        return Lag(newest, 0, 0.0)
    since = min(_written(path) for path in newer)
    return Lag(newest, (step_of_directory(newer[0]) or 0) - newest, max(0.0, now_unix_s - since))


def _written(path: Path) -> float:
    try:
        return (path / MANIFEST_NAME).stat().st_mtime
    except OSError:
        return 0.0


def _write_name(manifest: Manifest, content: bytes) -> bytes:
    """Name one write of a step; of nodes with directories of their own each has another manifest of it."""
    if manifest.hosts:
        names = [manifest.attempt, manifest.launch] if manifest.launch else [manifest.attempt]
        return json.dumps([manifest.start, manifest.term, *names]).encode()
    return hashlib.sha256(content).hexdigest().encode()


def _same_write(there: bytes, content: bytes, manifest: Manifest) -> bool:
    if there == content or not manifest.hosts:
        return there == content
    try:
        return _write_name(from_bytes(there, "manifest"), there) == _write_name(manifest, content)
    except CorruptCheckpoint:
        return False
