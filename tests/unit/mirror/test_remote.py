"""A folder of a store: puts that must be new, uploads through a network that fails, URLs and errors without credentials."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.s3 import BUCKET, S3
from ttp.errors import ConfigError
from ttp.mirror import remote
from ttp.mirror.remote import Remote, RemoteError, error_text
from ttp.mirror.url import check_url


def abort_all(store: Remote) -> None:
    for each in store.unfinished():
        store.abort(each)


def big_file(path: Path, nbytes: int = 12 << 20) -> Path:
    path.write_bytes(os.urandom(nbytes))
    return path


def test_of_two_puts_of_one_name_the_first_stays(url: str) -> None:
    store = Remote(url)
    assert store.put_new("iter_0000001/manifest.json", b"first")
    assert not store.put_new("iter_0000001/manifest.json", b"second")
    assert store.read("iter_0000001/manifest.json") == b"first"
    assert store.sizes("iter_0000001") == {"manifest.json": 5} and store.folders() == ["iter_0000001"]
    store.remove("iter_0000001")
    assert store.read("iter_0000001/manifest.json") is None and store.folders() == []


def test_a_store_that_refuses_no_second_put_is_noticed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Remote(url)
    store.check_conditional()
    assert store.conditional and store.folders() == []
    monkeypatch.setattr(Remote, "_put_new", lambda self, path, content: True)
    store.check_conditional()
    assert not store.conditional


@pytest.mark.parametrize("failing", [1, 2])
def test_one_put_that_fails_does_not_hide_that_a_store_refuses_no_second_one(
    s3_url: str, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    store, puts = Remote(s3_url), list[bytes]()
    pipe_file = store._fs.pipe_file

    def put_always(path: str, content: bytes, mode: str = "overwrite") -> None:
        puts.append(content)
        if len(puts) == failing:
            raise OSError("503 Slow Down")
        pipe_file(path, content)

    monkeypatch.setattr(store._fs, "pipe_file", put_always)
    store.check_conditional()
    assert not store.conditional
    assert store.put_new("a/b", b"first") and not store.put_new("a/b", b"second") and store.read("a/b") == b"first"


def test_a_second_put_of_which_only_the_answers_are_lost_was_not_refused(
    s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Remote(s3_url, tries=2)
    pipe_file = store._fs.pipe_file

    def lose_answers(path: str, content: bytes, mode: str = "overwrite") -> None:
        pipe_file(path, content)
        if content == b"2":
            raise OSError("connection reset")

    monkeypatch.setattr(store._fs, "pipe_file", lose_answers)
    store.check_conditional()
    assert not store.conditional


def test_a_put_whose_answer_was_lost_and_a_store_that_refuses_by_another_error(
    s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Remote(s3_url)
    pipe_file, lost = store._fs.pipe_file, [True]

    def lose_one(path: str, content: bytes, mode: str = "overwrite") -> None:
        try:
            pipe_file(path, content, mode=mode)
        except FileExistsError:
            raise OSError("412") from None
        if lost:
            lost.clear()
            raise OSError("connection reset")

    monkeypatch.setattr(store._fs, "pipe_file", lose_one)
    assert not store.put_new("a/b", b"first") and not store.put_new("a/b", b"second")
    assert store.read("a/b") == b"first"
    store.check_conditional()
    assert store.conditional


def test_where_a_store_has_no_conditional_put_what_is_there_stays_all_the_same(s3_url: str) -> None:
    store = Remote(s3_url)
    store.conditional = False
    assert store.put_new("a/b", b"first") and not store.put_new("a/b", b"second")
    assert store.read("a/b") == b"first"


def test_an_upload_is_repeated_after_errors_and_cut_connections(s3: S3, s3_url: str, tmp_path: Path) -> None:
    """A part is cut in its middle, and requests are answered with 503; the object has the file's bytes, and no upload remains."""
    path = big_file(tmp_path / "data")
    s3.proxy.cut_after, s3.proxy.refusals = [3 << 20, 1 << 20], 2
    Remote(s3_url).put(path, "iter_0000001/data")
    assert s3.proxy.cuts == 2 and s3.proxy.refused == 2
    assert s3.get(f"{tmp_path.name}/iter_0000001/data") == path.read_bytes() and s3.uploads() == []


def test_an_upload_that_is_cut_again_and_again_leaves_no_object_and_its_parts_can_be_removed(
    s3: S3, s3_url: str, tmp_path: Path
) -> None:
    store = Remote(s3_url, tries=2)
    s3.proxy.cut_after = [1 << 20] * 40
    with pytest.raises(RemoteError, match="iter_0000001/data"):
        store.put(big_file(tmp_path / "data"), "iter_0000001/data")
    assert store.sizes("iter_0000001") == {}
    s3.client().create_multipart_upload(Bucket=BUCKET, Key=f"{tmp_path.name}/iter_0000001/data")
    s3.client().create_multipart_upload(Bucket=BUCKET, Key="another/iter_0000001/data")
    assert {(each.folder, each.name) for each in store.unfinished()} == {("iter_0000001", "data")}
    abort_all(store)
    assert s3.uploads() == ["another/iter_0000001/data"]
    abort_all(Remote(f"s3://{BUCKET}/another"))
    assert s3.uploads() == []


def test_only_uploads_into_the_folders_of_published_steps_are_found(s3: S3, s3_url: str, tmp_path: Path) -> None:
    """Other programs use the bucket too, and another job mirrors to a folder below this one's."""
    prefix, own = tmp_path.name, "iter_0000001/data"
    others = ["data", "model/data", "iter_1/data", "iter_0000001/logs/data", f"other/{own}"]
    for name in (own, *others):
        s3.client().create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/{name}")
    s3.client().create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}_2/{own}")
    store = Remote(s3_url)
    assert [(each.folder, each.name) for each in store.unfinished()] == [("iter_0000001", "data")]
    assert Remote(f"s3://{BUCKET}").unfinished() == [], "the whole bucket is the mirror"
    s3.client().create_multipart_upload(Bucket=BUCKET, Key=own)
    bucket = Remote(f"s3://{BUCKET}")
    assert [(each.folder, each.name) for each in bucket.unfinished()] == [("iter_0000001", "data")]
    abort_all(bucket)
    abort_all(store)
    assert sorted(s3.uploads()) == sorted([*(f"{prefix}/{name}" for name in others), f"{prefix}_2/{own}"])
    for each in s3.client().list_multipart_uploads(Bucket=BUCKET)["Uploads"]:
        s3.client().abort_multipart_upload(Bucket=BUCKET, Key=each["Key"], UploadId=each["UploadId"])


def test_a_file_that_was_copied_in_part_has_no_name_and_is_removed(tmp_path: Path) -> None:
    store = Remote(f"file://{tmp_path}/mirror")
    store.put(big_file(tmp_path / "data", 10), "iter_0000001/data")
    (tmp_path / "mirror" / "iter_0000001" / ".rest.0123456789ab").write_bytes(b"half")
    store.put(big_file(tmp_path / "data", 10), "iter_0000001/.metadata")
    (tmp_path / "mirror" / "other").mkdir()
    (tmp_path / "mirror" / "other" / ".rest.0123456789ab").write_bytes(b"another program's")
    assert [(each.folder, each.name) for each in store.unfinished()] == [("iter_0000001", "rest")]
    abort_all(store)
    assert store.sizes("iter_0000001") == {"data": 10, ".metadata": 10} and len(store.sizes("other")) == 1


def test_what_a_copy_leaves_that_dies_in_its_middle_is_found_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Remote(f"file://{tmp_path}/mirror")

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(remote, "_sync", die)
        with pytest.raises(KeyboardInterrupt):
            store.put(big_file(tmp_path / "data", 10), "iter_0000001/data")
    assert store.read("iter_0000001/data") is None and len(store.sizes("iter_0000001")) == 1
    abort_all(store)
    assert store.sizes("iter_0000001") == {}


def test_a_file_that_comes_at_the_same_moment_from_elsewhere_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = tmp_path / "mirror" / "iter_0000001" / "manifest.json"

    def after_the_other(act: Callable[..., None]) -> Callable[..., None]:
        def placed(*args: object) -> None:
            name.write_bytes(b"other")
            act(*args)

        return placed

    for call in ("link", "rename", "replace"):
        monkeypatch.setattr(os, call, after_the_other(getattr(os, call)))
    assert not Remote(f"file://{tmp_path}/mirror").put_new("iter_0000001/manifest.json", b"mine")
    assert name.read_bytes() == b"other"


def test_a_download_goes_on_after_a_cut(s3: S3, s3_url: str, tmp_path: Path) -> None:
    path, store = big_file(tmp_path / "data"), Remote(s3_url)
    store.put(path, "data")
    s3.proxy.answer_cuts = 2
    assert b"".join(store.chunks("data", path.stat().st_size)) == path.read_bytes()
    assert s3.proxy.answer_cuts == 0


def test_a_bucket_that_is_not_there_is_an_error_and_not_an_empty_mirror(s3: S3) -> None:
    with pytest.raises(RemoteError, match="no_such_bucket"):
        Remote("s3://no_such_bucket/prefix", tries=1).folders()


def test_a_server_that_is_away_is_an_error(s3: S3, s3_url: str) -> None:
    s3.proxy.down = True
    with pytest.raises(RemoteError, match=s3_url):
        Remote(s3_url, tries=2).folders()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("checkpoints", "expected a URL such as s3://bucket/prefix"),
        ("s3://", "expected a URL such as s3://bucket/prefix"),
        ("memory://a/b", "keeps nothing"),
        ("s3://key:sec/ret@bucket/prefix", "a URL with a password"),
        ("ftp://user:sec/ret@host/prefix", "a URL with a password"),
        ("nothing://a/b", "cannot be used"),
    ],
)
def test_a_url_that_cannot_be_mirrored_to_is_refused_and_no_password_is_shown(url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        check_url(url)
    assert "sec" not in str(refused.value)


def test_without_s3fs_a_url_of_s3_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"s3fs is not installed. Run pip install 'try-to-persist\[s3\]'"):
        check_url("s3://bucket/prefix")


def test_an_error_of_a_library_is_quoted_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "abc/def")
    text = error_text(ValueError("cannot reach http://me:word@host/x with abc/def\nsecond line"))
    assert text == "ValueError: cannot reach http://host/x with *** second line"


def test_a_refused_call_is_not_tried_again(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def refuse(*args: object, **kwargs: object) -> None:
        calls.append("")
        raise PermissionError("Access Denied")

    store = Remote(s3_url)
    monkeypatch.setattr(store._fs, "ls", refuse)
    with pytest.raises(RemoteError, match="Access Denied"):
        store.folders()
    assert len(calls) == 1
