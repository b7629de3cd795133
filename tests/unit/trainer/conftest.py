"""A model and a run so small that a step takes a millisecond."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from ttp.trainer.config import Config, ModelConfig
from ttp.trainer.config_file import load_config

SMALL: dict[str, Any] = {
    "model_config.num_layers": 2,
    "model_config.hidden_size": 32,
    "model_config.ffn_hidden_size": 64,
    "model_config.seq_length": 16,
    "dataset_config.batch_size": 2,
    "training_config.training_iters": 6,
    "training_config.device": "cpu",
}


@pytest.fixture
def small_keys() -> dict[str, Any]:
    """Return the keys that make gpt_tiny small."""
    return dict(SMALL)


MakeConfig = Callable[..., Config]


@pytest.fixture
def small_model() -> ModelConfig:
    """Return a small model's configuration."""
    return ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=16)


@pytest.fixture
def small_config() -> MakeConfig:
    """Return a function that gives gpt_tiny, made small, with changed keys."""

    def make(changes: Mapping[str, Any] | None = None) -> Config:
        overrides = {**SMALL, **(changes or {})}
        return load_config(
            "gpt_tiny", [(key, "null" if value is None else str(value)) for key, value in overrides.items()]
        )

    return make
