"""An encoder-decoder: torch.nn.Transformer between two embeddings and a projection."""

from __future__ import annotations

import math

import torch
from pairs import BEGIN, PAD

# B: sentences, S: source tokens, T: target tokens, D: width, V: target vocabulary


class Translator(torch.nn.Module):
    def __init__(self, source_size: int, target_size: int, width: int, heads: int, layers: int, longest: int) -> None:
        """`longest`: tokens of a sentence, begin and end included."""
        super().__init__()
        self.source = torch.nn.Embedding(source_size, width, padding_idx=PAD)
        self.target = torch.nn.Embedding(target_size, width, padding_idx=PAD)
        self.transformer = torch.nn.Transformer(
            width, heads, layers, layers, dim_feedforward=4 * width, dropout=0.1, batch_first=True
        )
        self.project = torch.nn.Linear(width, target_size)
        self.register_buffer("places_TD", sinusoids(longest, width), persistent=False)
        self.longest = longest

    def forward(self, source_BS: torch.Tensor, target_BT: torch.Tensor) -> torch.Tensor:
        """Return logits_BTV of the token after each target token."""
        return self.project(
            self.transformer(
                self._embed(self.source, source_BS),
                self._embed(self.target, target_BT),
                tgt_mask=torch.ones(target_BT.shape[1], target_BT.shape[1], dtype=torch.bool).triu(1),
                src_key_padding_mask=source_BS == PAD,
                tgt_key_padding_mask=target_BT == PAD,
                memory_key_padding_mask=source_BS == PAD,
            )
        )

    @torch.no_grad()
    def translate(self, source_BS: torch.Tensor) -> list[list[int]]:
        """Return the most likely tokens, one after the other, without begin."""
        target_BT = torch.full((source_BS.shape[0], 1), BEGIN)
        for _ in range(self.longest - 1):
            best_B1 = self(source_BS, target_BT)[:, -1:].argmax(2)
            target_BT = torch.cat([target_BT, best_B1], dim=1)
        return target_BT[:, 1:].tolist()

    def _embed(self, embedding: torch.nn.Embedding, tokens_BT: torch.Tensor) -> torch.Tensor:
        return embedding(tokens_BT) * math.sqrt(embedding.embedding_dim) + self.places_TD[: tokens_BT.shape[1]]


def sinusoids(length: int, width: int) -> torch.Tensor:
    """Return places_TD as in "Attention Is All You Need", section 3.5."""
    rate_D = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angle_TD = torch.arange(length)[:, None] * rate_D
    return torch.stack([angle_TD.sin(), angle_TD.cos()], dim=2).flatten(1)
