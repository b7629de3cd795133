"""Read one checkpoint: any run of any tensor, whole tensors, and the plain values, at any world size and layout.

Owns the reading, and the proof that parts of several nodes that were copied into one directory are a whole checkpoint. Uses no
collective, runs no code from a checkpoint, changes nothing on disk.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata

from ttp.checkpoint.format import dcp
from ttp.checkpoint.format.file_index import read_contents
from ttp.checkpoint.format.manifest import MANIFEST_NAME, Manifest, TensorSpec, read_manifest
from ttp.checkpoint.format.types import HeldTensor
from ttp.checkpoint.verify import check_complete, files_here, metadata_entry
from ttp.errors import CorruptCheckpoint
from ttp.proto.messages import ShareResult


@dataclass(frozen=True)
class Reader:
    """One checkpoint that was verified."""

    path: Path
    manifest: Manifest
    skipped: tuple[str, ...] = ()
    """Newer checkpoints that were not valid: path and reason each."""
    index: Metadata | None = None
    """Torch's index, where the directory has none that covers the whole checkpoint: of a checkpoint of several nodes."""

    @cached_property
    def metadata(self) -> Metadata:
        """Torch's index. Raises CorruptCheckpoint."""
        if self.index is not None:
            return self.index
        return dcp.read_metadata(self.path, metadata_entry(self.path, self.manifest))

    def read_into(self, targets: Sequence[HeldTensor]) -> None:
        """Fill the targets' values: see the function `read_into`."""
        dcp.read_runs(self.path, targets, self.metadata)

    def run(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of a tensor, laid out row-major, at its stored type. Raises CorruptCheckpoint."""
        spec = self.manifest.tensors[key]
        values = torch.empty(stop - start, dtype=dcp.dtype_of(spec.dtype))
        self.read_into([HeldTensor(key, spec.shape, start, values)])
        return values

    def whole(self, key: str) -> torch.Tensor:
        """Return a tensor in its shape, at its stored type. Raises CorruptCheckpoint."""
        spec = self.manifest.tensors[key]
        return self.run(key, 0, spec.numel).view(spec.shape)

    def blobs(self) -> dict[str, object]:
        """Return the plain values by key. Raises CorruptCheckpoint."""
        return dcp.read_blobs(self.path, self.metadata)


def open_verified(path: Path, manifest: Manifest, skipped: tuple[str, ...] = ()) -> Reader:
    """Return the reader of a verified checkpoint. Raises CorruptCheckpoint for one node's part without the files of the others.

    A part's manifest lists the tensors of its node only, and torch's index may be missing: the files' own tables of contents are read.
    """
    if not manifest.hosts:
        return Reader(path, manifest, skipped)
    here = {file.name for file in files_here(path, manifest)}
    if missing := [file for file in manifest.files if file.name not in here]:
        first, others = missing[0], len(missing) - 1
        owner = f"node {manifest.hosts[first.rank]} has it" if first.rank < len(manifest.hosts) else "it is gone"
        more = f", nor {'is' if others == 1 else 'are'} {others} more" if others else ""
        raise CorruptCheckpoint(
            f"{path} is one node's part of a checkpoint of {len(set(manifest.hosts))} nodes: {first.name} is not here ({owner})"
            f"{more}; copy the *.distcp files of all nodes' parts of that step into this folder"
        )
    files = tuple(file for file in manifest.files if file.name != dcp.METADATA_NAME)
    contents = read_contents(path, [ShareResult(files)])
    whole = replace(manifest, tensors=check_complete(contents), hosts=())
    return Reader(path, whole, skipped, dcp.metadata_of(contents))


def read_into(path: str | os.PathLike[str], targets: Sequence[HeldTensor], metadata: Metadata | None = None) -> None:
    """Fill every target's `values` in place; only the stored boxes that overlap them are read, each once.

    Any rank may call this alone, with any cut; the dtype is converted where it differs. The caller has verified the
    checkpoint. `metadata`: torch's index, where it is known already. Raises CheckpointMismatch naming the first missing key or
    other shape (nothing is changed then) and CorruptCheckpoint when the bytes cannot be read (the values are undefined then).
    """
    root = Path(path)
    if not root.is_dir():
        raise CorruptCheckpoint(f"{root} is not a directory: no checkpoint is there")
    if metadata is None:
        ours = os.path.lexists(root / MANIFEST_NAME)  # else torch wrote it alone
        metadata = dcp.read_metadata(root, metadata_entry(root, read_manifest(root)) if ours else None)
    dcp.read_runs(root, targets, metadata)


def check_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, TensorSpec], expected: Mapping[str, Sequence[int]]
) -> None:
    """Compare a checkpoint's tensors with what this job has (shape by key), both ways.

    Raises CheckpointMismatch naming the first difference: a sharded rank, which reads but a part, would not see a
    checkpoint of a deeper model.
    """
    for key in sorted(tensors.keys() | expected.keys()):
        dcp.check_shape(path, key, tensors[key].shape if key in tensors else None, expected.get(key))
