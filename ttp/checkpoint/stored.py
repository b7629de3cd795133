"""A valid checkpoint opened for reading at its stored types: any run of any tensor, and the plain values.

Owns the reading for the commands that go through a whole checkpoint (diff, export). Runs no code from it, changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch.distributed.checkpoint.metadata import Metadata

from ttp.checkpoint import dcp
from ttp.checkpoint.held import HeldTensor
from ttp.checkpoint.joined import joined
from ttp.checkpoint.load import list_checkpoints
from ttp.checkpoint.look import checked
from ttp.checkpoint.manifest import Manifest, TensorSpec
from ttp.checkpoint.survey import folder_at, is_checkpoint, newest_at, nothing_in
from ttp.checkpoint.verify import metadata_entry
from ttp.errors import CheckpointError, CorruptCheckpoint


@dataclass(frozen=True, slots=True)
class Stored:
    """One checkpoint that was verified."""

    path: Path
    manifest: Manifest
    metadata: Metadata

    def run(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of a tensor, laid out row-major. Raises CorruptCheckpoint."""
        spec = self.manifest.tensors[key]
        values = torch.empty(stop - start, dtype=dcp.dtype_of(spec.dtype))
        dcp.read_runs(self.path, [HeldTensor(key, spec.shape, start, values)], self.metadata)
        return values

    def whole(self, key: str) -> torch.Tensor:
        """Return a tensor in its shape. Raises CorruptCheckpoint."""
        spec = self.manifest.tensors[key]
        return self.run(key, 0, numel_of(spec)).view(spec.shape)

    def blobs(self) -> dict[str, object]:
        """Return the plain values by key. Raises CorruptCheckpoint."""
        return dcp.read_blobs(self.path, self.metadata)


def open_stored(path: Path, console: Console, *, deep: bool = True) -> Stored:
    """Return the checkpoint at `path`, or the newest valid one of the folder `path`, verified.

    deep: compare checksums. Raises UsageError, CheckpointError when none is valid, or a node's piece without those of the others.
    """
    chosen = newest_at(path)
    if is_checkpoint(path):
        return _opened(chosen, checked(chosen, console, deep=deep))
    folder, broken = folder_at(path), []
    for candidate in list_checkpoints([folder]):
        try:
            manifest = checked(candidate, console, deep=deep)
        except CorruptCheckpoint as error:
            broken.append(str(error))
            console.print(f"skipped: {error}", markup=False)
            continue
        return _opened(candidate, manifest)
    raise CheckpointError(f"{folder} holds no valid checkpoint: {'; '.join(broken)}") if broken else nothing_in(folder)


def _opened(path: Path, manifest: Manifest) -> Stored:
    if manifest.hosts:
        return Stored(path, *joined(path, manifest))
    return Stored(path, manifest, dcp.read_metadata(path, metadata_entry(path, manifest)))


def numel_of(spec: TensorSpec) -> int:
    """Return how many elements a tensor has."""
    return math.prod(spec.shape)
