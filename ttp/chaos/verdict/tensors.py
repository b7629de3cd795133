"""Compares two checkpoints tensor by tensor, whatever the layouts that they were written in: the same bits, or which differ."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from ttp.errors import CheckpointError


def compare_checkpoints(one: Path, other: Path) -> list[str]:
    """Return the differences, one line each. Reads both whole, so they must fit into memory."""
    try:
        mine, expected = _tensors(one), _tensors(other)
    except (CheckpointError, OSError, RuntimeError) as error:
        return [f"{one} and {other} cannot be compared: {error}"]
    wrong = []
    if one.name != other.name:
        wrong.append(f"the newest checkpoint is {one.name}, the baseline run's {other.name}")
    wrong += [f"{name}: only one of {one} and {other} has it" for name in sorted(set(mine) ^ set(expected))]
    return wrong + [
        f"{name} in {one.name}: its bits differ from the baseline run's"
        for name in sorted(set(mine) & set(expected))
        if not _same_bits(mine[name], expected[name])
    ]


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    metadata = FileSystemReader(path).read_metadata()
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is: one process reads
        load(found, checkpoint_id=path, no_dist=True)
    return found


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
