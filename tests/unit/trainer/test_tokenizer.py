"""Bytes or a local tokenizer: the same ids as their own libraries give, and the end of text that they name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ttp.errors import ConfigError
from ttp.trainer.data import tokenizer as module
from ttp.trainer.data.tokenizer import Bytes, byte_level_files, files_of_tokenizer, open_tokenizer

TEXT = "the cat sat on the mat and the dog sat on the cat; größer 你好 " * 20


def train_tokenizer(folder: Path, vocab_size: int = 300, end: str = "<|endoftext|>", text: str = TEXT) -> Path:
    """Train a byte-pair tokenizer and return its tokenizer.json."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([text], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@settings(max_examples=50)
@given(st.text())
def test_bytes_come_back_as_the_text(text: str) -> None:
    """Every text that UTF-8 can write."""
    (ids,) = Bytes().encode([text])
    assert ids == list(text.encode())
    assert Bytes().decode(ids) == text


def test_half_a_character_and_ids_beyond_bytes_show_as_a_mark() -> None:
    """A model may say anything."""
    assert Bytes().decode([*"ö".encode()[:1], 300, 65]) == "\ufffd\ufffdA"


def test_a_tokenizer_json_gives_its_own_ids(tmp_path: Path) -> None:
    """By the file, and by the folder; nothing is added to a text."""
    file = train_tokenizer(tmp_path / "tok")
    reference = Tokenizer.from_file(str(file))
    for path in (file, file.parent):
        ours = open_tokenizer(str(path))
        assert ours.encode(["the cat", TEXT]) == [reference.encode(text).ids for text in ("the cat", TEXT)]
        assert ours.decode(ours.encode([TEXT])[0]) == TEXT
        assert ours.vocab_size == reference.get_vocab_size() and ours.end_of_text == 0
    assert (
        open_tokenizer(str(file)).fingerprint()
        != open_tokenizer(str(train_tokenizer(tmp_path / "b", 280))).fingerprint()
    )


def test_the_folder_says_which_token_ends_a_text(tmp_path: Path) -> None:
    """tokenizer_config.json goes before the usual names."""
    file = train_tokenizer(tmp_path / "tok", end="<over>")
    assert open_tokenizer(str(file)).end_of_text is None
    for said in ("<over>", {"content": "<over>"}):
        (file.parent / "tokenizer_config.json").write_text(json.dumps({"eos_token": said}))
        assert open_tokenizer(str(file.parent)).end_of_text == 0


def test_the_files_for_bytes_are_a_tokenizer_of_bytes(tmp_path: Path) -> None:
    """Any text: the ids are its bytes, and back."""
    for name, content in byte_level_files().items():
        (tmp_path / name).write_text(json.dumps(content))
    ours = open_tokenizer(str(tmp_path))
    text = "".join(map(chr, range(1, 2000))) + TEXT
    assert ours.encode([text]) == Bytes().encode([text])
    assert ours.decode(ours.encode([text])[0]) == text
    assert [file.name for file in files_of_tokenizer(tmp_path)] == ["tokenizer.json", "tokenizer_config.json"]


def test_a_folder_of_transformers_without_tokenizer_json_is_read(tmp_path: Path) -> None:
    """A vocabulary and merges, as GPT-2's."""
    model = json.loads(train_tokenizer(tmp_path / "from").read_text())["model"]
    folder = tmp_path / "to"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("".join(" ".join(pair) + "\n" for pair in model["merges"]))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"})
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    ours = open_tokenizer(str(folder))
    reference = open_tokenizer(str(tmp_path / "from"))
    assert ours.encode(["the cat sat"]) == reference.encode(["the cat sat"])
    assert ours.end_of_text == 0 and ours.decode(ours.encode(["the cat"])[0]) == "the cat"
    before = ours.fingerprint()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]) + "\n")
    assert open_tokenizer(str(folder)).fingerprint() != before


def test_what_is_not_a_tokenizer_or_lacks_its_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the path, and with the package to install."""
    with pytest.raises(ConfigError, match="no such file or folder"):
        open_tokenizer(str(tmp_path / "missing"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is not a tokenizer\.json"):
        open_tokenizer(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty holds no tokenizer"):
        open_tokenizer(str(tmp_path / "empty"))

    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(module.importlib, "import_module", missing)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"takes the package tokenizers .* pip install tokenizers"):
        open_tokenizer(str(tmp_path))
