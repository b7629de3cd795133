"""Which sequences each step takes: pure functions of (seed, position).

Owns the cut of a text into sequences, their order, and what is held out. Holds no state that a dead rank could take along: a
position is a number that counts all sequences ever consumed by the job, and everything follows from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ttp.errors import ConfigError, DatasetError

from ..config.schema import Config
from .prepare import is_saved_dataset, unfinished_beside
from .text_cache import prepared
from .tokenizer import BYTES, open_tokenizer
from .tokens import FileText, Tokens, manual, token_files

_ROUNDS = 6
_HELD_OUT_SEED = 0
"""Not the run's: runs with other seeds are evaluated on the same sequences."""


class Samples(Protocol):
    """What a job trains on, in the order of training: a function of the position, which counts all that the job has ever taken."""

    @property
    def count(self) -> int:
        """Samples in an epoch."""

    @property
    def padded(self) -> bool:
        """Their targets are not all counted: a mean of the loss is one over tokens, not over micro-batches."""

    def epoch(self, position: int) -> int: ...

    def batch(self, first: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the model takes and what it is to say, of the positions [first, first + size)."""

    def counted(self, first: int, size: int) -> int:
        """Return how many targets they have that are counted."""


S = TypeVar("S", bound=Samples)


class Source(Protocol):
    """What samples were made of."""

    name: str
    size: int
    """Tokens."""

    def fingerprint(self) -> str:
        """Return a short hash that changes when the samples do."""


@dataclass(frozen=True, slots=True)
class OpenedText(Generic[S]):
    """A text, and what is made of it."""

    tokens: Source
    training: S
    held_out: S | None
    """For the validation loss; None: nothing is held out."""
    tokenizer: str | None
    """BYTES, the path of the tokenizer, or None for ids of unknown meaning."""


class Sequences:
    """Tokens cut into sequences of T + 1 that overlap by one, in the order of training.

    Position p is sequence p % count of epoch p // count; each epoch takes every sequence once. `part`: numbers of the
    sequences that these are; None: all.
    """

    padded = False

    def __init__(
        self,
        tokens: Tokens,
        seq_length: int,
        *,
        seed: int,
        shuffle: bool,
        part: range | None = None,
        vocab_size: int | None = None,
    ) -> None:
        part = range(count_sequences(tokens, seq_length)) if part is None else part
        self.count = len(part)
        """Sequences in an epoch."""
        self._first = part.start
        self._tokens = tokens
        self._seq_length = seq_length
        self._seed = seed
        self._shuffle = shuffle
        self._vocab_size = vocab_size

    def epoch(self, position: int) -> int:
        return position // self.count

    def counted(self, first: int, size: int) -> int:
        return size * self._seq_length

    def sample(self, position: int) -> npt.NDArray[Any]:
        """Return the T + 1 tokens at `position`: inputs are all but the last, targets all but the first."""
        epoch, index = divmod(position, self.count)
        if self._shuffle:
            index = permute(index, self.count, key=f"{self._seed}:{epoch}".encode())
        start = (self._first + index) * self._seq_length
        return self._tokens.read(start, start + self._seq_length + 1)

    def batch(self, first: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (tokens_BT, targets_BT), int64, of the positions [first, first + size). Raises DatasetError for a token that the
        model has not."""
        both = np.stack([self.sample(first + i) for i in range(size)]).astype(np.int64)
        if self._vocab_size is not None and not 0 <= int(both.min()) <= int(both.max()) < self._vocab_size:
            raise DatasetError(
                f"{self._tokens.name}: has the token ids {int(both.min())} to {int(both.max())}, and model_config.vocab_size is"
                f" {self._vocab_size}: raise it, or name the tokens of another vocabulary"
            )
        whole = torch.from_numpy(both)
        return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()


def count_sequences(tokens: Tokens, seq_length: int) -> int:
    """Return how many sequences a text has. Raises DatasetError for none."""
    count = max(0, tokens.size - 1) // seq_length
    if count == 0:
        raise DatasetError(
            f"{tokens.name} has {tokens.size} tokens: one sequence takes {seq_length + 1}; set dataset_config.dataset_dir to a"
            " longer text, or lower model_config.seq_length"
        )
    return count


def open_text(config: Config) -> tuple[Tokens, str | None]:
    """Return the configured tokens, prepared where they have to be, and `OpenedText.tokenizer`. Raises DatasetError, ConfigError."""
    data, vocab = config.dataset_config, config.model_config.vocab_size
    root = None if data.dataset_dir is None else Path(data.dataset_dir)
    found = None if root is None else token_files(root, data.token_dtype)
    named = None if data.tokenizer is None else str(Path(data.tokenizer).resolve())
    if found is not None:
        return found, named  # ids already: a tokenizer has nothing to do with them but to print them
    tokenizer = open_tokenizer(data.tokenizer)
    if tokenizer.vocab_size > vocab:
        raise ConfigError(
            f"model_config.vocab_size: got {vocab}, expected {tokenizer.vocab_size} or more, the tokenizer {tokenizer.name} has so many"
            " ids"
        )
    if data.tokenizer is None and (root is None or not is_saved_dataset(root)):
        return (manual() if root is None else FileText(root)), BYTES
    cache_dir = Path(data.cache_dir or Path(config.training_config.output_dir) / "prepared").resolve()
    if root is None:
        root = _manual_file(cache_dir)
    return prepared(root, tokenizer, cache_dir, data.text_column), named or BYTES


def open_sequences(config: Config) -> OpenedText[Sequences]:
    """Return the configured text and its sequences, those at its end held out. Raises DatasetError, ConfigError."""
    tokens, tokenizer = open_text(config)
    data, model, seed = config.dataset_config, config.model_config, config.training_config.seed
    count = count_sequences(tokens, model.seq_length)
    kept = count - (max(1, int(count * data.validation_share)) if data.validation_share else 0)
    if kept == 0:
        raise DatasetError(
            f"{tokens.name} has one sequence of {model.seq_length} tokens: nothing remains to train on when it is held out; set"
            " dataset_config.validation_share: 0, or name a longer text"
        )
    training = Sequences(
        tokens, model.seq_length, seed=seed, shuffle=data.shuffle, part=range(kept), vocab_size=model.vocab_size
    )
    held_out = Sequences(
        tokens,
        model.seq_length,
        seed=_HELD_OUT_SEED,
        shuffle=True,
        part=range(kept, count),
        vocab_size=model.vocab_size,
    )  # shuffled, so that the first few stand for all
    return OpenedText(tokens, training, held_out if held_out.count else None, tokenizer)


def _manual_file(cache_dir: Path) -> Path:
    """Return Python's manual as a file of text in the cache: a tokenizer reads files."""
    text = manual()
    path = cache_dir / f"{text.name}-{text.fingerprint()}.txt"
    if not path.exists():
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            unfinished = unfinished_beside(path)
            unfinished.write_bytes(text.read(0, text.size).tobytes())
            unfinished.replace(path)
        except OSError as exc:
            raise DatasetError(f"{path}: cannot be written ({exc}); set dataset_config.cache_dir") from None
    return path


def micro_batch_starts(
    consumed: int, *, batch_size: int, micro_batch_num: int, dp_rank: int, dp_size: int
) -> Iterator[int]:
    """Yield the first position of each of this rank's micro-batches in the step that begins at `consumed`.

    A step takes the positions [consumed, consumed + batch_size * micro_batch_num * dp_size), each by one rank.
    """
    for micro in range(micro_batch_num):
        yield consumed + (micro * dp_size + dp_rank) * batch_size


def permute(index: int, count: int, key: bytes) -> int:
    """Map [0, count) onto itself, in an order fixed by `key`, without storing it.

    A Feistel network over the next even number of bits; values beyond `count` are mapped again until one falls inside
    (4 times at most on average). Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains (2002), method 2.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for number in range(_ROUNDS):
            digest = hashlib.blake2b(
                bytes([number]) + right.to_bytes(8, "little"), key=key[:64], digest_size=8
            ).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        index = left << half | right
        if index < count:
            return index
