"""Two checkpoints are compared by their tensors' bits, not by their files."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_saver import save

from ttp.chaos.faults.external import flip_bits
from ttp.chaos.verdict.tensors import compare_checkpoints


def checkpoint(path: Path, **tensors: torch.Tensor) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about a single process
        save(dict(tensors), checkpoint_id=path, no_dist=True)
    return path


def test_equal_bits_are_equal_and_one_bit_is_found_by_name(tmp_path: Path) -> None:
    """NaN equals itself, and 0.0 is not -0.0: bits are compared, not numbers."""
    weight, bias = torch.tensor([1.0, float("nan"), 0.0]), torch.arange(4, dtype=torch.bfloat16)
    one = checkpoint(tmp_path / "a" / "iter_0000004", weight=weight, bias=bias)
    same = checkpoint(tmp_path / "b" / "iter_0000004", weight=weight.clone(), bias=bias.clone())
    assert compare_checkpoints(one, same) == []
    other = checkpoint(tmp_path / "c" / "iter_0000004", weight=torch.tensor([1.0, float("nan"), -0.0]), bias=bias)
    assert compare_checkpoints(one, other) == ["weight in iter_0000004: its bits differ from the baseline run's"]


def test_another_step_and_a_missing_tensor_are_differences(tmp_path: Path) -> None:
    """As is a checkpoint that cannot be read."""
    one = checkpoint(tmp_path / "iter_0000004", weight=torch.ones(2))
    other = checkpoint(tmp_path / "iter_0000005", bias=torch.ones(2))
    first, *rest = compare_checkpoints(one, other)
    assert first == "the newest checkpoint is iter_0000004, the baseline run's iter_0000005" and len(rest) == 2
    (line,) = compare_checkpoints(one, tmp_path / "iter_0000006")
    assert "cannot be compared" in line


def test_flipped_bits_are_other_bits(tmp_path: Path) -> None:
    """The file keeps its size; twice is once back."""
    path = tmp_path / "file"
    before = bytes(range(256)) * 4
    path.write_bytes(before)
    flip_bits(path)
    after = path.read_bytes()
    assert after != before and len(after) == len(before)
    flip_bits(path)
    assert path.read_bytes() == before
