"""Every kind of damage is named, the damaged checkpoint skipped, and the older one used."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from tests.unit.checkpoint.damage import (
    DATA,
    alter,
    become_a_file,
    flip_a_bit,
    flip_a_byte_of_metadata,
    lengthen,
    of_version,
    remove,
    truncate,
)
from ttp.checkpoint import find
from ttp.checkpoint.format import dcp, durable, manifest
from ttp.checkpoint.format.manifest import read_manifest
from ttp.checkpoint.verify import share_of_files, verify
from ttp.errors import CheckpointError, CorruptCheckpoint
from ttp.proto.messages import FileEntry

if TYPE_CHECKING:
    from tests.unit.checkpoint.conftest import Job

alter_metadata = alter(".metadata", b"__1_0_0", b"__0_0_0")

DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, rf"{DATA} is truncated: it has \d+ bytes, expected \d+; rank 1 wrote it"),
    "lengthened": (lengthen, rf"{DATA} is longer than written"),
    "flipped bit": (flip_a_bit, rf"{DATA} was altered since rank 1 wrote it: checksum xxh3_128:\w+, expected xxh3_128:\w+"),
    "no data": (remove(DATA), rf"{DATA} is missing; rank 1 wrote it"),
    "no index": (remove(".metadata"), r"\.metadata is missing"),
    "altered index": (alter_metadata, r"\.metadata was altered since rank \d+ wrote it"),
    "flipped byte of index": (flip_a_byte_of_metadata, r"\.metadata was altered since rank \d wrote it"),
    "no manifest": (remove("manifest.json"), r"manifest\.json is missing: .* was never published, or was damaged"),
    "cut manifest": (lambda path: os.truncate(path / "manifest.json", 300), r"manifest\.json is not JSON .*: it is truncated or altered"),
    "altered manifest": (alter("manifest.json", b'"samples": 336', b'"samples": 337'), r"manifest\.json was altered: got content of sha256 \w+, expected '\w+'"),
    "empty manifest": (lambda path: (path / "manifest.json").write_text("[]"), r"manifest\.json: content: got a list, expected a JSON object"),
    "future manifest": (of_version(3), r"manifest\.json: format_version: got 3, expected 1 or 2"),
    "another step's name": (lambda path: path.rename(path.with_name("iter_0000043")), r"is named for step 43, its manifest says step 42"),
    "a file": (become_a_file, r"is not a directory"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_named_skipped_and_the_older_checkpoint_used(
    job: Job, tmp_path: Path, damage: Callable[[Path], object], reason: str
) -> None:
    """`verify` names it; the search reports it and goes on to the next older one."""
    older, path = job.later().save(tmp_path, 41), job.save(tmp_path, 42)
    damage(path)
    path = find.list_checkpoints([tmp_path])[0]
    with pytest.raises(CorruptCheckpoint, match=reason):
        verify(path)
    received: list[tuple[Path, str]] = []
    found = find.find_newest_valid([tmp_path], on_skip=lambda p, text: received.append((p, text)))
    assert found is not None and found.path == older and found.manifest.step == 41
    assert [p for p, _ in received] == [path] and len(found.skipped) == 1
    with pytest.raises(CorruptCheckpoint, match=reason):
        raise CorruptCheckpoint(received[0][1])
    job.later().assert_equal(job.read(found.path))


def test_no_valid_checkpoint_is_none(job: Job, tmp_path: Path) -> None:
    """An empty place, a missing one, and one with broken ones only."""
    assert find.find_newest_valid([tmp_path, tmp_path / "nowhere"]) is None
    truncate(job.save(tmp_path, 42))
    assert find.find_newest_valid([tmp_path]) is None


def test_the_newest_of_several_directories_is_found_whatever_the_trackers_say(job: Job, tmp_path: Path) -> None:
    """A full disk made the job change directories; a tracker that lies is not believed."""
    first, second = tmp_path / "first", tmp_path / "second"
    job.save(first, 40)
    newest = job.save(second, 42)
    job.save(first, 41)
    (first / durable.TRACKER_NAME).write_text("99")
    (second / durable.TRACKER_NAME).unlink()
    assert [p.name for p in find.list_checkpoints([first, second])] == ["iter_0000042", "iter_0000041", "iter_0000040"]
    found = find.find_newest_valid([first, second])
    assert found is not None and found.path == newest and found.skipped == ()


def test_staging_directories_and_broken_ones_are_not_checkpoints(job: Job, tmp_path: Path) -> None:
    """Only the exact name of a step counts."""
    path = job.save(tmp_path, 42)
    for name in ("iter_0000043_tmp_a", "iter_0000044_broken_1", "iter_45", "iter_00000046", "xiter_0000047"):
        shutil.copytree(path, tmp_path / name)
    assert find.list_checkpoints([tmp_path]) == [path]


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, remove(".metadata"), alter_metadata, flip_a_byte_of_metadata])
def test_ranks_that_share_the_checking_find_every_damage_together(
    job: Job, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """Each does its part of the dear work; the checkpoint is valid when all find it so."""
    path = job.save(tmp_path, 42, 3)
    manifest_of = read_manifest(path)
    parts = [share_of_files(manifest_of.files, i, 4) for i in range(4)]
    assert sorted(f.name for part in parts for f in part) == sorted(f.name for f in manifest_of.files)
    assert all(verify(path, share=(i, 4)).step == 42 for i in range(4))
    damage(path)
    verdicts = []
    for i in range(4):
        try:
            verify(path, share=(i, 4))
            verdicts.append(True)
        except CorruptCheckpoint:
            verdicts.append(False)
    assert not all(verdicts)


def test_shares_of_files_are_balanced() -> None:
    """By bytes, not by number."""
    files = [FileEntry(f"f{i}", size, "", 0) for i, size in enumerate([100, 1, 1, 1, 50, 50, 99, 98])]
    sizes = [sum(f.nbytes for f in share_of_files(files, i, 4)) for i in range(4)]
    assert sizes == [100, 100, 100, 100]


class Ballot:
    """One rank of several: its own list, and what another rank found."""

    index, count = 1, 2

    def __init__(self, paths: list[str], other_finds: dict[str, str]) -> None:
        self._paths = paths
        self._other_finds = other_finds
        self._asked = iter(paths)

    def exchange(self, value: Any) -> list[Any]:
        if isinstance(value, list):
            return [self._paths, value]
        return [self._other_finds.get(next(self._asked), ""), value]


def test_all_ranks_skip_what_one_rank_finds_broken(job: Job, tmp_path: Path) -> None:
    """This rank found nothing against step 42; it follows the vote."""
    older, path = job.save(tmp_path, 41), job.save(tmp_path, 42)
    ballot = Ballot([str(path), str(older)], {str(path): "rank 0: altered"})
    found = find.find_newest_valid([tmp_path], ranks=ballot)
    assert found is not None and found.path == older and found.skipped == (f"{path}: rank 0: altered",)


def test_progress_counts_every_byte(job: Job, tmp_path: Path) -> None:
    """For people who wait."""
    path = job.save(tmp_path, 42)
    seen: list[tuple[int, int]] = []
    nbytes = verify(path, progress=lambda done, total: seen.append((done, total))).nbytes
    assert seen[-1] == (nbytes, nbytes) and seen == sorted(seen)


class Evil:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch pwned",)


def test_metadata_never_runs_code(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`.metadata` is a pickle; one that names anything but torch's own classes is refused before it is built."""
    monkeypatch.chdir(tmp_path)
    path = job.save(tmp_path, 42)
    (path / "manifest.json").unlink()  # as torch alone writes it: without a checksum
    for content in (pickle.dumps(Evil()), pickle.dumps({"a": 1}), b"", b"\x80\x04."):
        (path / ".metadata").write_bytes(content)
        with pytest.raises(CorruptCheckpoint, match=r"\.metadata (cannot be read|is not the metadata)"):
            job.read(path)
    assert not (tmp_path / "pwned").exists()


def test_metadata_of_files_outside_the_checkpoint_is_refused(job: Job, tmp_path: Path) -> None:
    """Nothing but the checkpoint's own files is read."""
    path = job.save(tmp_path, 42)
    metadata = dcp.read_metadata(path, None)
    (path / "manifest.json").unlink()  # as torch alone writes it: without a checksum
    next(iter(metadata.storage_data.values())).relative_path = "../../etc/passwd"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpoint, match=r"is recorded in '\.\./\.\./etc/passwd', outside"):
        job.read(path)


def test_a_checkpoint_by_stock_torch_is_read(job: Job, tmp_path: Path) -> None:
    """Its metadata holds a `Path`; its boxes have no cut of ours."""
    state = {key: t for key, t in job.tensors.items() if t.numel()}
    with pytest.warns(UserWarning):
        save(dict(state), checkpoint_id=tmp_path / "stock", no_dist=True)
    small = type(job)(state)
    small.assert_equal(small.read(tmp_path / "stock", 3))


def test_an_unreadable_manifest_file_is_not_called_corrupt(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that does not answer must not get a good checkpoint renamed."""
    path = job.save(tmp_path, 42)

    def refuse(*args: object, **kwargs: object) -> bytes:
        raise OSError(5, "Input/output error", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "open_regular", refuse)
        with pytest.raises(OSError, match="Input/output error"):
            manifest.read_manifest(path)
        with pytest.raises(CheckpointError, match=r"cannot publish step 42 in .*: Input/output error"):
            job.save(tmp_path, 42, attempt="b")
    assert verify(path).step == 42 and torch.equal(job.read(path)["model.embed"], job.tensors["model.embed"])
