"""Activations that backward computes anew instead of keeping them, and blocks that torch compiles.

Owns how a block of the model is run. torch's own checkpointing recomputes a block with the random numbers of its forward, so
losses and gradients have the bits that they would have had.

    full       a block keeps its input; backward runs the whole block again
    selective  a block keeps its input and what matrix products and attention gave; norms, activation functions, rotations and
               dropout are computed again
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..config.encoder_decoder_config import EncoderDecoderConfig
from ..config.schema import ModelConfig, TrainingConfig
from ..model.gpt import Transformer

_PRODUCTS = ("aten::mm", "aten::addmm")
_ATTENTION = "aten::_scaled_dot_product_"
"""Kernels that do not keep the attention matrix, whatever the device. Where torch has none, attention is computed again."""
_WHOLE: Callable[..., torch.Tensor] = partial(checkpoint, use_reentrant=False)


def prepare_blocks(chunks: Sequence[Transformer], model: ModelConfig, training: TrainingConfig) -> None:
    """Let every block of these chunks run as configured. Called once, before the first forward."""
    around = _around(model, training)
    for chunk in chunks:
        for number, block in zip(map(int, chunk.layers), chunk.blocks(), strict=True):
            if around is not None:
                block.around = around
            elif isinstance(model, EncoderDecoderConfig) and number in model.recomputed_layers:
                block.around = _WHOLE
            if training.compile:
                block.compile()
        if training.compile and chunk.embedding is not None:
            chunk.embedding.register_forward_hook(_arrived)


def _arrived(_: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Wait for an embedding that tensor-parallel ranks are still adding up: such a tensor, given to a compiled block, would get no
    gradient."""
    return output if type(output) is torch.Tensor else output.clone()


def _around(model: ModelConfig, training: TrainingConfig) -> Callable[..., torch.Tensor] | None:
    if training.recompute == "none":
        return None
    if training.recompute == "full":
        return _WHOLE
    keep = partial(_keep, draws=model.attention_dropout > 0)
    return partial(checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, keep))


def _keep(_: Any, operator: Any, *args: Any, draws: bool, **kwargs: Any) -> CheckpointPolicy:
    """Say of an operator whether its result is kept. Attention that draws random numbers is run again: were it left out, the
    dropout after it would draw the numbers that attention drew in the forward."""
    name = operator.name()
    if name in _PRODUCTS or (name.startswith(_ATTENTION) and not draws):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
