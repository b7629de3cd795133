"""Where a job keeps its checkpoints: one interface for directories that all ranks share and for nodes with directories of their own.

Owns what is different between the two kinds for whoever writes, resumes or looks after directories, and the first kind
(the second: `node_local.store`). Nothing outside this package asks which kind it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.checkpoint.metadata import Metadata

from ttp.checkpoint.find import OnSkip, Ranks, StrPath, first_valid, ignore, list_checkpoints
from ttp.checkpoint.format import dcp
from ttp.checkpoint.format.manifest import Manifest
from ttp.checkpoint.format.signature import VerifyKey
from ttp.checkpoint.format.types import HeldTensor
from ttp.checkpoint.publish import publish
from ttp.checkpoint.reader import Reader, check_tensors
from ttp.checkpoint.verify import check_sums, files_here, metadata_entry, share_of_files, verify
from ttp.errors import CheckpointMismatch, CorruptCheckpoint


class Peers(Ranks, Protocol):
    """The job's ranks, which can move bytes as well: a `send` meets a `receive`."""

    def send(self, chunk: memoryview, rank: int) -> None: ...

    def receive(self, chunk: memoryview, rank: int) -> None: ...


def _nothing(value: object) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Request:
    """What a rank that resumes needs."""

    save_dirs: Sequence[str]
    """The job's directories, in order of preference."""
    serving: Sequence[str]
    """Those of them that take new files."""
    expected: Mapping[str, Sequence[int]]
    """Shape of every tensor of the job."""
    targets: Callable[[], Sequence[HeldTensor]]
    """Returns what this rank will read."""
    check: Callable[[Manifest], None] = _nothing
    """Raises CorruptCheckpoint for a checkpoint that the job cannot use."""
    on_skip: OnSkip = ignore
    """Called with every newer checkpoint that is not valid (every rank: the same)."""
    key: VerifyKey | None = None
    """Who must have signed it."""
    report: Callable[[str], None] = _nothing
    """Called with what was moved between nodes (every rank: the same)."""


class Store(Protocol):
    """The checkpoints of one attempt of a job, as one of its ranks sees them."""

    leader: int
    """The rank that looks after this rank's directories: for all ranks, or for those of its node."""
    node: str
    """This rank's node, where that matters for a directory; else empty."""
    start: int
    """The number of this attempt, where it distinguishes parts of checkpoints; else 0."""
    launch: str
    """The name of the attempt's launch, where it distinguishes parts of checkpoints; else empty."""
    began_after: int | None
    """The step from which an earlier attempt began that launch; None: that is not known."""
    in_use_advice: str
    """Ends the message that another job writes into a directory."""

    def list_published(self, directories: Iterable[StrPath]) -> list[Path]:
        """Return the published names in directories of this rank's node, newest step first."""

    def check_choice(self, path: Path, save_dirs: Sequence[str]) -> None:
        """Raise CheckpointError for a checkpoint that this store cannot resume from. `save_dirs`: the job's."""

    def open_newest(self, paths: Sequence[str], ranks: Peers, request: Request) -> Reader | None:
        """Return the first of `paths` that is valid, ready to be read by this rank; None: none is. All ranks call.

        Raises CheckpointMismatch on every rank (another model), CheckpointError.
        """

    def publish(self, directory: str, tmp_name: str, **fields: Any) -> str:
        """Make a staging directory a checkpoint; return its path. `fields`: those of `Publication`."""

    def remove_superseded(self, directories: Iterable[StrPath], below: int) -> list[Path]:
        """Remove what later writes have superseded of steps below `below`, which all ranks have loaded; return it."""


class SharedStore:
    """Directories that all ranks share."""

    leader = 0
    node = ""
    start = 0
    launch = ""
    began_after: int | None = None
    in_use_advice = ""

    def list_published(self, directories: Iterable[StrPath]) -> list[Path]:
        return list_checkpoints(directories)

    def check_choice(self, path: Path, save_dirs: Sequence[str]) -> None:
        """Any path that all ranks see can be read."""

    def open_newest(self, paths: Sequence[str], ranks: Peers, request: Request) -> Reader | None:
        judged = _Judged(ranks, request)
        found = first_valid(paths, judged.verify, ranks=ranks, on_skip=request.on_skip)
        if found is None:
            return None
        check_tensors(found.path, found.manifest.tensors, request.expected)
        return found if judged.index is None else replace(found, index=judged.index)

    def publish(self, directory: str, tmp_name: str, **fields: Any) -> str:
        return publish(directory, tmp_name, **fields)

    def remove_superseded(self, directories: Iterable[StrPath], below: int) -> list[Path]:
        return []  # a checkpoint that is there is never replaced


class _Judged:
    """One rank's share in the verifying of a checkpoint that the ranks may load: it hashes the files that it would read.

    The state is loaded into the job's own memory, whose values must survive where no checkpoint is valid. So all is verified
    before any of it is used; what this rank has just hashed, it reads from its node's page cache.
    """

    def __init__(self, ranks: Ranks, request: Request) -> None:
        self._ranks = ranks
        self._request = request
        self.index: Metadata | None = None
        """Torch's index of the checkpoint that was verified last."""

    def verify(self, path: Path) -> Manifest:
        """All ranks call. Raises CorruptCheckpoint, OSError, on the rank that finds what is broken."""
        index, count = self._ranks.index, self._ranks.count
        names: set[str] = set()
        try:
            manifest = verify(path, share=(index, count), deep=False, key=self._request.key)
            self._request.check(manifest)
            names = self._names(path, manifest)
        finally:
            read = set().union(*self._ranks.exchange(sorted(names)))
        mine = [file for file in manifest.files if file.name in names]
        others = [file for file in files_here(path, manifest) if file.name not in read]
        check_sums(path, mine + share_of_files(others, index, count))
        return manifest

    def _names(self, path: Path, manifest: Manifest) -> set[str]:
        """Return the files that this rank would read; none of another model's checkpoint, which is refused later."""
        self.index = None
        if manifest.hosts:
            return set()
        self.index = dcp.read_metadata(path, metadata_entry(path, manifest))
        try:
            return dcp.files_of_runs(path, self._request.targets(), self.index)
        except CheckpointMismatch:
            return set()
        except (
            KeyError,
            IndexError,
            TypeError,
            ValueError,
        ) as error:  # torch's planner, of an index that contradicts itself
            raise CorruptCheckpoint(f"{path}: .metadata contradicts itself: {type(error).__name__}: {error}") from error
