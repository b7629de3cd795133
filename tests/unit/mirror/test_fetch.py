"""The newest whole checkpoint of a mirror comes into a directory, or none does."""

from __future__ import annotations

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.s3 import BUCKET, S3
from tests.unit.checkpoint.cluster import Cluster
from tests.unit.checkpoint.conftest import Job
from tests.unit.checkpoint.signing import make_keys
from tests.unit.mirror.test_upload import copy_all, uploader
from tests.waiting import LONG_S
from ttp.checkpoint.find import list_checkpoints
from ttp.checkpoint.format.durable import read_tracker
from ttp.checkpoint.format.manifest import MANIFEST_NAME, read_manifest
from ttp.checkpoint.format.signature import VerifyKey
from ttp.checkpoint.verify import Progress, verify
from ttp.errors import CorruptCheckpoint
from ttp.mirror import fetch
from ttp.mirror.fetch import fetch_newest
from ttp.mirror.remote import Remote, RemoteError


class Fetcher:
    def __init__(self, url: str) -> None:
        self.url = url
        self.skipped: list[str] = []

    def __call__(
        self, into: Path, above: int = 0, below: int | None = None, key: VerifyKey | None = None
    ) -> Path | None:
        def skip(url: str, reason: str) -> None:
            self.skipped.append(f"{url}: {reason}")

        return fetch_newest(Remote(self.url, tries=2), into, above=above, below=below, key=key, on_skip=skip)


def mirrored(url: str, folder: Path, job: Job, *steps: int) -> None:
    for step in steps:
        job.save(folder, step)
    copy_all(uploader(url, folder))


def test_what_was_copied_comes_back_with_the_same_bits(url: str, tmp_path: Path, job: Job) -> None:
    mirrored(url, tmp_path / "lost", job, 3, 5)
    shutil.rmtree(tmp_path / "lost")
    new = tmp_path / "new"
    assert Fetcher(url)(new) == new / "iter_0000005"
    assert verify(new / "iter_0000005").step == 5 and read_tracker(new) == 5
    job.assert_equal(job.read(new / "iter_0000005"))
    assert Fetcher(url)(new, above=5) is None
    assert Fetcher(url)(new, below=5) == new / "iter_0000003"
    assert sorted(path.name for path in new.glob("iter_*")) == ["iter_0000003", "iter_0000005"]


def _alter(store: Remote, name: str) -> None:
    content = bytearray(store.read(name) or b"")
    content[100] ^= 1
    store.remove(name)
    store.put_new(name, bytes(content))


@pytest.mark.parametrize("url", [pytest.param("s3", marks=pytest.mark.long), "file"], indirect=True)
def test_a_broken_object_is_noticed_and_the_next_older_checkpoint_taken(url: str, tmp_path: Path, job: Job) -> None:
    """A flipped bit, an object of another size, one that is gone, a missing and an altered manifest."""
    mirrored(url, tmp_path / "lost", job, 2, 3, 4, 5, 6, 7)
    name = next((tmp_path / "lost" / "iter_0000007").glob("*.distcp")).name
    store = Remote(url)
    _alter(store, f"iter_0000007/{name}")
    store.remove(f"iter_0000006/{name}")
    store.remove(f"iter_0000005/{name}")
    store.put_new(f"iter_0000005/{name}", b"cut off")
    store.remove(f"iter_0000004/{MANIFEST_NAME}")
    _alter(store, f"iter_0000003/{MANIFEST_NAME}")
    fetcher, new = Fetcher(url), tmp_path / "new"
    assert fetcher(new) == new / "iter_0000002"
    assert [path.name for path in new.glob("iter_*")] == ["iter_0000002"], "nothing is left of the others"
    reasons = ("was altered since rank", "has no bytes", "has 7 bytes", "iter_0000003/manifest.json")
    assert len(fetcher.skipped) == 4
    assert all(reason in text for reason, text in zip(reasons, fetcher.skipped, strict=True)), fetcher.skipped


def test_a_broken_checkpoint_of_the_directory_is_renamed_and_not_replaced(url: str, tmp_path: Path, job: Job) -> None:
    mirrored(url, tmp_path, job, 3)
    next((tmp_path / "iter_0000003").glob("*.distcp")).unlink()
    assert Fetcher(url)(tmp_path) == tmp_path / "iter_0000003" and verify(tmp_path / "iter_0000003").step == 3
    assert (tmp_path / "iter_0000003_broken_1").is_dir()


def test_nothing_more_is_read_after_the_first_failure(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file is broken: of the others those are at their first chunk that are read beside it."""
    url = f"file://{tmp_path}/mirror"
    big = Job({f"model.t{i}": torch.randn(100) for i in range(64)})
    copy_all(uploader(url, big.save(tmp_path / "lost", 3, holders=40).parent))
    store = Remote(url)
    found = fetch.find(store, 3)
    assert found is not None
    broken = f"iter_0000003/{found.manifest.files[-1].name}"
    found = replace(
        found, manifest=replace(found.manifest, files=found.manifest.files[-1:] + found.manifest.files[:-1])
    )
    _alter(store, broken)
    ended, others = threading.Event(), list[str]()
    read_range, shutdown = Remote.read_range, ThreadPoolExecutor.shutdown

    def wait_for_the_end(self: Remote, name: str, start: int, end: int) -> bytes:
        if name != broken:
            others.append(name)
            assert ended.wait(LONG_S)
        return read_range(self, name, start, end)

    def end(self: ThreadPoolExecutor, wait: bool = True, *, cancel_futures: bool = False) -> None:
        shutdown(self, False, cancel_futures=cancel_futures)
        ended.set()
        shutdown(self, wait)

    monkeypatch.setattr("ttp.mirror.remote.CHUNK_BYTES", 150)
    monkeypatch.setattr(Remote, "read_range", wait_for_the_end)
    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", end)
    with pytest.raises(CorruptCheckpoint, match="was altered"):
        fetch.check_sums(store, found)
    assert len(others) == len(set(others)) <= 8


def test_what_is_not_on_disk_as_it_arrived_is_not_published(
    url: str, tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirrored(url, tmp_path / "lost", job, 3)
    fetch_files = fetch._fetch_files

    def lose_the_end(store: Remote, found: fetch.Found, work: Path, progress: Progress) -> None:
        fetch_files(store, found, work, progress)
        os.truncate(work / found.manifest.files[0].name, 9)

    monkeypatch.setattr(fetch, "_fetch_files", lose_the_end)
    fetcher = Fetcher(url)
    assert fetcher(tmp_path / "new") is None and len(fetcher.skipped) == 1
    assert not list((tmp_path / "new").iterdir())


def test_without_room_nothing_is_fetched(url: str, tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    mirrored(url, tmp_path / "lost", job, 3)
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 9))
    with pytest.raises(OSError, match="No space left"):
        Fetcher(url)(tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())


def test_a_fetch_that_is_cut_off_leaves_nothing_and_a_cut_answer_is_asked_for_again(
    s3: S3, s3_url: str, tmp_path: Path, job: Job
) -> None:
    big = Job({**job.tensors, "model.big": torch.randn(1 << 20)})
    mirrored(s3_url, tmp_path / "lost", big, 3)
    s3.proxy.answer_cuts = 1
    assert Fetcher(s3_url)(tmp_path / "new") == tmp_path / "new" / "iter_0000003" and s3.proxy.answer_cuts == 0
    s3.proxy.answer_cuts = 100
    with pytest.raises(RemoteError):
        Fetcher(s3_url)(tmp_path / "again")
    assert not list((tmp_path / "again").iterdir())


def test_only_what_is_signed_is_fetched_where_a_key_is_given(url: str, tmp_path: Path, job: Job) -> None:
    keys = make_keys(tmp_path)
    folder = tmp_path / "lost"
    job.publish(folder, "iter_0000003_tmp_a", _signed_shares(job, folder), 3, keys=keys)
    mirrored(url, folder, job, 5)
    fetcher, new = Fetcher(url), tmp_path / "new"
    assert fetcher(new, key=keys.verify) == new / "iter_0000003" and "is not signed" in fetcher.skipped[0]
    assert verify(new / "iter_0000003", key=keys.verify).step == 3


def _signed_shares(job: Job, folder: Path) -> list:  # type: ignore[type-arg]
    from ttp.checkpoint.write import write_share

    return [
        write_share(folder, "iter_0000003_tmp_a", rank, share, {}, digests=True)
        for rank, share in enumerate(job.shares(3))
    ]


def test_a_checkpoint_of_nodes_with_their_own_directories_is_fetched_by_one_and_shared(
    url: str, tmp_path: Path, job: Job
) -> None:
    cluster = Cluster(tmp_path)
    cluster.save(job, 7)
    for host in "ba":
        copy_all(uploader(url, tmp_path / host, host=host))
    shutil.rmtree(tmp_path / "a")
    shutil.rmtree(tmp_path / "b")
    path = Fetcher(url)(tmp_path / "a")
    assert path == tmp_path / "a" / "iter_0000007" and len(read_manifest(path).files) + 1 == len(list(path.iterdir()))
    found = cluster.gather(job)
    assert cluster.said and all(each is not None and each.manifest.step == 7 for each in found)
    job.assert_equal(cluster.read(job, found))
    assert list_checkpoints([tmp_path / "b"]) and BUCKET


def test_what_a_node_has_of_a_checkpoint_that_is_fetched_is_superseded_and_not_broken(tmp_path: Path, job: Job) -> None:
    url = f"file://{tmp_path}/mirror"
    Cluster(tmp_path).save(job, 7)
    for host in "ba":
        copy_all(uploader(url, tmp_path / host, host=host))
    shutil.rmtree(tmp_path / "b")
    assert Fetcher(url)(tmp_path / "a") == tmp_path / "a" / "iter_0000007"
    assert sorted(path.name for path in (tmp_path / "a").glob("iter_*")) == [
        "iter_0000007",
        "iter_0000007_superseded_1",
    ]
