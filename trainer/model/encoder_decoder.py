"""Encoder-decoder: the GPT's blocks twice, with attention from the decoder to what the encoder has made of the source.

Owns this model's mathematics on one device, and what of it travels between the stages of a pipeline. Source: Vaswani et al.,
Attention Is All You Need (2017), section 3, with norms before the blocks.

Layers are numbered through: those of the encoder first. Shape suffixes as in `model.py`, and S source tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..config.encoder_decoder_config import EncoderDecoderConfig
from .gpt import UNCOUNTED, DecoderBlock, PipelineStage, Transformer, build_norm, stages

PAD, BEGIN, END = 0, 1, 2
"""Tokens that every vocabulary of an encoder-decoder has."""


class EncoderDecoder(Transformer):
    """source_BS, and beside it present_BS and target_BT -> logits_BTV.

    A stage of a pipeline takes and gives x_BSD as long as it encodes, memory_BSD and y_BTD while it decodes, and y_BTD where only the
    output follows. The target is embedded where the first layer of the decoder is, so that it need not be sent.
    """

    config: EncoderDecoderConfig

    def __init__(self, config: EncoderDecoderConfig, stage: PipelineStage | None = None) -> None:
        super().__init__()
        stage = stage or stages(config.num_layers, 1)[0]
        self.config, self.stage = config, stage
        encoder, width = config.encoder_layers, config.hidden_size
        tied = not config.untie_embeddings_and_output_weights
        begins_decoder = stage.first_layer <= encoder < stage.stop_layer
        self.embedding = None
        if stage.begins or (tied and (begins_decoder or stage.ends)):
            self.embedding = nn.Embedding(config.vocab_size, width)
        self.positions = nn.Embedding(config.source_length, width) if stage.begins else None
        self.target_embedding = nn.Embedding(config.vocab_size, width) if begins_decoder else None
        self.target_positions = nn.Embedding(config.seq_length, width) if begins_decoder else None
        self.layers = nn.ModuleDict(
            {
                str(number): DecoderBlock(config, causal=number >= encoder, crosses=number >= encoder)
                for number in range(stage.first_layer, stage.stop_layer)
            }
        )
        self.encoder_norm = build_norm(config) if stage.first_layer < encoder <= stage.stop_layer else None
        self.memory = nn.Identity()
        """What all layers of the decoder share goes through it once."""
        self.norm = build_norm(config) if stage.ends else None
        self.output = nn.Linear(width, config.vocab_size, bias=False) if stage.ends else None
        self.tie()

    def tied(self) -> list[nn.Module]:
        return [module for module in (self.target_embedding, self.output) if module is not None]

    @property
    def input_length(self) -> int:
        return self.config.source_length

    def passed_on(self, cut: int, batch: int) -> list[tuple[int, ...]]:
        source = (batch, self.config.source_length, self.config.hidden_size)
        target = (batch, self.config.seq_length, self.config.hidden_size)
        if cut <= self.config.encoder_layers:
            return [source]
        return [target] if cut == self.config.num_layers else [source, target]

    def beside(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> dict[str, torch.Tensor]:
        """The target begins with BEGIN and is what is to be said, one place later."""
        begin_B1 = torch.full_like(targets_BT[:, :1], BEGIN)
        target_BT = torch.cat((begin_B1, targets_BT[:, :-1].masked_fill(targets_BT[:, :-1] == UNCOUNTED, PAD)), dim=1)
        return {"target_BT": target_BT, "present_BS": tokens_BT != PAD}

    def forward(
        self, *stream: torch.Tensor, target_BT: torch.Tensor, present_BS: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """`stream`: source_BS where the model begins, else what the stage before gave."""
        config, encoder = self.config, self.config.encoder_layers
        x, y = stream[0], stream[-1]
        if self.embedding is not None and self.positions is not None:
            x = self._embed(self.embedding, self.positions, x)
        for layer in self.blocks()[: max(0, encoder - self.stage.first_layer)]:
            x = layer(x, None, None, present_BS)
        if self.encoder_norm is not None:
            x = self.encoder_norm(x)
        if self.target_embedding is not None and self.target_positions is not None:
            y = self._embed(self.target_embedding, self.target_positions, target_BT)
        memory = self.memory(x) if self.stage.stop_layer > max(encoder, self.stage.first_layer) else x
        for layer in self.blocks()[max(0, encoder - self.stage.first_layer) :]:
            y = layer(y, None, memory, present_BS)
        if self.norm is not None and self.output is not None:
            logits_BTV: torch.Tensor = self.output(self.norm(y))
            return logits_BTV
        if self.stage.stop_layer <= encoder:
            return x
        return y if self.stage.stop_layer == config.num_layers else (x, y)

    def _embed(self, embedding: nn.Embedding, positions: nn.Embedding, tokens: torch.Tensor) -> torch.Tensor:
        x = embedding(tokens) + positions(torch.arange(tokens.shape[1], device=tokens.device))
        return F.dropout(x, self.config.embedding_dropout, self.training)


def count_parameters(config: EncoderDecoderConfig) -> int:
    """Return the number of weights."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in EncoderDecoder(config).parameters())
