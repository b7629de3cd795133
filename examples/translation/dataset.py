"""Sentence pairs for an encoder-decoder: a file with a pair a line, and the tokenizer that `preprocess.py` has left beside it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch

from ttp.errors import DatasetError
from ttp.trainer.data.batches import permute
from ttp.trainer.model.encoder_decoder import BEGIN, END, PAD
from ttp.trainer.model.gpt import UNCOUNTED

SPECIAL_TOKENS = {PAD: "[PAD]", BEGIN: "[BEGIN]", END: "[END]", 3: "[UNK]"}
"""The first ones of the tokenizer."""


class Tokenizer:
    """Byte-pair encoding, by the library `tokenizers`."""

    def __init__(self, path: Path) -> None:
        """Raises DatasetError."""
        from tokenizers import Tokenizer as Library

        if not path.is_file():
            raise DatasetError(f"tokenizer: got {path}, expected a file that is there. Run python preprocess.py first")
        try:
            self._library = Library.from_file(str(path))
        except Exception as error:  # the library raises Exception itself
            raise DatasetError(
                f"tokenizer {path}: got a file that cannot be read ({error}), expected preprocess.py's"
            ) from None
        wrong = [token for token, name in SPECIAL_TOKENS.items() if self._library.token_to_id(name) != token]
        if wrong:
            name = SPECIAL_TOKENS[wrong[0]]
            raise DatasetError(
                f"tokenizer {path}: got no token {wrong[0]} {name}, expected preprocess.py's. Run it again"
            )
        self.vocab_size: int = self._library.get_vocab_size()

    def encode(self, sentences: list[str]) -> list[list[int]]:
        """Return the tokens of each sentence, without begin and end."""
        return [encoding.ids for encoding in self._library.encode_batch(sentences)]

    def decode(self, tokens: list[int]) -> str:
        text: str = self._library.decode(tokens)
        return text


def read_pairs(path: Path) -> list[tuple[str, str]]:
    """Return the pairs of a file, source and target of each divided by a tab. Raises DatasetError."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(
            f"--file_path: got {path}, expected a readable UTF-8 file ({error}). Correct the path"
        ) from None
    pairs = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        sides = [side.strip() for side in line.split("\t")]
        if len(sides) != 2 or not all(sides):
            raise DatasetError(
                f"{path}, line {number}: got {len(sides)} columns, expected two that are not empty. Run preprocess.py"
            )
        pairs.append((sides[0], sides[1]))
    if not pairs:
        raise DatasetError(f"{path}: got no pair, expected one a line. Run preprocess.py")
    return pairs


class ToyDataset:
    """The pairs of a file as tokens; what the trainer takes (`ttp.trainer.data.batches.Samples`), and their source.

    Each epoch takes every pair once, in an order that depends on the seed alone. Longer sentences are cut, shorter ones are filled up.
    """

    padded = True

    def __init__(self, file_path: str, seq_length: tuple[int, int], tokenizer: Tokenizer, seed: int = 0) -> None:
        pairs, self._seed, self.name = read_pairs(Path(file_path)), seed, file_path
        source, target = (tokenizer.encode([pair[side] for pair in pairs]) for side in (0, 1))
        self._source = _filled(source, seq_length[0])
        self._target = _filled(target, seq_length[1])
        self.count = len(pairs)
        self.size = int((self._source != PAD).sum() + (self._target != PAD).sum())

    def fingerprint(self) -> str:
        content = hashlib.sha256(self._source.tobytes() + self._target.tobytes())
        return hashlib.sha256(f"{self._source.shape} {content.hexdigest()}".encode()).hexdigest()[:16]

    def epoch(self, position: int) -> int:
        return position // self.count

    def batch(self, first: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return source_BS and targets_BT of the positions [first, first + size)."""
        rows = self._rows(first, size)
        targets = self._target[rows].astype(np.int64)
        targets[targets == PAD] = UNCOUNTED
        return torch.from_numpy(self._source[rows].astype(np.int64)), torch.from_numpy(targets)

    def counted(self, first: int, size: int) -> int:
        return int((self._target[self._rows(first, size)] != PAD).sum())

    def _rows(self, first: int, size: int) -> list[int]:
        places = [divmod(position, self.count) for position in range(first, first + size)]
        return [permute(place, self.count, f"{self._seed}:{epoch}".encode()) for epoch, place in places]


def _filled(sentences: list[list[int]], length: int) -> np.ndarray:
    """Return an array [sentence, token]: each with END behind it, cut to `length` or filled up with PAD."""
    filled = np.full((len(sentences), length), PAD, dtype=np.int32)
    for row, tokens in zip(filled, sentences, strict=True):
        kept = [*tokens[: length - 1], END]
        row[: len(kept)] = kept
    return filled
