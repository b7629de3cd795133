"""Text becomes token files once: whole or not at all, however many processes ask for it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from tests.unit.trainer.prepare_process import prepare_slowly
from tests.unit.trainer.test_tokenizer import TEXT, train_tokenizer
from ttp.errors import DatasetError
from ttp.trainer import prepare
from ttp.trainer.indexed import IndexedTokens
from ttp.trainer.prepare import cache_key, main, prepared
from ttp.trainer.tokenizer import Bytes, Tokenizer, open_tokenizer


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
    """Each file's ids, then the end; an empty file is no document."""
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
    assert len({cache_key(text, tokenizer, column) for column in ("text", "body")}) == 2


def test_a_long_document_is_cut_at_lines_and_is_still_one(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is that of a piece; the ends of text are those of documents."""
    monkeypatch.setattr(prepare, "_PIECE_BYTES", 50)
    monkeypatch.setattr(prepare, "_BATCH_BYTES", 120)
    (tmp_path / "text").write_text("the cat sat on the mat\n" * 40)
    told: list[float] = []
    prepare.write_tokens(tmp_path / "out", tmp_path / "text", tokenizer, "text", told.append)
    found = IndexedTokens(tmp_path / "out")
    ids = found.read(0, found.size).tolist()
    assert tokenizer.decode(ids[:-1]) == (tmp_path / "text").read_text() and ids.count(0) == 1
    assert found.documents.tolist() == [0, 14]
    assert told == sorted(told) and told[-1] == 1.0 and len(told) > 3


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
    with pytest.raises(DatasetError, match="has the splits test: wanted train"):
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


def test_text_that_is_no_utf8_leaves_nothing_behind(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The file is named; the next call begins anew."""
    (tmp_path / "text").write_bytes(b"fine\n\xff\xfe")
    for _ in range(2):
        with pytest.raises(DatasetError, match="text: is no UTF-8 text"):
            prepared(tmp_path / "text", tokenizer, tmp_path / "cache", "text")
        assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, text: Path, tokenizer: Tokenizer) -> None:
    """With the key that moves it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DatasetError, match=r"set dataset_config\.cache_dir"):
        prepared(text, tokenizer, tmp_path / "file" / "cache", "text")


def test_ranks_that_race_prepare_once_and_a_dead_one_is_followed(
    tmp_path: Path, text: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first is killed in the middle; the second, which waited, prepares; the third takes what that one made."""
    caplog.set_level(logging.INFO, "ttp.trainer")
    own = multiprocessing.get_context("spawn")
    begun, go, never, answers = [own.Event(), own.Event()], own.Event(), own.Event(), own.Queue()
    cache = tmp_path / "cache"
    first = own.Process(target=prepare_slowly, args=(text, cache, begun[0], never, answers))
    second = own.Process(target=prepare_slowly, args=(text, cache, begun[1], go, answers))
    first.start()
    assert begun[0].wait(120)
    second.start()
    assert not begun[1].wait(1.0), "two prepare the same at once"
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

    monkeypatch.setattr(prepare.fcntl, "flock", refused)  # type: ignore[attr-defined]
    write = prepare.write_tokens

    def beaten(prefix: Path, *rest: Any) -> int:
        monkeypatch.setattr(prepare, "write_tokens", write)
        prepared(text, tokenizer, tmp_path / "cache", "text")
        (prefix.parent / "mark").write_text("")
        return write(prefix, *rest)

    monkeypatch.setattr(prepare, "write_tokens", beaten)
    monkeypatch.setattr(prepare.os, "getpid", iter(range(1, 99)).__next__)  # type: ignore[attr-defined]
    found = prepared(text, tokenizer, tmp_path / "cache", "text")
    assert found.size == 2 + sum(map(len, tokenizer.encode(["the cat", TEXT])))
    assert not list((tmp_path / "cache").glob("*_tmp_*")) and not list((tmp_path / "cache").rglob("mark"))


def test_progress_is_said_in_tenths(caplog: pytest.LogCaptureFixture) -> None:
    """In the log, not more often."""
    caplog.set_level(logging.INFO, "ttp.trainer")
    tell = prepare._tenths("preparing it")
    for number in range(1001):
        tell(number / 1000)
    assert [record.message for record in caplog.records] == [f"preparing it: {10 * n} %" for n in range(11)]


def test_the_command_writes_a_pair_that_training_takes(
    tmp_path: Path, text: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    """And refuses with status 2, leaving nothing."""
    assert main([str(text), str(tmp_path / "out"), "--tokenizer", str(tmp_path / "tok")]) == 0
    assert "tokens (uint16) of 2 documents" in capsys.readouterr().out
    assert (
        IndexedTokens(tmp_path / "out").fingerprint()
        == prepared(text, tokenizer, tmp_path / "cache", "text").fingerprint()
    )
    assert main([str(tmp_path / "missing"), str(tmp_path / "other")]) == 2
    assert "no such file or folder" in capsys.readouterr().err
    assert not list(tmp_path.glob("other*"))
