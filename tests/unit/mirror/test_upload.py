"""What is copied into a mirror, in which order, and what goes again."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.s3 import BUCKET, S3
from tests.unit.checkpoint.cluster import SECOND_LAUNCH, Cluster
from tests.unit.checkpoint.conftest import Job
from tests.unit.checkpoint.damage import flip_a_bit
from ttp.checkpoint.format.checksum import check_file
from ttp.checkpoint.format.durable import inodes_in
from ttp.checkpoint.format.manifest import MANIFEST_NAME, read_manifest
from ttp.errors import CorruptCheckpoint
from ttp.mirror import fetch, upload
from ttp.mirror.remote import Remote, RemoteError
from ttp.mirror.source import MirrorSource, parse, read
from ttp.mirror.upload import CLAIM_NAME, Conflict, NotYet, Uploader
from ttp.proto.messages import FileEntry


def uploader(url: str, *dirs: Path, keep: int = 0, host: str = "") -> Uploader:
    return Uploader(Remote(url, tries=2), MirrorSource(tuple(map(str, dirs)), host, keep))


def copy_all(up: Uploader) -> list[int]:
    """Copy until nothing is pending; return the steps in their order."""
    copied = []
    while pending := up.pending():
        up.copy(pending[0])
        copied.append(int(pending[0].name[5:]))
        up.remove_older()
    return copied


def whole(url: str) -> list[int]:
    """Return the steps of which all is in the mirror with the right checksums, newest first."""
    store = Remote(url)
    found = [(step, fetch.find(store, step)) for step in fetch.steps_of(store)]
    for _, each in found:
        if each is not None:
            fetch.check_sums(store, each)
    return [step for step, each in found if each is not None]


def test_all_published_checkpoints_are_copied_the_newest_first(url: str, tmp_path: Path, job: Job) -> None:
    for step in (1, 3, 2):
        job.save(tmp_path, step)
    up = uploader(url, tmp_path)
    assert up.lag().behind_steps == 3 and up.lag().behind_s >= 0 and not up.has_newest()
    assert copy_all(up) == [3, 2, 1] and whole(url) == [3, 2, 1]
    assert up.lag().behind_steps == 0 and up.lag().step == 3 and up.has_newest()
    assert up.copy(tmp_path / "iter_0000003") == 0, "what is there is not uploaded again"
    assert copy_all(uploader(url, tmp_path)) == [3, 2, 1] and whole(url) == [3, 2, 1]


def test_the_manifest_is_put_last_and_with_the_files_before_it_nothing_looks_whole(
    url: str, tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = job.save(tmp_path, 7)
    names: list[str] = []
    put, put_new = Remote.put, Remote.put_new

    def note_put(self: Remote, path: Path, name: str) -> None:
        names.append(name)
        put(self, path, name)

    def note_put_new(self: Remote, name: str, content: bytes) -> bool:
        names.append(name)
        return put_new(self, name, content)

    monkeypatch.setattr(Remote, "put", note_put)
    monkeypatch.setattr(Remote, "put_new", note_put_new)
    uploader(url, tmp_path).copy(path)
    files = {f"iter_0000007/{file.name}" for file in read_manifest(path).files}
    assert names[0].endswith(CLAIM_NAME) and names[-1].endswith(MANIFEST_NAME) and set(names[1:-1]) == files


def test_an_interrupted_copy_does_not_look_whole_and_the_next_one_uploads_the_rest_only(
    url: str, tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = job.save(tmp_path, 7)
    files, put = len(read_manifest(path).files), Remote.put
    done: list[str] = []

    def put_two(self: Remote, path: Path, name: str) -> None:
        if len(done) == 2:
            raise RemoteError("cut")
        put(self, path, name)
        done.append(name)

    with monkeypatch.context() as patch:
        patch.setattr(Remote, "put", put_two)
        with pytest.raises(RemoteError):
            uploader(url, tmp_path).copy(path)
    assert whole(url) == []

    def note_put(self: Remote, path: Path, name: str) -> None:
        put(self, path, name)
        done.append(name)

    monkeypatch.setattr(Remote, "put", note_put)
    uploader(url, tmp_path).copy(path)
    assert len(done) == len(set(done)) == files and whole(url) == [7]


def test_a_checkpoint_that_is_broken_on_disk_is_not_copied(url: str, tmp_path: Path, job: Job) -> None:
    path = job.save(tmp_path, 7)
    flip_a_bit(path, next(path.glob("*.distcp")).name)
    with pytest.raises(CorruptCheckpoint, match="was altered"):
        uploader(url, tmp_path).copy(path)
    assert whole(url) == []


@pytest.mark.parametrize("place", [0, -1])
def test_a_write_that_was_broken_on_disk_leaves_its_step_to_the_next_one(
    url: str, tmp_path: Path, job: Job, place: int
) -> None:
    """The first file is broken, or the last: nothing of that write stays."""
    path = job.save(tmp_path, 7)
    flip_a_bit(path, read_manifest(path).files[place].name)
    os.utime(path / MANIFEST_NAME, (1.0, 1.0))
    up = uploader(url, tmp_path)
    with pytest.raises(CorruptCheckpoint, match="was altered"):
        up.copy(path)
    assert Remote(url).sizes(path.name) == {} and up.has_newest()
    path.rename(tmp_path / "iter_0000007_broken_1")
    job.later().save(tmp_path, 7, attempt="b")
    assert copy_all(up) == [7] and whole(url) == [7]


def test_a_broken_write_of_which_a_try_has_failed_leaves_its_step_to_the_next_one(
    url: str, tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim is this write's, whichever try has put it."""
    path = job.save(tmp_path, 7)
    flip_a_bit(path, read_manifest(path).files[-1].name)
    up = uploader(url, tmp_path)

    def fails(*_: object, **__: object) -> None:
        raise RemoteError("the store is away")

    with monkeypatch.context() as away:
        away.setattr(up.remote, "put", fails)
        with pytest.raises((RemoteError, CorruptCheckpoint)):
            up.copy(path)
    with pytest.raises(CorruptCheckpoint, match="was altered"):
        up.copy(path)
    assert Remote(url).sizes(path.name) == {}


def test_a_write_that_is_pruned_meanwhile_leaves_its_step_to_the_next_one_unless_another_node_has_copied_it(
    url: str, tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, check = job.save(tmp_path, 7), check_file
    up, other = uploader(url, tmp_path), uploader(url, tmp_path)

    def prune(file: Path, entry: FileEntry) -> None:
        shutil.rmtree(path, ignore_errors=True)
        check(file, entry)

    def finish_first(file: Path, entry: FileEntry) -> None:
        monkeypatch.setattr(upload, "check_file", check)
        other.copy(path)
        prune(file, entry)

    monkeypatch.setattr(upload, "check_file", prune)
    with pytest.raises(FileNotFoundError):
        up.copy(path)
    assert Remote(url).sizes(path.name) == {}
    path = job.later().save(tmp_path, 7, attempt="b")
    monkeypatch.setattr(upload, "check_file", finish_first)
    with pytest.raises(FileNotFoundError):
        up.copy(path)
    assert whole(url) == [7]


def test_files_that_lie_there_without_a_claim_are_of_no_write(url: str, tmp_path: Path, job: Job) -> None:
    path = job.save(tmp_path, 7)
    file = read_manifest(path).files[0]
    Remote(url).put_new(f"{path.name}/{file.name}", b"x" * file.nbytes)
    assert copy_all(uploader(url, tmp_path)) == [7] and whole(url) == [7]


def test_a_write_that_took_the_place_of_one_that_was_broken_is_copied_also_where_that_was_just_read(
    url: str, tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, check = job.save(tmp_path, 7), check_file
    flip_a_bit(path, read_manifest(path).files[0].name)
    os.utime(path / MANIFEST_NAME, (1.0, 1.0))

    def replace(file: Path, entry: FileEntry) -> None:
        monkeypatch.setattr(upload, "check_file", check)
        try:
            check(file, entry)
        finally:
            path.rename(tmp_path / "iter_0000007_broken_1")
            job.later().save(tmp_path, 7, attempt="b")

    monkeypatch.setattr(upload, "check_file", replace)
    up = uploader(url, tmp_path)
    with pytest.raises(CorruptCheckpoint):
        up.copy(path)
    assert up.pending() == [path] and copy_all(up) == [7] and whole(url) == [7]


@pytest.mark.parametrize("complete", [True, False])
def test_another_write_of_a_step_changes_nothing_of_the_first(
    url: str, tmp_path: Path, job: Job, complete: bool
) -> None:
    first = job.save(tmp_path / "a", 7)
    other = job.later().save(tmp_path / "b", 7, created_unix_s=5.0)
    uploader(url, tmp_path / "a").copy(first)
    if not complete:
        Remote(url).remove(f"iter_0000007/{MANIFEST_NAME}")
    with pytest.raises(Conflict, match="nothing is overwritten"):
        uploader(url, tmp_path / "b").copy(other)
    uploader(url, tmp_path / "a").copy(first)
    assert (
        whole(url) == [7] and Remote(url).read(f"iter_0000007/{MANIFEST_NAME}") == (first / MANIFEST_NAME).read_bytes()
    )


def test_where_the_store_lacks_a_file_that_was_just_put_no_manifest_is_put(
    url: str, tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, put = job.save(tmp_path, 7), Remote.put
    lost = read_manifest(path).files[0].name

    def lose_one(self: Remote, local: Path, name: str) -> None:
        if local.name != lost:
            put(self, local, name)

    monkeypatch.setattr(Remote, "put", lose_one)
    with pytest.raises(CorruptCheckpoint, match="lacks files that were just uploaded"):
        uploader(url, tmp_path).copy(path)
    assert whole(url) == []


def test_two_nodes_that_copy_the_same_directory_do_no_harm(url: str, tmp_path: Path, job: Job) -> None:
    path = job.save(tmp_path, 7)
    one, other = uploader(url, tmp_path), uploader(url, tmp_path)
    one._copy_files(path, read_manifest(path), (path / MANIFEST_NAME).read_bytes(), path.name)
    assert other.copy(path) == 0 and one.copy(path) == 0 and whole(url) == [7]


def test_only_the_newest_stay_in_the_mirror_and_one_that_is_finite(url: str, tmp_path: Path, job: Job) -> None:
    for step in (1, 2):
        job.save(tmp_path, step)
    copy_all(uploader(url, tmp_path))
    Remote(url).put_new("iter_0000000/rest", b"of an interrupted copy")
    nan = Job({key: t * float("nan") if t.is_floating_point() else t for key, t in job.tensors.items()})
    for step in (3, 4, 5):
        nan.save(tmp_path, step)
        copy_all(uploader(url, tmp_path, keep=2))
    assert whole(url) == [5, 4, 2]
    job.save(tmp_path, 6)
    assert copy_all(uploader(url, tmp_path, keep=2)) == [6, 5] and whole(url) == [6, 5]
    assert Remote(url).sizes("iter_0000001") == {}, "all files are gone"


def test_of_a_checkpoint_that_goes_the_manifest_goes_first(
    url: str, tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        job.save(tmp_path, step)
    copy_all(uploader(url, tmp_path))
    up, remove, names = uploader(url, tmp_path, keep=1), Remote.remove, list[str]()

    def note(self: Remote, name: str) -> None:
        names.append(name)
        remove(self, name)

    monkeypatch.setattr(Remote, "remove", note)
    assert up.remove_older() == [1] and names == [f"iter_0000001/{MANIFEST_NAME}", "iter_0000001"]


def begin_upload(s3: S3, url: str, path: Path, name: str = "") -> None:
    """Leave what a process leaves that dies in the upload of a file (default: the checkpoint's first)."""
    key = f"{url.rpartition('/')[2]}/{path.name}/{name or read_manifest(path).files[0].name}"
    s3.client().create_multipart_upload(Bucket=BUCKET, Key=key)


def end_uploads(s3: S3) -> None:
    for each in s3.client().list_multipart_uploads(Bucket=BUCKET)["Uploads"]:
        s3.client().abort_multipart_upload(Bucket=BUCKET, Key=each["Key"], UploadId=each["UploadId"])


def test_interrupted_uploads_are_aborted_when_a_process_begins(s3: S3, s3_url: str, tmp_path: Path, job: Job) -> None:
    path = job.save(tmp_path, 7)
    uploader(s3_url, tmp_path).copy(path)
    begin_upload(s3, s3_url, path)
    assert uploader(s3_url, tmp_path).begin() == 1 and s3.uploads() == []


def test_another_node_s_upload_goes_on_where_each_has_directories_of_its_own(
    s3: S3, s3_url: str, tmp_path: Path, job: Job
) -> None:
    Cluster(tmp_path).save(job, 7)
    a, b = (uploader(s3_url, tmp_path / host, host=host) for host in "ab")
    paths = [tmp_path / host / "iter_0000007" for host in "ab"]
    b.copy(paths[1])
    begin_upload(
        s3, s3_url, paths[1], next(path.name for path in paths[1].iterdir() if not (paths[0] / path.name).exists())
    )
    assert a.begin() == 0 and len(s3.uploads()) == 1
    assert b.begin() == 1 and s3.uploads() == []


def test_an_upload_that_this_run_did_not_begin_is_never_aborted(s3: S3, s3_url: str, tmp_path: Path, job: Job) -> None:
    """Another program uploads into the folders of this run's steps, and another run mirrors to the same place."""
    unclaimed, taken, own = (job.save(tmp_path, step) for step in (7, 9, 11))
    other = uploader(s3_url, tmp_path / "other")
    of_other = [job.later().save(tmp_path / "other", step) for step in (9, 13)]
    uploader(s3_url, tmp_path).copy(own)
    begin_upload(s3, s3_url, own, "notes.txt")
    begin_upload(s3, s3_url, unclaimed)
    for path in of_other:
        other.copy(path)
        begin_upload(s3, s3_url, path, read_manifest(taken).files[0].name)
    before = s3.uploads()
    assert len(before) == 4 and uploader(s3_url, tmp_path).begin() == 0 and s3.uploads() == before
    assert other.begin() == 2 and len(s3.uploads()) == 2
    end_uploads(s3)


def test_an_upload_of_a_checkpoint_that_is_broken_by_now_does_not_end_a_process(
    s3: S3, s3_url: str, tmp_path: Path, job: Job
) -> None:
    path = job.save(tmp_path, 7)
    begin_upload(s3, s3_url, path)
    (path / MANIFEST_NAME).write_bytes(b"{")
    assert uploader(s3_url, tmp_path).begin() == 0
    end_uploads(s3)


def test_each_node_copies_its_own_files_and_one_puts_the_manifest_when_all_are_there(
    url: str, tmp_path: Path, job: Job
) -> None:
    cluster = Cluster(tmp_path)
    cluster.save(job, 7)
    a, b = (uploader(url, tmp_path / host, host=host) for host in "ab")
    paths = {host: tmp_path / host / "iter_0000007" for host in "ab"}
    with pytest.raises(NotYet):
        a.copy(paths["a"])
    assert whole(url) == [] and b.pending() and b.copy(paths["b"]) > 0
    assert whole(url) == [] and b.pending() == [], "b has done its part"
    assert a.copy(paths["a"]) == 0 and whole(url) == [7] and a.newest == 7
    cluster.save(job.later(), 9)
    for up, host in ((b, "b"), (a, "a")):
        up.copy(tmp_path / host / "iter_0000009")
    assert whole(url) == [9, 7]


def test_two_launches_that_name_a_write_alike_are_not_mixed_in_a_mirror(url: str, tmp_path: Path, job: Job) -> None:
    """Each on nodes of its own. A claim of an older version, whose parts name no launch, stays as it was."""
    cluster = Cluster(tmp_path)
    cluster.save(job, 7)
    uploader(url, tmp_path / "b", host="b").copy(tmp_path / "b" / "iter_0000007")
    cluster.hosts = ("a", "a", "d", "d")
    shutil.rmtree(tmp_path / "a")
    cluster.save(job.later(), 7, launch=SECOND_LAUNCH)
    with pytest.raises(Conflict, match="is another write of that step"):
        uploader(url, tmp_path / "a", host="a").copy(tmp_path / "a" / "iter_0000007")
    manifest = read_manifest(tmp_path / "a" / "iter_0000007")
    assert json.loads(upload._write_name(manifest, b"")) == [1, 1, "iter_0000007_tmp_x", SECOND_LAUNCH]
    assert json.loads(upload._write_name(replace(manifest, launch=""), b"")) == [1, 1, "iter_0000007_tmp_x"]


def test_another_runs_checkpoints_of_higher_steps_are_neither_copied_nor_counted_nor_removed(
    url: str, job: Job, tmp_path: Path
) -> None:
    """With `keep` this run's would be neither, or would go from the mirror at once."""
    for step in (8, 9):
        job.save(tmp_path, step)
    assert copy_all(uploader(url, tmp_path)) == [9, 8]
    job.save(tmp_path, 10)
    passed_over = inodes_in([str(tmp_path)])
    up = uploader(url, tmp_path, keep=1)
    up.source = replace(up.source, passed_over=passed_over)
    up.begin()
    assert up.newest == 0 and up.pending() == [] and up.has_newest()
    job.save(tmp_path, 3)
    assert not up.has_newest() and copy_all(up) == [3]
    assert whole(url) == [9, 8, 3] and up.newest == 3


def test_an_agent_reads_what_the_rank_has_written(tmp_path: Path) -> None:
    assert read(tmp_path) is None
    source = MirrorSource(("/a", "/b"), "node", 3, {"/a/iter_0000042": 7})
    source.write(tmp_path)
    assert read(tmp_path) == source == parse(json.loads(source.to_json()))
