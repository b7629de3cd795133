"""A published checkpoint for whoever wants its tensors whole, in one process: an export, an evaluation, a prompt.

Owns the choice of one checkpoint under a path, and the reading of whole tensors. Changes nothing on disk; needs no process
group, no optimizer and no knowledge of the layout that wrote it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from ttp.checkpoint import keys, load
from ttp.checkpoint.durable import step_of_directory
from ttp.checkpoint.held import HeldTensor
from ttp.checkpoint.joined import joined
from ttp.checkpoint.manifest import MANIFEST_NAME, Manifest
from ttp.errors import CheckpointError, CheckpointMismatch

_MODEL = keys.model_key("")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A valid checkpoint. Made by `ttp.open_checkpoint`."""

    path: str
    step: int
    cause: str
    """Why it was written: `periodic`, `requested`, or what ended the job."""
    layout: Mapping[str, Any]
    """What `ttp.start(layout=...)` was given, and the optimizer's own layout."""
    state: Mapping[str, Any]
    """What `set_step_state(step, ...)` was given."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of the model's parameters, by name."""
    skipped: tuple[str, ...]
    """Newer checkpoints that were not valid, with the reason each."""
    _metadata: Metadata | None = field(default=None, repr=False, compare=False)
    """Torch's index, where it is not in the folder: of pieces that were copied together."""

    def weights(self, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
        """Return parameters (all of them, or `names`) whole, on the CPU, in float32: the optimizer's masters.

        Raises CheckpointMismatch for a name that is not there, CorruptCheckpoint when the bytes cannot be read.
        """
        chosen = list(self.shapes if names is None else names)
        for name in chosen:
            if name not in self.shapes:
                raise CheckpointMismatch(
                    f"{self.path} has no parameter {name!r}; it has {', '.join(sorted(self.shapes))}"
                )
        found = {name: torch.empty(self.shapes[name], dtype=torch.float32) for name in chosen}
        held = [
            HeldTensor(keys.model_key(name), self.shapes[name], 0, tensor.view(-1)) for name, tensor in found.items()
        ]
        load.read_into(self.path, held, self._metadata)
        return found


def open_checkpoint(path: str | os.PathLike[str], *, deep: bool = True) -> Checkpoint:
    """Return the checkpoint at `path`, or the newest valid one of the directory `path`; any process may call this.

    deep: compare checksums. Raises CheckpointError when none is there, CorruptCheckpoint when the one that is named is broken.
    """
    root = Path(path)
    if not root.is_dir():
        raise CheckpointError(f"{root} is no directory: name a checkpoint (iter_0000042) or a directory of them")
    if step_of_directory(root.absolute()) is not None or (root / MANIFEST_NAME).exists():
        return _checkpoint(root, load.verify(root, deep=deep), ())
    found = load.find_newest_valid([root], deep=deep)
    if found is None:
        broken = [str(each) for each in load.list_checkpoints([root])]
        raise CheckpointError(
            f"{root} holds no valid checkpoint ({', '.join(broken) + ': broken' if broken else 'no iter_* is there'});"
            " see ttp ckpt list"
        )
    return _checkpoint(found.path, found.manifest, found.skipped)


def _checkpoint(path: Path, manifest: Manifest, skipped: tuple[str, ...]) -> Checkpoint:
    metadata = None
    if manifest.hosts:
        manifest, metadata = joined(path, manifest)
    shapes = {key.removeprefix(_MODEL): spec.shape for key, spec in manifest.tensors.items() if key.startswith(_MODEL)}
    state = manifest.state.get("trainer")
    return Checkpoint(
        path=str(path),
        step=manifest.step,
        cause=manifest.cause.kind.value,
        layout=manifest.layout,
        state=state if isinstance(state, dict) else {},
        shapes=shapes,
        skipped=skipped,
        _metadata=metadata,
    )
