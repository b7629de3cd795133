"""Pairs of token sequences of many lengths, and the encoder-decoder that trains on them in the tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ttp.trainer.config.encoder_decoder_config import EncoderDecoderConfig
from ttp.trainer.config.schema import Config, plain
from ttp.trainer.data.batches import OpenedText
from ttp.trainer.model.encoder_decoder import PAD
from ttp.trainer.model.gpt import UNCOUNTED

ENCODER, SOURCE = 2, 6
"""Layers of the encoder, and tokens of a source."""


class Pairs:
    """A function of the position: sources of 1 to SOURCE tokens, targets of 1 to `length`."""

    padded, count, name, size = True, 1000, "pairs", 1000

    def __init__(self, config: Config) -> None:
        self._vocab, self._length = config.model_config.vocab_size, config.model_config.seq_length

    def fingerprint(self) -> str:
        return "pairs"

    def epoch(self, position: int) -> int:
        return position // self.count

    def batch(self, first: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        source_BS = torch.stack([self._row(position, SOURCE, PAD) for position in range(first, first + size)])
        rows = [self._row(position + self.count, self._length, UNCOUNTED) for position in range(first, first + size)]
        return source_BS, torch.stack(rows)

    def counted(self, first: int, size: int) -> int:
        return int((self.batch(first, size)[1] != UNCOUNTED).sum())

    def _row(self, number: int, length: int, filling: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(3, self._vocab, (length,), generator=generator)
        tokens[1 + number % length :] = filling
        return tokens


def with_encoder_decoder(
    config: Config, keys: Mapping[str, Any]
) -> tuple[Config, Callable[[Config], OpenedText[Pairs]]]:
    """Return the configuration with an encoder-decoder of the GPT's sizes in its place, and what opens its data."""
    own: dict[str, Any] = {
        "encoder_layers": ENCODER,
        "source_length": SOURCE,
        "position_embedding_type": "absolute",
        "normalization": "LayerNorm",
        "activation": "gelu",
        "use_bias": True,
    }
    model = EncoderDecoderConfig(**{**plain(config.model_config), **own, **keys})
    changed = dataclasses.replace(config, model_config=model)
    return changed, lambda given: OpenedText(Pairs(given), Pairs(given), None, None)
