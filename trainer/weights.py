"""Whole weights by name, into a model of one process.

Owns the check that they are the model's. Reads no file.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ttp.errors import CheckpointMismatch

from .config import ModelConfig
from .model import GPT, build_model


@torch.no_grad()
def put_weights(model: GPT, weights: Mapping[str, torch.Tensor], whose: str) -> None:
    """Copy `weights` into all parameters, converting their type. Raises CheckpointMismatch naming the first difference; `whose`
    says where they are from."""
    parameters = dict(model.named_parameters())
    for name in sorted(parameters.keys() | weights.keys()):
        if name not in weights or name not in parameters:
            wanted = "is missing" if name not in weights else "is none of this model's"
            raise CheckpointMismatch(f"{whose}: {name!r} {wanted}: the weights are another model's")
        if parameters[name].shape != weights[name].shape:
            raise CheckpointMismatch(
                f"{whose}: {name!r} has shape {tuple(weights[name].shape)}, wanted {tuple(parameters[name].shape)}"
            )
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])


def model_of(config: ModelConfig, weights: Mapping[str, torch.Tensor], device: torch.device, whose: str) -> GPT:
    """Return the whole model on `device` with these weights, ready to evaluate."""
    model = build_model(config, 0, device)
    put_weights(model, weights, whose)
    return model.eval()
