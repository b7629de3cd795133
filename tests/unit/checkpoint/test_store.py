"""The store of shared directories, as a rank that resumes uses it (that of nodes with their own: test_pieces.py)."""

from __future__ import annotations

import pickle
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.unit.checkpoint.cluster import Cluster, Rank, Threads
from tests.unit.checkpoint.damage import flip_a_bit, truncate
from ttp.checkpoint import verify
from ttp.checkpoint.find import list_checkpoints
from ttp.checkpoint.format import checksum, dcp
from ttp.checkpoint.format.manifest import Manifest, read_manifest, to_bytes
from ttp.checkpoint.format.types import HeldTensor
from ttp.checkpoint.reader import Reader
from ttp.checkpoint.store import Request, SharedStore
from ttp.errors import CheckpointMismatch, CorruptCheckpoint
from ttp.proto.messages import FileEntry

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


@dataclass
class Looked:
    """What each of several ranks found and hashed."""

    found: list[Reader | None]
    hashed: list[list[str]]


def opened_by_ranks(
    job: Job, folder: Path, shares: Sequence[list[HeldTensor]], monkeypatch: pytest.MonkeyPatch
) -> Looked:
    """Have each rank, a thread, look for what it would read its share from."""
    threads, current = Threads(len(shares)), threading.local()
    looked = Looked([None] * len(shares), [[] for _ in shares])

    def noted(path: Path, entry: FileEntry, advance: Any = None) -> None:
        looked.hashed[current.rank].append(entry.name)
        checksum.check_file(path, entry, advance)

    def run(rank: int) -> None:
        current.rank = rank
        request = Request([str(folder)], [str(folder)], job.shapes(), lambda: shares[rank])
        looked.found[rank] = SharedStore().open_newest(
            [str(p) for p in list_checkpoints([folder])], Rank(rank, threads), request
        )

    monkeypatch.setattr(verify, "check_file", noted)
    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(len(shares))]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(60)
    return looked


def test_a_rank_hashes_the_files_that_it_reads_and_all_share_the_others(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a node fetches them once; what no rank reads (plain values, torch's index) is verified as well."""
    path = job.save(tmp_path, 42, holders=3, blobs={"optim.param_groups.0.lr": 0.5})
    first, second, _ = job.shares(3)
    looked = opened_by_ranks(job, tmp_path, [first, second, second], monkeypatch)
    assert [found is not None and found.path for found in looked.found] == [path] * 3
    assert "__0_0_0.distcp" in looked.hashed[0] and looked.hashed[1].count("__1_0_0.distcp") == 1 == looked.hashed[
        2
    ].count("__1_0_0.distcp")
    every = [name for names in looked.hashed for name in names]
    assert sorted(every) == sorted([*(file.name for file in read_manifest(path).files), "__1_0_0.distcp"])
    blank = type(job)({key: torch.full_like(t, 77) for key, t in job.tensors.items()})
    for found, share in zip(looked.found, blank.shares(3), strict=True):
        assert found is not None
        found.read_into(share)
    job.assert_equal(blank.tensors)


@pytest.mark.parametrize(
    "name", ["__0_0_0.distcp", "__1_0_0.distcp", "__2_0_0.distcp", "__0_blobs_0.distcp", ".metadata"]
)
def test_all_ranks_pass_over_what_one_of_them_finds_altered(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In a file that one rank reads, or none; the job's memory is as it was."""
    older = job.save(tmp_path, 41, holders=3, blobs={"optim.param_groups.0.lr": 0.5})
    flip_a_bit(job.later().save(tmp_path, 42, holders=3, blobs={"optim.param_groups.0.lr": 0.5}), name)
    blank = type(job)({key: torch.full_like(t, 77) for key, t in job.tensors.items()})
    first, second, _ = blank.shares(3)
    looked = opened_by_ranks(job, tmp_path, [first, second], monkeypatch)
    assert [found is not None and found.path for found in looked.found] == [older] * 2
    assert all(bool((tensor == torch.full_like(tensor, 77)).all()) for tensor in blank.tensors.values())


def test_parts_of_nodes_that_were_copied_together_are_opened(job: Job, tmp_path: Path) -> None:
    """They have no index of torch's that says who reads what: the ranks share all files."""
    Cluster(tmp_path).save(job, 3)
    for file in (tmp_path / "b" / "iter_0000003").glob("*.distcp"):
        shutil.copy(file, tmp_path / "a" / "iter_0000003")
    found = opened(job, tmp_path / "a")
    assert found is not None
    blank = type(job)({key: torch.full_like(t, 77) for key, t in job.tensors.items()})
    found.read_into(blank.held())
    job.assert_equal(blank.tensors)


def test_all_ranks_pass_over_one_whose_index_contradicts_itself(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A faulty writer's, with checksums that are right: only the first rank looks whether it is complete, and the others plan their reads."""
    older = job.save(tmp_path, 41, holders=3)
    newer = job.later().save(tmp_path, 42, holders=3)
    manifest = read_manifest(newer)
    index = dcp.read_metadata(newer, None)
    index.storage_data.clear()
    (newer / dcp.METADATA_NAME).write_bytes(pickle.dumps(index))
    nbytes, text = (
        (newer / dcp.METADATA_NAME).stat().st_size,
        checksum.of_file(newer / dcp.METADATA_NAME, checksum.Checksum()),
    )
    files = [
        replace(file, nbytes=nbytes, checksum=text) if file.name == dcp.METADATA_NAME else file
        for file in manifest.files
    ]
    (newer / "manifest.json").write_bytes(to_bytes(replace(manifest, files=tuple(files))))
    first, second, _ = job.shares(3)
    looked = opened_by_ranks(job, tmp_path, [first, second], monkeypatch)
    assert [found is not None and found.path for found in looked.found] == [older] * 2
