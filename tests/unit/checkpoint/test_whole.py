"""`ttp.open_checkpoint`: one process reads whole parameters, whoever wrote them and wherever they were cut."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import ttp
from tests.unit.checkpoint.cluster import Cluster
from ttp.errors import CheckpointError, CheckpointMismatch, CorruptCheckpoint

if TYPE_CHECKING:
    from tests.unit.checkpoint.conftest import Job


@pytest.fixture
def trained(job: Job) -> Job:
    """Return a job whose tensors are a model's parameters and a moment of each."""
    model = {f"model.{name}": tensor for name, tensor in job.tensors.items() if tensor.is_floating_point()}
    moments = {f"optim.state.{name}.exp_avg": tensor + 1 for name, tensor in job.tensors.items()}
    return type(job)({**model, **moments})


def test_the_newest_valid_checkpoint_gives_its_parameters_whole(trained: Job, tmp_path: Path) -> None:
    """Only the model's, by their own names, in float32; with step, layout and state beside them."""
    trained.save(tmp_path, 3, holders=1)
    trained.later().save(tmp_path, 8, holders=4)
    found = ttp.open_checkpoint(tmp_path)
    assert (found.step, found.layout, found.state, found.skipped) == (8, {"dp": 4}, {"samples": 64}, ())
    weights = found.weights()
    expected = {key.removeprefix("model."): t for key, t in trained.later().tensors.items() if key.startswith("model.")}
    assert weights.keys() == expected.keys() == found.shapes.keys()
    for name, tensor in expected.items():
        assert weights[name].dtype == torch.float32 and torch.equal(weights[name], tensor.float())
    (name, *_) = expected
    assert found.weights([name]).keys() == {name}
    with pytest.raises(CheckpointMismatch, match=r"has no parameter 'other'; it has "):
        found.weights(["other"])


def test_a_broken_newer_one_is_skipped_and_named_and_refused_when_it_is_meant(trained: Job, tmp_path: Path) -> None:
    """A directory of them means the newest that is whole; a path means that one."""
    older = trained.save(tmp_path, 3)
    newer = trained.later().save(tmp_path, 8)
    file = next(newer.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    found = ttp.open_checkpoint(tmp_path)
    assert found.path == str(older) and len(found.skipped) == 1 and str(newer) in found.skipped[0]
    assert ttp.open_checkpoint(older).step == 3
    with pytest.raises(CorruptCheckpoint, match="truncated"):
        ttp.open_checkpoint(newer)


def test_where_there_is_none_it_says_so(trained: Job, tmp_path: Path) -> None:
    """No directory, an empty one."""
    with pytest.raises(CheckpointError, match="is not a directory: expected a checkpoint"):
        ttp.open_checkpoint(tmp_path / "missing")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*: expected directories like iter_0000042"):
        ttp.open_checkpoint(tmp_path)


def test_a_nodes_piece_is_refused_until_those_of_the_others_are_beside_it(trained: Job, tmp_path: Path) -> None:
    """The message says what to copy; then all parameters are there, bit for bit."""
    Cluster(tmp_path).save(trained, 3)
    with pytest.raises(CorruptCheckpoint, match=r"part of a checkpoint of 2 nodes: .* copy the"):
        ttp.open_checkpoint(tmp_path / "a")
    for file in (tmp_path / "b" / "iter_0000003").glob("*.distcp"):
        shutil.copy(file, tmp_path / "a" / "iter_0000003")
    found = ttp.open_checkpoint(tmp_path / "a")
    weights = found.weights()
    expected = {key.removeprefix("model."): t for key, t in trained.tensors.items() if key.startswith("model.")}
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor.float()) for name, tensor in expected.items())
