"""From text to token ids and back: bytes as they are, or a tokenizer of `tokenizers` or `transformers` from local files.

Owns which tokenizer a path stands for, and its end-of-text token. Both libraries are optional and loaded when a path asks for one;
nothing is ever fetched from a network.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from ttp.errors import ConfigError
from ttp.inputs.input_file import read_json

from ..config.schema import BYTE_VALUES
from .tokens import END_OF_TEXT

BYTES = "bytes"
"""Stands for a path where there is no tokenizer but the bytes of the text."""

_ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>")
"""Tried in this order where no file says which it is."""

_OWN_FILES = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "spiece", "sentencepiece")
"""How the names of a tokenizer's files begin, in a folder that may have a model too."""
_VOCABULARIES = ("tokenizer.", "vocab", "spiece", "sentencepiece")
"""How the names of those begin without which the others are not a tokenizer."""


class Tokenizer(Protocol):
    """Text to ids and back."""

    name: str
    vocab_size: int
    end_of_text: int | None
    """What stands after a document; None: nothing does."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without any that the text has not."""

    def decode(self, ids: Sequence[int]) -> str: ...

    def fingerprint(self) -> str:
        """Return a short hash that changes when the tokenizer does."""


class Bytes:
    """A token each byte of UTF-8."""

    name = BYTES
    vocab_size = BYTE_VALUES
    end_of_text: int | None = END_OF_TEXT

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text; what is not UTF-8, and ids beyond a byte, show as the replacement character."""
        return bytes(token if token < BYTE_VALUES else 0xFF for token in ids).decode(errors="replace")

    def fingerprint(self) -> str:
        return BYTES


class FromFile:
    """A `tokenizer.json` (byte-pair, unigram, word-piece: whatever it says)."""

    def __init__(self, file: Path) -> None:
        self.name = str(file)
        library = _library("tokenizers", self.name)
        try:
            self._tokenizer = library.Tokenizer.from_file(str(file))
        except Exception as exc:  # the library raises bare Exception for a file it cannot read
            raise ConfigError(f"dataset_config.tokenizer: {file} is not a tokenizer.json: {exc}") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._file = file
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        named = _named_end(file.parent)
        ends = [self._tokenizer.token_to_id(token) for token in ((named,) if named else _ENDS_OF_TEXT)]
        self.end_of_text: int | None = next((end for end in ends if end is not None), None)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [found.ids for found in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def fingerprint(self) -> str:
        return hashlib.sha256(self._file.read_bytes() + str(self.end_of_text).encode()).hexdigest()[:16]


class FromTransformers:
    """A folder of transformers' without a tokenizer.json: vocabulary and merges, or a SentencePiece model."""

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        library = _library("transformers", self.name)
        try:
            self._tokenizer = library.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as exc:  # whatever a tokenizer's own class raises
            raise ConfigError(f"dataset_config.tokenizer: {folder} holds no tokenizer: {exc}") from None
        self._folder = folder
        self.vocab_size = len(self._tokenizer)
        self.end_of_text: int | None = self._tokenizer.eos_token_id

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        found: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return found

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for file in files_of_tokenizer(self._folder):
            digest.update(file.name.encode() + file.read_bytes())
        return digest.hexdigest()[:16]


def open_tokenizer(path: str | None) -> Tokenizer:
    """Return the tokenizer at a local path, or bytes for BYTES and None. Raises ConfigError that says what is wrong or missing."""
    if path is None or path == BYTES:
        return Bytes()
    given = Path(path)
    if given.is_file():
        return FromFile(given)
    if not given.is_dir():
        raise ConfigError(
            f"dataset_config.tokenizer is {path!r}: no such file or folder; name a tokenizer.json, or a folder with one"
        )
    if (given / "tokenizer.json").is_file():
        return FromFile(given / "tokenizer.json")
    return FromTransformers(given)


def files_of_tokenizer(path: Path) -> list[Path]:
    """Return the files that make up the tokenizer at `path`: the file, or those of a folder."""
    if path.is_file():
        return [path]
    return sorted(file for file in path.iterdir() if file.is_file() and file.name.startswith(_OWN_FILES))


def holds_tokenizer(folder: Path) -> bool:
    """True for a folder with a `tokenizer.json`, a vocabulary or a SentencePiece model."""
    return any(file.name.startswith(_VOCABULARIES) for file in files_of_tokenizer(folder))


def byte_level_files() -> dict[str, Any]:
    """Return the content, by file name, of a tokenizer of transformers that takes each byte for a token, as `Bytes` does."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": {_letter(byte): byte for byte in range(BYTE_VALUES)}, "merges": []}
    plain = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": level,
            "post_processor": None,
            "decoder": level,
            "model": {**model, **plain, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False},
        },
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False},
    }


def _letter(byte: int) -> str:
    """Return the character that byte-level tokenizers write for a byte: itself where it prints, else one from 256 on, in order.
    Source: Radford et al., GPT-2's encoder (2019)."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printing:
        return chr(byte)
    return chr(256 + sum(other not in printing for other in range(byte)))


def _named_end(folder: Path) -> str | None:
    """Return the end-of-text token that a folder's tokenizer_config.json names."""
    try:
        named = read_json(folder / "tokenizer_config.json").get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    token = named.get("content") if isinstance(named, dict) else named
    return token if isinstance(token, str) else None


def _library(name: str, path: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise ConfigError(
            f"dataset_config.tokenizer is {path!r}: it takes the package {name} ({exc}); pip install {name}, or leave the key out"
        ) from None
