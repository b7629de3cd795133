"""Simulated disks of each host's own: a checkpoint lies there in pieces, one a host, and is whole when every file is somewhere.

A root is a host and the directory's name there: `host1/a`. The rules are those of `ttp/checkpoint/node_local/publish_part.py` (claim, rename,
supersede) and of `gather.py` (what counts as whole).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tests.simulation.disk import OLDER_STEP, Directory, Disk, DiskError, File, Manifest, final_name, look_at
from ttp.proto.messages import FileEntry

_PUBLISHED = re.compile(r"iter_\d{7}(_superseded_\d+)?")


class Key(NamedTuple):
    """What the pieces of one write have in common; of several whole writes the highest is loaded."""

    step: int
    term: int
    attempt: str


@dataclass(frozen=True)
class Placed:
    """A piece at the moment when it got its name."""

    root: str
    key: Key
    content: tuple[tuple[str, File], ...]
    committed: int
    """The newest step whose record anybody had then."""


class OwnDisks(Disk):
    """The disks of all hosts. One that is lost keeps what was on it for the checks, and counts no more."""

    def __init__(self, names: tuple[str, ...], hosts: Sequence[str]) -> None:
        self.hosts = tuple(sorted(set(hosts)))
        super().__init__(tuple(host + name for host in self.hosts for name in names))
        self.names = names
        for root, name in list(self.directories):
            self.directories[root, name] = older_piece(root, self.hosts)
        self.lost: set[str] = set()
        self.placed: list[Placed] = []
        self.went_back: list[str] = []
        """Where a rename made a restart load less than before, or gave an earlier term's piece the name of a later one's."""

    # --- a publisher's acts ---

    def claim(self, rank: int, root: str, tmp_name: str, claim: str, mine: Sequence[FileEntry]) -> bool:
        """Take a staging directory, or what an earlier publisher has claimed of it, under a name of one's own; of several the one with the
        files. False: there is none. Raises DiskError, with nothing taken, where none has the files as their writers reported them, or
        `rank` cannot rename."""
        errors = []
        for name in sorted(name for where, name in self.directories if where == root and _is_of(name, tmp_name)):
            try:
                look_at(self.directories[root, name].files, mine)
            except DiskError as error:
                errors.append(error)
                continue
            self.check(rank, root)
            self.directories[root, claim] = self.directories.pop((root, name))
            return True
        if errors:
            raise errors[0]
        return False

    def place(self, root: str, claim: str, key: Key, committed: int) -> bool:
        """Give a claimed piece its name; False when the name is taken."""
        final = final_name(key.step)
        if (root, final) not in self.directories and (root, claim) not in self.directories:
            raise DiskError(f"{claim} is gone")
        before, had = self.recovered(), [placed.key.term for placed in self.placed if placed.root == root]
        if not self.rename(root, claim, final):
            return False
        self.published.append((root, key.step))
        self.placed.append(Placed(root, key, content_of_piece(self.directories[root, final]), committed))
        self._note_way_back(f"the piece {key} in {root}", before)
        if max(had, default=0) > key.term and self._newest_term(root, key.step) > key.term:
            self.went_back.append(f"the piece {key} in {root} took the name of one of a later term")
        return True

    def supersede(self, root: str, step: int) -> None:
        """Move a piece to another name; it is found there as well."""
        final, before = final_name(step), self.recovered()
        taken = [name for where, name in self.directories if where == root]
        number = next(n for n in range(1, len(taken) + 2) if f"{final}_superseded_{n}" not in taken)
        self.directories[root, f"{final}_superseded_{number}"] = self.directories.pop((root, final))
        self._note_way_back(f"superseding {root}/{final}", before)

    def _note_way_back(self, what: str, before: int) -> None:
        if self.recovered() < before:
            self.went_back.append(f"{what}: a restart loaded step {before} before, and {self.recovered()} now")

    def _newest_term(self, root: str, step: int) -> int:
        return max((key.term for where, key, _ in self.pieces((host_of(root),)) if where == root and key.step == step))

    # --- what a restart finds ---

    def pieces(self, hosts: Collection[str]) -> Iterator[tuple[str, Key, Directory]]:
        """Return (root, key, piece) of all published pieces on these hosts, superseded ones too."""
        for (root, name), directory in sorted(self.directories.items(), key=lambda item: item[0]):
            if directory.manifest is not None and is_published(name) and host_of(root) in hosts:
                yield root, key_of(directory.manifest), directory

    def lacking(self, hosts: Collection[str]) -> dict[Key, tuple[str, ...]]:
        """Return, of every write with a piece on these hosts, the files that are on none of them; none: it is whole."""
        listed: dict[Key, tuple[str, ...]] = {}
        found: dict[Key, set[str]] = {}
        for _, key, directory in self.pieces(hosts):
            assert directory.manifest is not None
            listed.setdefault(key, directory.manifest.files)
            found.setdefault(key, set()).update(name for name, file in directory.files.items() if file.durable)
        return {key: tuple(name for name in names if name not in found[key]) for key, names in listed.items()}

    def hosts_of(self, key: Key) -> frozenset[str]:
        """Return the hosts that have a piece of a write."""
        return frozenset(host_of(root) for root, its, _ in self.pieces(self.hosts) if its == key)

    def left(self) -> frozenset[str]:
        """Return the hosts that have their disks."""
        return frozenset(self.hosts) - self.lost

    def recovered(self) -> int:
        """Return the step that a restart on the remaining disks loads."""
        whole = [key.step for key, missing in self.lacking(self.left()).items() if not missing]
        return max(whole, default=OLDER_STEP - 1)

    def newest_published(self) -> int:
        return max(self.recovered(), OLDER_STEP)


def key_of(manifest: Manifest) -> Key:
    return Key(manifest.step, manifest.term, manifest.attempt)


def content_of_piece(directory: Directory) -> tuple[tuple[str, File], ...]:
    """Return a piece's files, to compare."""
    return tuple(sorted((name, File(file.parts, file.durable)) for name, file in directory.files.items()))


def older_piece(root: str, hosts: Collection[str]) -> Directory:
    """Return what is there before the job begins: one file of each host, of which this host has its own."""
    files = {f"older_{host_of(root)}": File((), True)}
    listed = tuple(f"older_{host}" for host in sorted(hosts))
    return Directory(files, Manifest(OLDER_STEP, listed, attempt=f"older{name_of(root)}"))


def host_of(root: str) -> str:
    return root.partition("/")[0]


def name_of(root: str) -> str:
    return root[root.index("/") :]


def is_published(name: str) -> bool:
    """True for the name of a published directory, superseded or not."""
    return _PUBLISHED.fullmatch(name) is not None


def _is_of(name: str, tmp_name: str) -> bool:
    return name == tmp_name or name.startswith(f"{tmp_name}_claim_")
