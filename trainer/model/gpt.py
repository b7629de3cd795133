"""GPT: a decoder of pre-norm blocks, from GPT-2 to Llama by configuration.

Owns the model's mathematics on one device. Knows nothing of ranks, optimizers or files.

Shape suffixes: B batch, T tokens, D hidden size, H query heads, K key and value heads, E head size, F feed-forward size,
V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..config.schema import ModelConfig
from .experts import Experts

UNCOUNTED = -100
"""Target of a token that takes no part in the loss."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """A run of the model's layers, with what comes before the first and after the last."""

    first_layer: int
    stop_layer: int
    begins: bool
    """It has the embeddings, and takes tokens."""
    ends: bool
    """It has the last norm and the output, and gives logits."""


def stages(num_layers: int, count: int) -> tuple[PipelineStage, ...]:
    """Divide the layers into `count` stages as evenly as can be; the first ones get the remainder."""
    each, more = divmod(num_layers, count)
    return stages_that_stop_at([each * (i + 1) + min(i + 1, more) for i in range(count)])


def stages_that_stop_at(stops: Sequence[int]) -> tuple[PipelineStage, ...]:
    """Return the stages whose last layers are before these, in order."""
    last = len(stops) - 1
    return tuple(PipelineStage(start, stop, i == 0, i == last) for i, (start, stop) in enumerate(pairwise((0, *stops))))


class Transformer(nn.Module):
    """A run of blocks, with what comes before the first and after the last: a model, or a stage of it.

    Parameters are called the same in a stage as in the whole model.
    """

    config: ModelConfig
    stage: PipelineStage
    layers: nn.ModuleDict
    embedding: nn.Embedding | None
    output: nn.Linear | None
    sequence_ranks: int = 1
    """Ranks that each sequence is divided over between the layers."""

    def tied(self) -> list[nn.Module]:
        """Return the modules here that use the embedding's matrix, where they are one."""
        return [self.output] if self.output is not None else []

    def tie(self) -> None:
        """Let them use it."""
        if not self.config.untie_embeddings_and_output_weights:
            for module in self.tied():
                assert self.embedding is not None
                module.weight = self.embedding.weight

    def blocks(self) -> list[DecoderBlock]:
        """Return the layers here, in order."""
        return [cast(DecoderBlock, layer) for layer in self.layers.values()]

    @property
    def has_tied_copy(self) -> bool:
        """True for a later stage that has the first one's embedding matrix too."""
        return self.embedding is not None and not self.stage.begins

    @property
    def input_length(self) -> int:
        """Tokens of a sequence that the first stage takes."""
        return self.config.seq_length

    def passed_on(self, cut: int, batch: int) -> list[tuple[int, ...]]:
        """Return the shapes of what a stage that ends with layer `cut` - 1 gives to the next one."""
        return [(batch, self.config.seq_length // self.sequence_ranks, self.config.hidden_size)]

    def beside(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what every stage takes beside the stream, by the names of `forward`."""
        return {}


class GPT(Transformer):
    """tokens_BT -> logits_BTV; a stage of a pipeline: x_BTD -> x_BTD in between."""

    def __init__(
        self, config: ModelConfig, stage: PipelineStage | None = None, experts: Sequence[int] | None = None
    ) -> None:
        """experts: numbers of those that this rank has of each layer; None: all."""
        super().__init__()
        stage = stage or stages(config.num_layers, 1)[0]
        self.config, self.stage = config, stage
        tied = not config.untie_embeddings_and_output_weights
        self.embedding = None
        if stage.begins or (stage.ends and tied):
            self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions: nn.Embedding | None = None
        if stage.begins and config.position_embedding_type == "absolute":
            self.positions = nn.Embedding(config.seq_length, config.hidden_size)
        numbers = range(stage.first_layer, stage.stop_layer)
        here = range(config.num_experts or 0) if experts is None else experts
        self.layers = nn.ModuleDict({str(number): DecoderBlock(config, here) for number in numbers})
        self.norm = build_norm(config) if stage.ends else None
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if stage.ends else None
        self.tie()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: tokens_BT where the model begins, else x_BTD (T: this rank's part of the sequence)."""
        length = x.shape[1] * (1 if self.stage.begins else self.sequence_ranks)
        rotation = None
        if self.config.position_embedding_type == "rope":
            rotation = rotary_angles(length, self.config.head_size, self.config.rotary_base, x.device)
        if self.stage.begins:
            assert self.embedding is not None
            tokens_BT, x = x, self.embedding(x)
            if self.positions is not None:
                x = x + self.positions(torch.arange(length, device=tokens_BT.device))
            x = F.dropout(x, self.config.hidden_dropout, self.training)
        for layer in self.layers.values():
            x = layer(x, rotation)
        if self.norm is None or self.output is None:
            return x
        logits_BTV: torch.Tensor = self.output(self.norm(x))
        return logits_BTV


class DecoderBlock(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)).

    `causal`: a token attends to earlier ones only; else to all tokens that are `present`. `crosses`: in between it attends to those of
    a `memory` that are `present`.
    """

    def __init__(
        self, config: ModelConfig, experts: Sequence[int] = (), *, causal: bool = True, crosses: bool = False
    ) -> None:
        super().__init__()
        self.dropout = config.hidden_dropout
        self.attention_norm = build_norm(config)
        self.attention = Attention(config, causal)
        self.cross_attention_norm = build_norm(config) if crosses else None
        self.cross_attention = Attention(config, causal=False) if crosses else None
        self.feed_forward_norm = build_norm(config)
        self.feed_forward: nn.Module = FeedForward(config)
        if config.num_experts is not None:
            self.feed_forward = Experts(config, experts, FeedForward)
        self.around: Callable[..., torch.Tensor] = _directly
        """Called with the block's work and its arguments: what recomputes activations comes in here."""

    def forward(
        self,
        x_BTD: torch.Tensor,
        rotation: Rotation | None = None,
        memory_BSD: torch.Tensor | None = None,
        present_BS: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.around(self._work, x_BTD, rotation, memory_BSD, present_BS)

    def _work(
        self,
        x_BTD: torch.Tensor,
        rotation: Rotation | None,
        memory_BSD: torch.Tensor | None,
        present_BS: torch.Tensor | None,
    ) -> torch.Tensor:
        of_own = None if self.attention.causal else present_BS
        attended_BTD = self.attention(self.attention_norm(x_BTD), rotation, None, of_own)
        x_BTD = x_BTD + F.dropout(attended_BTD, self.dropout, self.training)
        if self.cross_attention is not None and self.cross_attention_norm is not None:
            attended_BTD = self.cross_attention(self.cross_attention_norm(x_BTD), None, memory_BSD, present_BS)
            x_BTD = x_BTD + F.dropout(attended_BTD, self.dropout, self.training)
        return x_BTD + F.dropout(self.feed_forward(self.feed_forward_norm(x_BTD)), self.dropout, self.training)


def _directly(work: Callable[..., torch.Tensor], *args: object) -> torch.Tensor:
    return work(*args)


class Attention(nn.Module):
    """Attention to x itself, or to a memory; H / K query heads share a key and value head."""

    def __init__(self, config: ModelConfig, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.heads, self.kv_heads, self.head_size = config.num_attention_heads, config.kv_heads, config.head_size
        self.dropout = config.attention_dropout
        self.wq = nn.Linear(config.hidden_size, self.heads * self.head_size, bias=config.use_bias)
        self.wk = nn.Linear(config.hidden_size, self.kv_heads * self.head_size, bias=config.use_bias)
        self.wv = nn.Linear(config.hidden_size, self.kv_heads * self.head_size, bias=config.use_bias)
        self.wo = nn.Linear(self.heads * self.head_size, config.hidden_size, bias=config.use_bias)

    def forward(
        self,
        x_BTD: torch.Tensor,
        rotation: Rotation | None = None,
        memory_BSD: torch.Tensor | None = None,
        present_BS: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`present_BS`: False for keys that nothing attends to."""
        seen = x_BTD if memory_BSD is None else memory_BSD
        # -1: with tensor parallelism a rank has some of the heads.
        q_BHTE = self.wq(x_BTD).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        k_BKTE = self.wk(seen).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        v_BKTE = self.wv(seen).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        if rotation is not None:
            q_BHTE, k_BKTE = rotate(q_BHTE, rotation), rotate(k_BKTE, rotation)
        y_BHTE = F.scaled_dot_product_attention(
            q_BHTE,
            k_BKTE,
            v_BKTE,
            None if present_BS is None else present_BS[:, None, None],
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
            enable_gqa=self.kv_heads != self.heads,
        )
        return cast(torch.Tensor, self.wo(y_BHTE.transpose(1, 2).flatten(2)))


class FeedForward(nn.Module):
    """down(act(up(x))), or down(silu(gate(x)) * up(x)) for swiglu."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.approximate = "tanh" if config.activation == "gelu_tanh" else "none"
        self.gate: nn.Linear | None = None
        if config.activation == "swiglu":
            self.gate = nn.Linear(config.hidden_size, config.ffn_size, bias=config.use_bias)
        self.up = nn.Linear(config.hidden_size, config.ffn_size, bias=config.use_bias)
        self.down = nn.Linear(config.ffn_size, config.hidden_size, bias=config.use_bias)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        h_BTF = self.up(x_BTD)
        h_BTF = F.gelu(h_BTF, approximate=self.approximate) if self.gate is None else F.silu(self.gate(x_BTD)) * h_BTF
        return cast(torch.Tensor, self.down(h_BTF))


Rotation = tuple[torch.Tensor, torch.Tensor]
"""(cos_TE, sin_TE), float32; element e turns with element e + E/2."""


def rotary_angles(length: int, head_size: int, base: float, device: torch.device, first: int = 0) -> Rotation:
    """Return the rotation of the positions [first, first + length). Source: Su et al., RoFormer (2021), section 3.2.2."""
    rates_E = base ** (-torch.arange(0, head_size, 2, dtype=torch.float32, device=device) / head_size)
    angles_TE = torch.outer(torch.arange(first, first + length, dtype=torch.float32, device=device), rates_E)
    angles_TE = torch.cat((angles_TE, angles_TE), dim=-1)
    return angles_TE.cos(), angles_TE.sin()


def rotate(x_BHTE: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate each pair of elements by its position's angle, in float32; keeps the type."""
    cos_TE, sin_TE = rotation
    x = x_BHTE.float()
    first, second = x.chunk(2, dim=-1)
    return (x * cos_TE + torch.cat((-second, first), dim=-1) * sin_TE).to(x_BHTE.dtype)


def build_norm(config: ModelConfig) -> nn.Module:
    if config.normalization == "RMSNorm":
        return nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps)


def token_loss(
    logits_BTV: torch.Tensor, targets_BT: torch.Tensor, reduction: str = "mean", *, in_float16: bool = False
) -> torch.Tensor:
    """Return the mean or sum of the tokens' cross entropies in nats; without those whose target is UNCOUNTED. Computed in float32;
    with `in_float16` each token's is computed in float16, which the logits must be, and only their sum in float32."""
    logits_RV, targets_R = logits_BTV.flatten(0, 1), targets_BT.flatten()
    if not in_float16:
        return F.cross_entropy(logits_RV.float(), targets_R, reduction=reduction, ignore_index=UNCOUNTED)
    assert logits_RV.dtype == torch.float16
    losses_R = F.cross_entropy(logits_RV, targets_R, reduction="none", ignore_index=UNCOUNTED)
    if isinstance(losses_R, DTensor):
        losses_R = losses_R.to_local()
    total = losses_R.float().sum()
    return total if reduction == "sum" else total / (targets_R != UNCOUNTED).sum()


Model = TypeVar("Model", bound=Transformer)


def build_model(
    config: ModelConfig,
    seed: int,
    device: torch.device,
    stage: PipelineStage | None = None,
    experts: Sequence[int] | None = None,
    split: Callable[[GPT], None] = lambda model: None,
) -> GPT:
    """Return a GPT, or a stage of it: see `built`."""
    return built(lambda: GPT(config, stage, experts), seed, device, split)


def built(
    make: Callable[[], Model], seed: int, device: torch.device, split: Callable[[Model], None] = lambda model: None
) -> Model:
    """Return a model, or a stage of it, on `device` in params_dtype, its weights fixed by `seed`.

    split: makes its parameters DTensors, before they have any memory.
    """
    with torch.device("meta"):
        model = make()
        model = model.to(DTYPES[model.config.params_dtype])
    split(model)
    model = model.to_empty(device=device)
    model.tie()
    initialize(model, seed)
    return model


@torch.no_grad()
def initialize(model: Transformer, seed: int) -> None:
    """Fill every parameter: norms with one, biases with zero, matrices from a normal distribution.

    Each depends on (seed, its own name) alone, and is drawn on the CPU in float32: neither the order of the parameters nor
    the device nor how they are spread over ranks changes a bit. Source: Radford et al., GPT-2 (2019), section 2.3.
    """
    config = model.config
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif "norm" in name:
            parameter.fill_(1.0)
        else:
            into_residual = name.endswith(("attention.wo.weight", "down.weight"))
            std = config.init_std / math.sqrt(2 * config.num_layers) if into_residual else config.init_std
            generator = torch.Generator().manual_seed(name_seed(seed, name))
            whole = torch.empty(parameter.shape).normal_(0.0, std, generator=generator)
            if isinstance(parameter, DTensor):  # every rank draws the same and keeps its part
                whole = distribute_tensor(
                    whole.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
                )
            parameter.copy_(whole)


def name_seed(seed: int, *names: object) -> int:
    """Return a 63-bit seed from `seed` and what it is for."""
    text = ":".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def count_parameters(config: ModelConfig) -> int:
    """Return the number of weights, without building the model."""
    hidden, ffn, kv = config.hidden_size, config.ffn_size, config.kv_heads * config.head_size
    query = config.num_attention_heads * config.head_size
    norm = hidden * (2 if config.normalization == "LayerNorm" else 1)
    up_matrices = 2 if config.activation == "swiglu" else 1
    feed_forward = (up_matrices + 1) * hidden * ffn
    if config.use_bias:
        feed_forward += up_matrices * ffn + hidden
    if config.num_experts is not None:
        feed_forward = config.num_experts * (feed_forward + hidden)  # a row of the router for each
    block = 2 * norm + 2 * hidden * query + 2 * hidden * kv + feed_forward
    if config.use_bias:
        block += hidden + query + 2 * kv
    total = config.vocab_size * hidden * (2 if config.untie_embeddings_and_output_weights else 1)
    if config.position_embedding_type == "absolute":
        total += config.seq_length * hidden
    return total + config.num_layers * block + norm
