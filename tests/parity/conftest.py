"""Small random models of transformers, of every shape that ours has too."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here may ask a network
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

CLASSES: dict[str, tuple[Any, Any]] = {
    "gpt2": (GPT2Config, GPT2LMHeadModel),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
}
COMMON: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": 307, "n_positions": 24, "n_embd": 48, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "llama": {
        "vocab_size": 307, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 24,
    },
    "mixtral": {
        "vocab_size": 307, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 24,
    },
}  # fmt: skip

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2-3-heads": ("gpt2", {"n_head": 3, "n_layer": 3}),
    "gpt2-1-head": ("gpt2", {"n_head": 1, "n_inner": 100}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False, "layer_norm_epsilon": 1e-3}),
    "gpt2-gelu": ("gpt2", {"activation_function": "gelu", "n_embd": 35, "n_head": 7}),
    "llama": ("llama", {}),
    "llama-gqa1": ("llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-3}),
    "llama-gqa2": ("llama", {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama-gqa4-tied": ("llama", {"num_key_value_heads": 4, "num_attention_heads": 8, "tie_word_embeddings": True}),
    "llama-3-heads": ("llama", {"num_attention_heads": 3, "hidden_size": 30, "intermediate_size": 17}),
    "llama-7-heads": ("llama", {"num_attention_heads": 7, "hidden_size": 42, "num_key_value_heads": 1}),
    "llama-wide-heads": ("llama", {"head_dim": 20, "num_key_value_heads": 2}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-some-biases": ("llama", {"attention_bias": True}),
    "mixtral": ("mixtral", {}),
    "mixtral-1-of-3": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "num_key_value_heads": 1}),
    "mixtral-3-of-5-tied": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3, "tie_word_embeddings": True}),
    "mixtral-3-heads": ("mixtral", {"num_attention_heads": 3, "num_key_value_heads": 3, "num_hidden_layers": 3}),
}  # fmt: skip
"""name: (family, what differs from `COMMON`)."""

MakeTheirs = Callable[..., Any]


@pytest.fixture
def make_theirs() -> MakeTheirs:
    """Return a function that makes a model of transformers of a shape, its weights and biases random."""

    def make(shape: str, **more: Any) -> Any:
        family, changes = SHAPES[shape]
        config_class, model_class = CLASSES[family]
        torch.manual_seed(11)
        config = config_class(**{**COMMON[family], **changes, **more}, bos_token_id=None, eos_token_id=None)
        model = model_class(config).float().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():  # zero biases and unit norms would hide a mix-up
                around = 1.0 if "norm" in name or "ln_" in name else 0.0
                parameter.normal_(around, 0.2)
        return model

    return make
