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
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from .config import ModelConfig, TrainingConfig
from .model import GPT

_PRODUCTS = ("mm", "addmm")
_ATTENTION = (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
)  # fmt: skip
"""The kernels that do not keep the attention matrix. Where another one runs, attention is computed again."""


def prepare_blocks(chunks: Sequence[GPT], model: ModelConfig, training: TrainingConfig) -> None:
    """Let every block of these chunks run as configured. Called once, before the first forward."""
    around = _around(model, training)
    for chunk in chunks:
        for block in chunk.blocks():
            if around is not None:
                block.around = around
            if training.compile:
                block.compile()


def _around(model: ModelConfig, training: TrainingConfig) -> Callable[..., torch.Tensor] | None:
    if training.recompute == "none":
        return None
    if training.recompute == "full":
        return partial(checkpoint, use_reentrant=False)
    kept = kept_operators(model.attention_dropout > 0)
    return partial(checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, kept))


def kept_operators(attention_draws: bool) -> list[Any]:
    """Return the operators whose results `selective` keeps. Attention that draws random numbers is run again: were it left out,
    the dropout after it would draw the numbers that attention drew in the forward."""
    names = _PRODUCTS if attention_draws else (*_PRODUCTS, *_ATTENTION)
    return [getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name)]
