"""The store of shared directories, as a rank that resumes uses it (that of nodes with their own: test_pieces.py)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.unit.checkpoint.cluster import Rank, Threads
from tests.unit.checkpoint.damage import truncate
from ttp.checkpoint.format.manifest import Manifest
from ttp.checkpoint.reader import Reader
from ttp.checkpoint.store import Request, SharedStore
from ttp.errors import CheckpointMismatch, CorruptCheckpoint

if TYPE_CHECKING:
    from tests.unit.checkpoint.conftest import Job


def opened(job: Job, folder: Path, **fields: Any) -> Reader | None:
    store = SharedStore()
    paths = [str(path) for path in store.list_published([folder])]
    request = Request([str(folder)], [str(folder)], job.shapes(), job.held, **fields)
    return store.open_newest(paths, Rank(0, Threads(1)), request)


def test_the_newest_valid_checkpoint_is_opened_and_the_others_are_reported(job: Job, tmp_path: Path) -> None:
    skipped: list[str] = []
    assert opened(job, tmp_path) is None
    older = job.save(tmp_path, 41)
    truncate(job.later().save(tmp_path, 42))
    found = opened(job, tmp_path, on_skip=lambda path, reason: skipped.append(reason))
    assert found is not None and found.path == older and len(found.skipped) == 1
    assert len(skipped) == 1 and "is truncated" in skipped[0]
    blank = type(job)({key: torch.full_like(t, 77) for key, t in job.tensors.items()})
    found.read_into(blank.held())
    job.assert_equal(blank.tensors)


def test_a_checkpoint_that_the_job_cannot_use_is_passed_over(job: Job, tmp_path: Path) -> None:
    def check(manifest: Manifest) -> None:
        if manifest.step == 42:
            raise CorruptCheckpoint("state.trainer.samples: got -1")

    older, _ = job.save(tmp_path, 41), job.save(tmp_path, 42)
    found = opened(job, tmp_path, check=check)
    assert found is not None and found.path == older and "samples: got -1" in found.skipped[0]


def test_another_models_checkpoint_is_refused_and_not_passed_over(job: Job, tmp_path: Path) -> None:
    job.save(tmp_path, 41)
    type(job)({"model.other": torch.ones(3)}).save(tmp_path, 42)
    with pytest.raises(CheckpointMismatch, match=r"iter_0000042 has no tensor 'model\.embed'"):
        opened(job, tmp_path)
