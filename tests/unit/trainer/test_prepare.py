"""Text becomes token files once: whole or not at all, however many processes ask for it."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from datasets import Dataset, DatasetDict
from tokenizers import models, normalizers, trainers

from tests.unit.trainer.prepare_process import prepare_slowly
from tests.unit.trainer.test_tokenizer import TEXT, train_tokenizer
from ttp.errors import DatasetError
from ttp.trainer.data import prepare, text_cache
from ttp.trainer.data.megatron_indexed import IndexedTokens
from ttp.trainer.data.prepare import main, unfinished_beside
from ttp.trainer.data.text_cache import cache_key, hash_files, prepared
from ttp.trainer.data.tokenizer import Bytes, Tokenizer, open_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """Return a trained tokenizer."""
    return open_tokenizer(str(train_tokenizer(tmp_path / "tok")))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Return a folder of three texts, one of them empty."""
    folder = tmp_path / "text"
    folder.mkdir()
    for name, content in {"a": "the cat", "b": "", "c": TEXT}.items():
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def test_documents_are_joined_with_the_end_of_text(tmp_path: Path, text: Path, tokenizer: Tokenizer) -> None:
    """Each file's ids, then the end; an empty file is not a document."""
    found = prepared(text, tokenizer, tmp_path / "cache", "text")
    first, second = tokenizer.encode(["the cat", TEXT])
    assert found.read(0, found.size).tolist() == [*first, 0, *second, 0]
    assert len(found.documents) == 3


def test_the_second_call_takes_what_the_first_has_made(
    tmp_path: Path, text: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until text, tokenizer or column change."""
    calls: list[Path] = []
    write = prepare.write_tokens

    def counted(prefix: Path, *rest: Any) -> int:
        calls.append(prefix)
        return write(prefix, *rest)

    monkeypatch.setattr(prepare, "write_tokens", counted)
    cache = tmp_path / "cache"
    first = prepared(text, tokenizer, cache, "text").fingerprint()
    assert prepared(text, tokenizer, cache, "text").fingerprint() == first and len(calls) == 1
    prepared(text, Bytes(), cache, "text")
    (text / "a").write_text("the mat")  # as long as before
    assert prepared(text, tokenizer, cache, "text").fingerprint() != first
    assert len(calls) == 3
    assert not list(cache.glob("*_tmp_*"))
    assert len({cache_key(text, tokenizer, column, cache) for column in ("text", "body")}) == 2


def test_damaged_tokens_in_the_cache_are_refused_with_what_to_remove(
    tmp_path: Path, text: Path, tokenizer: Tokenizer
) -> None:
    """Each attempt would find them again; without the folder the text is prepared anew."""
    cache = tmp_path / "cache"
    first = prepared(text, tokenizer, cache, "text").fingerprint()
    (index,) = cache.glob("*/tokens.idx")
    index.write_bytes(index.read_bytes()[:-9])
    with pytest.raises(
        DatasetError, match=f"tokens.idx: has .* again: remove {index.parent}, and the next attempt does so$"
    ):
        prepared(text, tokenizer, cache, "text")
    shutil.rmtree(index.parent)
    assert prepared(text, tokenizer, cache, "text").fingerprint() == first


def test_a_long_document_is_cut_at_lines_and_is_still_one(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is that of a piece; the ends of text are those of documents."""
    monkeypatch.setattr(prepare, "_PIECE_BYTES", 50)
    monkeypatch.setattr(prepare, "_BATCH_BYTES", 120)
    (tmp_path / "text").write_text("the cat sat on the mat\n" * 40)
    reported: list[float] = []
    prepare.write_tokens(tmp_path / "out", tmp_path / "text", tokenizer, "text", reported.append)
    found = IndexedTokens(tmp_path / "out")
    ids = found.read(0, found.size).tolist()
    assert tokenizer.decode(ids[:-1]) == (tmp_path / "text").read_text() and ids.count(0) == 1
    assert found.documents.tolist() == [0, 14]
    assert reported == sorted(reported) and reported[-1] == 1.0 and len(reported) > 3


def test_a_cut_in_a_document_leaves_no_trace_in_its_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a tokenizer that puts a mark before each text, and with blank and indented lines at the cuts."""
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    lines = "the cat sat\n\n  on the mat\nand the dog sat\n\ton the cat\n" * 9
    trainer = trainers.BpeTrainer(vocab_size=60, initial_alphabet=["\n", "\t"], show_progress=False)
    made.train_from_iterator(lines.split("\n"), trainer)
    made.save(str(tmp_path / "marking.json"))
    (tmp_path / "text").write_text(lines)
    train_tokenizer(tmp_path / "bytes", text=lines)
    for file in (tmp_path / "marking.json", tmp_path / "bytes" / "tokenizer.json"):
        tokenizer = open_tokenizer(str(file))
        (whole,) = tokenizer.encode([lines])
        monkeypatch.setattr(prepare, "_PIECE_BYTES", 10)
        prepare.write_tokens(tmp_path / "out", tmp_path / "text", tokenizer, "text", lambda share: None)
        found = IndexedTokens(tmp_path / "out")
        assert found.documents[-1] > 10, "there was no cut"
        ids = found.read(0, found.size).tolist()
        assert ids[: len(whole)] == whole and len(ids) - len(whole) == (tokenizer.end_of_text is not None)


def test_null_rows_are_left_out_and_reported(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """With their number; a column with nothing else, or with something else, is refused."""
    rows = {"text": [None, "the cat", None], "number": [1, 2, 3], "nothing": [None, None, None]}
    Dataset.from_dict(rows).save_to_disk(str(tmp_path / "rows"))
    found = prepared(tmp_path / "rows", tokenizer, tmp_path / "cache", "text")
    assert found.read(0, found.size).tolist() == [*tokenizer.encode(["the cat"])[0], 0]
    assert "2 of 3 rows of the column 'text' are null: left out" in caplog.text
    with pytest.raises(DatasetError, match="row 0 of the column 'number': got int, expected strings or token ids"):
        prepared(tmp_path / "rows", tokenizer, tmp_path / "cache", "number")
    with pytest.raises(DatasetError, match="no row of the column 'nothing' has anything"):
        prepared(tmp_path / "rows", tokenizer, tmp_path / "cache", "nothing")


def test_saved_data_sets_are_read_by_column_and_split(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Text is tokenized, ids are taken as they are; of several splits train is the one."""
    rows = Dataset.from_dict({"text": ["the cat", TEXT], "input_ids": [[1, 2], [3]]})
    rows.save_to_disk(str(tmp_path / "rows"))
    DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(str(tmp_path / "splits"))
    first, second = tokenizer.encode(["the cat", TEXT])
    for name in ("rows", "splits"):
        found = prepared(tmp_path / name, tokenizer, tmp_path / "cache", "text")
        assert found.read(0, found.size).tolist() == [*first, 0, *second, 0]
        found = prepared(tmp_path / name, tokenizer, tmp_path / "cache", "input_ids")
        assert found.read(0, found.size).tolist() == [1, 2, 0, 3, 0]
    with pytest.raises(DatasetError, match=r"no column 'body', but text, input_ids; set dataset_config\.text_column"):
        prepared(tmp_path / "rows", tokenizer, tmp_path / "cache", "body")
    DatasetDict({"test": rows}).save_to_disk(str(tmp_path / "other"))
    with pytest.raises(DatasetError, match="got the splits test, expected train"):
        prepared(tmp_path / "other", tokenizer, tmp_path / "cache", "text")


def test_a_saved_data_set_without_the_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is needed by nothing else."""
    Dataset.from_dict({"text": ["a"]}).save_to_disk(str(tmp_path / "rows"))

    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(prepare.importlib, "import_module", missing)  # type: ignore[attr-defined]
    with pytest.raises(DatasetError, match="pip install datasets"):
        prepared(tmp_path / "rows", Bytes(), tmp_path / "cache", "text")


def test_text_that_is_not_utf8_leaves_nothing_behind(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The file is named; the next call begins anew."""
    (tmp_path / "text").write_bytes(b"fine\n\xff\xfe")
    for _ in range(2):
        with pytest.raises(DatasetError, match="text: is not UTF-8"):
            prepared(tmp_path / "text", tokenizer, tmp_path / "cache", "text")
        assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".lock", ".json"}


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, text: Path, tokenizer: Tokenizer) -> None:
    """With the key that moves it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DatasetError, match=r"set dataset_config\.cache_dir"):
        prepared(text, tokenizer, tmp_path / "file" / "cache", "text")


def test_a_text_that_cannot_be_read_is_not_the_caches_fault(
    tmp_path: Path, text: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it fails while it is hashed, or while its rows are read."""

    def failing(path: Path) -> Iterator[bytes]:
        yield from blocks(path.with_name("gone"))

    blocks = text_cache._blocks
    with monkeypatch.context() as patch:
        patch.setattr(text_cache, "_blocks", failing)
        with pytest.raises(DatasetError, match="gone: cannot be read") as caught:
            prepared(text, tokenizer, tmp_path / "cache", "text")
    assert "cache_dir" not in str(caught.value)
    Dataset.from_dict({"text": ["a"]}).save_to_disk(str(tmp_path / "rows"))
    next((tmp_path / "rows").glob("*.arrow")).unlink()
    with pytest.raises(DatasetError, match="rows: cannot be read as a saved data set") as caught:
        prepared(tmp_path / "rows", tokenizer, tmp_path / "cache", "text")
    assert "cache_dir" not in str(caught.value)


def test_a_restart_reads_only_the_files_that_have_changed(
    tmp_path: Path, text: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By size, time and inode; one that was written just before it was hashed is not trusted to be the same."""
    read: list[str] = []
    blocks = text_cache._blocks

    def counted(path: Path) -> Iterator[bytes]:
        read.append(path.name)
        yield from blocks(path)

    monkeypatch.setattr(text_cache, "_blocks", counted)
    monkeypatch.setattr(text_cache, "_RECENT_NS", 3600 * 10**9)  # the files of this test stay recent
    cache = tmp_path / "cache"

    def newly_read() -> list[str]:
        read.clear()
        prepared(text, tokenizer, cache, "text")
        return sorted(read)

    for name in ("a", "b"):
        os.utime(text / name, ns=(0, time.time_ns() - 7200 * 10**9))
    assert newly_read() == ["a", "b", "c"]
    assert newly_read() == ["c"]  # of now: it could have changed since under the same time
    os.utime(text / "c", ns=(0, 10**18))
    assert newly_read() == ["c"] and newly_read() == []
    before = hash_files(text, cache)
    (text / "new").write_text("the mat")  # as long
    os.utime(text / "new", ns=(0, (text / "a").stat().st_mtime_ns))
    (text / "new").replace(text / "a")
    assert newly_read() == ["a"] and hash_files(text, cache)["a"] != before["a"]
    note = next(cache.glob("hashes_*.json"))
    noted = json.loads(note.read_text())
    for damaged in ([1], {**noted, "a": 1}, {**noted, "a": [1]}, {**noted, "a": [*noted["a"][:4], 1]}):
        note.write_text(json.dumps(damaged))
        assert newly_read() == (["a"] if isinstance(damaged, dict) else ["a", "b", "c"])
        assert hash_files(text, cache)["b"] == before["b"]
    note.write_text(json.dumps({**noted, "a": [*noted["a"][:3], "now", noted["a"][4]]}))
    assert newly_read() == ["a"]


@pytest.mark.parametrize(
    ("content", "share"),
    [(b"0.25", 0.25), (b"", 0), (b"nan", 0), (b"1e999", 0), (b"-7", 0), (b"x", 0), (b"\xff", 0), (b"\0\0", 0)],
)
def test_share_of_another_process_is_a_share_whatever_its_file_holds(
    tmp_path: Path, content: bytes, share: float
) -> None:
    """A process that waits must not end because the file is damaged."""
    (tmp_path / "lock").write_bytes(content)
    assert text_cache._share_in(tmp_path / "lock") == share
    assert text_cache._share_in(tmp_path / "none") == 0


def test_a_cache_that_may_only_be_read_serves_its_tokens(
    tmp_path: Path, text: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's, say: the text is read, no lock is taken and no hash noted."""
    cache = tmp_path / "cache"
    before = prepared(text, tokenizer, cache, "text").fingerprint()
    for left in cache.glob("hashes_*"):
        left.unlink()
    monkeypatch.setattr(text_cache.os, "access", lambda path, mode: False)  # type: ignore[attr-defined]
    monkeypatch.setattr(text_cache, "unfinished_beside", lambda path: cache / "no" / "such" / "folder")
    assert prepared(text, tokenizer, cache, "text").fingerprint() == before
    assert not list(cache.glob("hashes_*"))


def test_processes_that_start_together_read_the_text_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waited takes the hashes that were made while it did, however new the files are."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "text").write_text("the cat")
    hash_all = text_cache._hash_all

    def overtaken(*_: Any) -> Any:
        raise AssertionError("read a second time")

    noted = text_cache._noted

    def after_another(home: Path, files: Any, asked_ns: int) -> Any:
        monkeypatch.setattr(text_cache, "_noted", noted)
        found = noted(home, files, asked_ns)
        text_cache._note(home, hash_all(files, lambda share: None))  # another one does it now
        return found

    monkeypatch.setattr(text_cache, "_noted", after_another)
    monkeypatch.setattr(text_cache, "_hash_all", overtaken)
    assert hash_files(tmp_path / "text", tmp_path / "cache")["."][0] == 7


@pytest.mark.parametrize(
    ("host", "pid", "age_s", "goes"),
    [("here", "dead", 0, True), ("here", "alive", 0, False), ("here", "alive", 90000, True),
     ("there", "dead", 0, False), ("there", "dead", 90000, True)],
)  # fmt: skip
def test_only_what_a_dead_process_has_left_is_removed(
    tmp_path: Path, text: Path, tokenizer: Tokenizer, host: str, pid: str, age_s: int, goes: bool
) -> None:
    """Of this host by its process; of others, of which nothing can be known, by its age, its newest file counting."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    cache = tmp_path / "cache"
    key = cache_key(text, tokenizer, "text", cache_dir=tmp_path)
    made_by = (socket.gethostname() if host == "here" else "other_host", gone.pid if pid == "dead" else os.getpid())
    left = cache / f"{key}_tmp_{made_by[0]}_{made_by[1]}_{'0' * 32}"
    left.mkdir(parents=True)
    (left / "tokens.bin").write_text("")
    then = time.time() - age_s
    os.utime(left, (then - 99999, then - 99999))
    os.utime(left / "tokens.bin", (then, then))
    if not age_s:
        os.utime(left, (then, then))
    prepared(text, tokenizer, cache, "text")
    assert left.exists() != goes
    names = {unfinished_beside(cache / key).name for _ in range(2)}
    assert len(names) == 2 and all(text_cache._UNFINISHED.fullmatch(name) for name in names)


def test_ranks_that_race_prepare_once_and_a_dead_one_is_followed(
    tmp_path: Path, text: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first is killed in the middle; the second, which waited, prepares; the third takes what that one made."""
    caplog.set_level(logging.INFO, "ttp.trainer")
    own = multiprocessing.get_context("spawn")
    begun, waits = [own.Event(), own.Event()], [own.Event(), own.Event()]
    go, never, answers = own.Event(), own.Event(), own.Queue()
    cache = tmp_path / "cache"
    first = own.Process(target=prepare_slowly, args=(text, cache, begun[0], waits[0], never, answers))
    second = own.Process(target=prepare_slowly, args=(text, cache, begun[1], waits[1], go, answers))
    first.start()
    assert begun[0].wait(120)
    second.start()
    assert waits[1].wait(120) and not begun[1].is_set(), "two prepare the same at once"
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    assert begun[1].wait(120)
    assert len(list(cache.glob("*_tmp_*"))) == 1, "what the dead one left is still there"
    go.set()
    found = prepared(text, Bytes(), cache, "text").fingerprint()  # waits for the second
    assert answers.get(timeout=120) == found
    second.join()
    assert not list(cache.glob("*_tmp_*"))
    assert not any("prepared" in record.message for record in caplog.records), "the third prepared, too"


def test_without_locks_the_faster_one_counts(
    tmp_path: Path, text: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that knows no locks: both prepare, one is kept, and nothing of the other stays."""

    def refused(*_: Any) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(text_cache.fcntl, "flock", refused)  # type: ignore[attr-defined]
    write = prepare.write_tokens

    def beaten(prefix: Path, *rest: Any) -> int:
        monkeypatch.setattr(prepare, "write_tokens", write)
        prepared(text, tokenizer, tmp_path / "cache", "text")
        (prefix.parent / "mark").write_text("")
        return write(prefix, *rest)

    monkeypatch.setattr(prepare, "write_tokens", beaten)
    found = prepared(text, tokenizer, tmp_path / "cache", "text")
    assert found.size == 2 + sum(map(len, tokenizer.encode(["the cat", TEXT])))
    assert not list((tmp_path / "cache").glob("*_tmp_*")) and not list((tmp_path / "cache").rglob("mark"))


def test_progress_is_said_in_tenths(caplog: pytest.LogCaptureFixture) -> None:
    """In the log, not more often."""
    caplog.set_level(logging.INFO, "ttp.trainer")
    tell = text_cache._tenths("preparing it")
    for number in range(1001):
        tell(number / 1000)
    assert [record.message for record in caplog.records] == [f"preparing it: {10 * n} %" for n in range(11)]


def test_the_command_writes_a_pair_that_training_takes(
    tmp_path: Path,
    text: Path,
    tokenizer: Tokenizer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And refuses with status 2, leaving nothing; an old index is gone before its tokens are others."""
    assert main([str(text), str(tmp_path / "out"), "--tokenizer", str(tmp_path / "tok")]) == 0
    assert "tokens (uint16) of 2 documents" in capsys.readouterr().out
    pair, cached = IndexedTokens(tmp_path / "out"), prepared(text, tokenizer, tmp_path / "cache", "text")
    assert pair.read(0, pair.size).tolist() == cached.read(0, cached.size).tolist()
    assert pair.documents.tolist() == cached.documents.tolist()
    (index,) = tmp_path.glob("out.idx")
    old = index.read_bytes()
    replace = os.replace

    def dies(source: str, target: str) -> None:
        if target.endswith(".idx"):
            raise OSError("no")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(prepare.os, "replace", dies)  # type: ignore[attr-defined]
        assert main([str(text), str(tmp_path / "out")]) == 2
    assert not index.exists(), "the old index stands beside new tokens"
    assert main([str(text), str(tmp_path / "out")]) == 0 and index.read_bytes() != old
    capsys.readouterr()
    assert main([str(tmp_path / "missing"), str(tmp_path / "other")]) == 2
    assert "no such file or folder" in capsys.readouterr().err
    assert not list(tmp_path.glob("other*"))
