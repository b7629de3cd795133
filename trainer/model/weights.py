"""A whole model in one process, with the weights of a checkpoint of any layout or of whatever else has them by name.

Owns what a checkpoint of this trainer says of its model, and the check that weights are the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch

import ttp
from ttp.errors import CheckpointMismatch, ConfigError

from ..config.schema import ModelConfig
from .gpt import GPT, build_model


@dataclass(frozen=True, slots=True)
class Trained:
    """What a checkpoint holds of a model."""

    checkpoint: ttp.Checkpoint
    config: ModelConfig
    tokenizer: str | None
    """tokenizer.BYTES, the path of a tokenizer, or None: trained on ids of unknown meaning."""


def open_trained(path: str, key: str | None = None) -> Trained:
    """Return the newest valid checkpoint of an output folder or a folder of checkpoints, or the one at `path`. `key`:
    as `ttp.open_checkpoint` takes it. Raises CheckpointError."""
    root = Path(path)
    below = root / "checkpoints"
    checkpoint = ttp.open_checkpoint(below if below.is_dir() else root, key=key)
    saved = checkpoint.layout.get("model_config")
    known = {field.name for field in fields(ModelConfig)}
    if not isinstance(saved, dict) or not saved.keys() <= known:
        raise CheckpointMismatch(
            f"{checkpoint.path}: its layout has no model_config that this trainer knows: it was written by another trainer"
        )
    try:
        config = ModelConfig(**saved)
    except (ConfigError, TypeError) as exc:
        raise CheckpointMismatch(f"{checkpoint.path}: its model_config is none of this trainer's: {exc}") from None
    tokenizer = checkpoint.layout.get("tokenizer")
    return Trained(checkpoint, config, None if tokenizer is None else str(tokenizer))


@torch.no_grad()
def put_weights(model: GPT, weights: Mapping[str, torch.Tensor], whose: str) -> None:
    """Copy `weights` into all parameters, converting their type. Raises CheckpointMismatch naming the first difference; `whose`
    says where they are from."""
    parameters = dict(model.named_parameters())
    for name in sorted(parameters.keys() | weights.keys()):
        if name not in weights or name not in parameters:
            expected = "is missing" if name not in weights else "is not one of this model's"
            raise CheckpointMismatch(f"{whose}: {name!r} {expected}: the weights are another model's")
        if parameters[name].shape != weights[name].shape:
            raise CheckpointMismatch(
                f"{whose}: {name!r} has shape {tuple(weights[name].shape)}, expected {tuple(parameters[name].shape)}"
            )
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])


def model_of(config: ModelConfig, weights: Mapping[str, torch.Tensor], device: torch.device, whose: str) -> GPT:
    """Return the whole model on `device` with these weights, ready to evaluate."""
    model = build_model(config, 0, device)
    put_weights(model, weights, whose)
    return model.eval()
