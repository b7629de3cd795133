"""What was held is what comes back: at any number of holders, from any thread, bit for bit."""

from __future__ import annotations

import enum
import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch.distributed.checkpoint.planner import LoadPlan

from ttp.checkpoint import write
from ttp.checkpoint.format import dcp, keys, tiling
from ttp.checkpoint.format.file_index import read_contents
from ttp.checkpoint.format.manifest import read_manifest
from ttp.checkpoint.format.types import HeldTensor
from ttp.checkpoint.reader import check_tensors, read_into
from ttp.checkpoint.write import write_share
from ttp.errors import CheckpointError, CheckpointMismatch, CorruptCheckpoint, NotWritable
from ttp.proto.messages import ShareResult

if TYPE_CHECKING:
    from tests.unit.checkpoint.conftest import Job


@pytest.mark.parametrize("writers", [1, 2, 3, 5])
def test_written_by_any_number_is_read_by_any_number(job: Job, tmp_path: Path, writers: int) -> None:
    """Other cuts when writing and when reading; every dtype; scalars and empty tensors."""
    path = job.save(tmp_path, 42, writers)
    for readers in (1, 2, 3, 5):
        job.assert_equal(job.read(path, readers))


def test_big_boxes_and_shares_are_cut(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes beyond the limit become slabs, shares beyond the limit several files; nothing changes for the reader."""
    monkeypatch.setattr(write, "BOX_BYTES", 64)
    monkeypatch.setattr(write, "FILE_BYTES", 200)
    path = job.save(tmp_path, 42, 2)
    assert len(list(path.glob("__0_*.distcp"))) > 3
    for chunk in (
        c for d in dcp.read_metadata(path, None).state_dict_metadata.values() for c in getattr(d, "chunks", [])
    ):
        assert torch.Size(chunk.sizes).numel() <= 64
    job.assert_equal(job.read(path, 3))


def test_every_stored_box_is_read_once(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run overlaps a stored box in several boxes of its own; its bytes are loaded one time, and no others."""
    path = job.save(tmp_path, 42, 3)
    plans: list[LoadPlan] = []
    original = dcp.RunLoadPlanner.create_local_plan

    def noted(planner: dcp.RunLoadPlanner) -> LoadPlan:
        plans.append(original(planner))
        return plans[-1]

    monkeypatch.setattr(dcp.RunLoadPlanner, "create_local_plan", noted)
    job.read(path, 1)
    stored = [(item.storage_index.fqn, item.storage_index.offset) for item in plans[0].items]
    assert len(stored) == len(set(stored))
    one = job.held()[0]
    read_into(path, [HeldTensor(one.key, one.shape, 0, torch.zeros(2))])
    assert [item.storage_index.fqn for item in plans[1].items] == [one.key]


def test_replicas_share_the_writing_and_any_of_them_may_write_a_part(job: Job, tmp_path: Path) -> None:
    """Two replicas cut alike, so part 0 of one and part 1 of the other are the whole."""
    replicas = [job.shares(2), [list(part) for part in job.shares(2)]]
    results = [
        write_share(tmp_path, "iter_0000042_tmp_a", 0, replicas[0][0], {}),
        write_share(tmp_path, "iter_0000042_tmp_a", 5, replicas[1][1], {}),
    ]
    path = job.publish(tmp_path, "iter_0000042_tmp_a", results, 42)
    job.assert_equal(job.read(path))
    assert {file.rank for file in read_manifest(path).files} == {0, 5}


def test_one_rank_may_be_given_more_parts_later(job: Job, tmp_path: Path) -> None:
    """A writer died: another one writes its part too, in files of its own, even under the same suffix."""
    first, second, third = job.shares(3)
    results = [write_share(tmp_path, "iter_0000042_tmp_a", 0, part, {}) for part in (first, second, third)]
    assert len({file.name for result in results for file in result.files}) == 3
    job.assert_equal(job.read(job.publish(tmp_path, "iter_0000042_tmp_a", results, 42)))


def test_writes_from_a_side_thread_without_a_process_group_and_changes_nothing(job: Job, tmp_path: Path) -> None:
    """As at a fault: another thread writes while the main thread waits; the tensors keep their bits and versions."""
    assert not torch.distributed.is_initialized()
    before = {key: (t.clone(), t._version) for key, t in job.tensors.items()}
    results: list[ShareResult] = []
    thread = threading.Thread(target=lambda: results.extend(job.write(tmp_path, "iter_0000042_tmp_a", 2)))
    thread.start()
    thread.join()
    job.assert_equal(job.read(job.publish(tmp_path, "iter_0000042_tmp_a", results, 42)))
    for key, (values, version) in before.items():
        assert torch.equal(job.tensors[key], values)
        assert job.tensors[key]._version == version


def test_parameters_that_require_grad_are_held_and_filled(job: Job, tmp_path: Path) -> None:
    """A master weight may be a leaf of the graph."""
    leaves = type(job)({"model.w": torch.nn.Parameter(torch.arange(6.0).view(2, 3))})
    held = [HeldTensor("model.w", (2, 3), 0, leaves.tensors["model.w"].view(-1))]
    results = [write_share(tmp_path, "iter_0000001_tmp_a", 0, held, {})]
    path = leaves.publish(tmp_path, "iter_0000001_tmp_a", results, 1)
    other = torch.nn.Parameter(torch.zeros(2, 3))
    read_into(path, [HeldTensor("model.w", (2, 3), 0, other.view(-1))])
    assert torch.equal(other, leaves.tensors["model.w"])


def test_dtype_is_converted_where_it_differs(job: Job, tmp_path: Path) -> None:
    """FP32 masters fill BF16 memory."""
    path = job.save(tmp_path, 42)
    half = torch.zeros(13 * 6, dtype=torch.bfloat16)
    read_into(path, [HeldTensor("model.embed", (13, 6), 0, half)])
    assert torch.equal(half, job.tensors["model.embed"].reshape(-1).to(torch.bfloat16))


def test_two_runs_of_one_tensor_are_filled(job: Job, tmp_path: Path) -> None:
    """A rank may hold several pieces of a parameter, overlapping ones too."""
    path = job.save(tmp_path, 42, 5)
    flat = job.tensors["model.embed"].reshape(-1)
    runs = [(3, 20), (15, 16), (50, 78)]
    targets = [HeldTensor("model.embed", (13, 6), a, torch.zeros(b - a)) for a, b in runs]
    read_into(path, targets)
    for (a, b), target in zip(runs, targets, strict=True):
        assert torch.equal(target.values, flat[a:b])


def test_another_model_is_named_by_its_first_difference(job: Job, tmp_path: Path) -> None:
    """Missing key, other shape, and a key too many, each with what was got and expected; nothing is changed."""
    path = job.save(tmp_path, 42)
    values = torch.full((78,), 5.0)
    with pytest.raises(CheckpointMismatch, match=r"no tensor 'model\.other' \(expected, of shape \(78,\)\)"):
        read_into(path, [HeldTensor("model.other", (78,), 0, values)])
    with pytest.raises(CheckpointMismatch, match=r"'model\.embed' has shape \(13, 6\), expected \(6, 13\)"):
        read_into(path, [HeldTensor("model.embed", (6, 13), 0, values)])
    assert torch.equal(values, torch.full((78,), 5.0))
    check_tensors(path, read_manifest(path).tensors, job.shapes())
    with pytest.raises(CheckpointMismatch, match=r"a tensor 'model\.norm' of shape \(1, 1, 9\) that this job has not"):
        check_tensors(path, read_manifest(path).tensors, {k: s for k, s in job.shapes().items() if k != "model.norm"})
    with pytest.raises(CheckpointMismatch, match=r"no tensor 'model\.deeper'"):
        check_tensors(path, read_manifest(path).tensors, job.shapes() | {"model.deeper": (1,)})


def test_equal_hyperparameters_share_their_bytes(tmp_path: Path) -> None:
    """A thousand parameters' blobs cost as much as one group's."""
    fqns = [f"layers.{i}.w" for i in range(1000)]
    blobs = keys.param_group_blobs([{"lr": 1e-3, "betas": [0.9, 0.95], "fused": True, "params": fqns}])
    result = write_share(tmp_path, "iter_0000001_tmp_a", 0, [], blobs)
    entries = read_contents(tmp_path / "iter_0000001_tmp_a", [result]).blobs
    assert {entry.key for entry in entries} == blobs.keys() and len(blobs) == 3004
    assert len({entry.position for entry in entries}) == 4
    assert blobs["optim.param_groups.layers.7.w.betas"] == (0.9, 0.95)


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1, {"f": print}], r"blob 'optim.x'\[1\].f is a builtin_function_or_method: expected a plain value"),
        ({"colour": [Colour.RED]}, r"invalid blob: got a Colour, expected a plain value"),
    ],
)
def test_a_blob_that_would_run_code_is_refused(tmp_path: Path, value: object, text: str) -> None:
    """Only plain values load under weights_only: a subclass of one would name its class."""
    with pytest.raises(CheckpointError, match=text):
        write_share(tmp_path, "iter_0000001_tmp_a", 0, [], {"optim.x": value})


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """The kernel refuses every write beyond this size, as a full disk does (EFBIG for ENOSPC)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit", [0, 1000, 300_000, 4_000_000])
def test_a_write_the_disk_refuses_says_so_and_gives_the_space_back(tmp_path: Path, limit: int) -> None:
    """At the first byte, in an archive's head, in small and in big blocks: the system's own words, and no file stays."""
    held = [
        HeldTensor("model.small", (50_000,), 0, torch.zeros(50_000)),
        HeldTensor("model.big", (2_000_000,), 0, torch.zeros(2_000_000)),
    ]
    (tmp_path / "iter_0000042_tmp_a").mkdir()
    (tmp_path / "iter_0000042_tmp_a" / "__7_0_0.distcp").write_bytes(b"another writer's")
    with (
        file_size_limit(limit),
        pytest.raises(NotWritable, match=r"rank 3 cannot write into .*tmp_a: .*iB are free") as caught,
    ):
        write_share(tmp_path, "iter_0000042_tmp_a", 3, held, {})
    assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == errno.EFBIG
    assert [p.name for p in (tmp_path / "iter_0000042_tmp_a").iterdir()] == ["__7_0_0.distcp"]


@pytest.mark.parametrize("every", [1, 4_000_000, 1 << 30])
def test_an_error_of_the_disk_during_the_writing_counts_even_if_the_last_fsync_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """The system names each error once. The first of many early syncs fails, the only one, and that at the end of a file."""
    synced: list[int] = []

    def fail_once(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 1:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(write, "SYNC_BYTES", every)
    monkeypatch.setattr(os, "fdatasync", fail_once)
    with pytest.raises(NotWritable, match=r"rank 3 cannot write into .*tmp_a: Input/output error"):
        write_share(
            tmp_path, "iter_0000042_tmp_a", 3, [HeldTensor("model.w", (2_000_000,), 0, torch.zeros(2_000_000))], {}
        )
    assert synced and list((tmp_path / "iter_0000042_tmp_a").iterdir()) == []


@pytest.mark.parametrize("refused", [None, 0, 2])
def test_every_file_of_a_share_is_durable_on_return_or_none_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int | None
) -> None:
    """A file's fsync comes when the next file is written; its refusal counts all the same."""
    story: list[str] = []

    def synced(descriptor: int, original: Callable[[int], None] = os.fsync) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        story.append(name)
        if name == f"__3_0_{refused}.distcp":
            raise OSError(errno.EIO, "Input/output error")
        original(descriptor)

    monkeypatch.setattr(write, "FILE_BYTES", 4000)
    monkeypatch.setattr(os, "fsync", synced)
    held = [HeldTensor(f"model.{name}", (1000,), 0, torch.zeros(1000)) for name in "abc"]
    every = [f"__3_0_{number}.distcp" for number in range(3)]
    if refused is None:
        assert [file.name for file in write_share(tmp_path, "iter_0000042_tmp_a", 3, held, {}).files] == every
        assert story == [*every, "iter_0000042_tmp_a"]
    else:
        with pytest.raises(NotWritable, match="Input/output error"):
            write_share(tmp_path, "iter_0000042_tmp_a", 3, held, {})
        assert list((tmp_path / "iter_0000042_tmp_a").iterdir()) == []


def test_truncation_after_verification_is_found_by_the_reader(job: Job, tmp_path: Path) -> None:
    """The bytes went away between check and read."""
    path = job.save(tmp_path, 42, 1)
    file = path / "__0_0_0.distcp"
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(CorruptCheckpoint, match="cannot be read"):
        job.read(path)
    file.unlink()
    with pytest.raises(CorruptCheckpoint, match=r"__0_0_0\.distcp is missing"):
        job.read(path)


@pytest.mark.parametrize("tmp_name", ["iter_0000042", "../x_tmp_a", ""])
def test_a_share_is_never_written_into_a_published_directory(job: Job, tmp_path: Path, tmp_name: str) -> None:
    """Only names of staging directories are taken."""
    with pytest.raises(CheckpointError, match="invalid name of a staging directory"):
        write_share(tmp_path, tmp_name, 0, job.held(), {})
    assert list(tmp_path.iterdir()) == []


def test_a_wider_stride_of_one_element_is_written(tmp_path: Path) -> None:
    """torch calls it contiguous; its bytes are not where a view of bytes would look."""
    one = torch.arange(12.0).view(3, 4)[:1, 1]
    held = HeldTensor("model.w", (1,), 0, one)
    result = write_share(tmp_path, "iter_0000001_tmp_a", 0, [held], {})
    (entry,) = read_contents(tmp_path / "iter_0000001_tmp_a", [result]).tensors
    assert tiling.nbytes_of([held]) == 4 and entry.sizes == (1,)
