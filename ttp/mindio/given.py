"""What a trainer gives to the optimizer of the facade: the checks of its arguments, its parameters' names, its base.

Owns the translation of a torch optimizer into a replica optimizer's arguments. Never changes what was given.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ttp.errors import ConfigError
from ttp.mindio.model_parallel import ModelParallel
from ttp.optim.base_state import KERNEL_CHOICES


def check(optimizer: torch.optim.Optimizer, fp16: bool, bf16: bool, params_dtype: torch.dtype) -> None:
    """Raise ConfigError for arguments that contradict each other."""
    expected = torch.float16 if fp16 else torch.bfloat16 if bf16 else torch.float32
    if (fp16 and bf16) or params_dtype != expected:
        raise ConfigError(
            f"fp16 is {fp16}, bf16 is {bf16} and params_dtype is {params_dtype}: they contradict each other"
        )
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if param.dtype not in (params_dtype, torch.float32):
            raise ConfigError(
                f"params_dtype is {params_dtype}, but a parameter of shape {tuple(param.shape)} is {param.dtype}"
            )
    if optimizer.state:
        raise ConfigError("the optimizer has state already: give TTPReplicaOptimizer a fresh one, and load through it")


def check_divergence(choice: str) -> None:
    """Raise ConfigError for what cannot be done about replicas that differ."""
    if choice == "repair":
        raise ConfigError(
            "invalid on_divergence: got 'repair', expected 'report' or 'stop'. Two ranks hold each shard here, and neither can be proven wrong"
        )
    if choice not in ("report", "stop"):
        raise ConfigError(f"invalid on_divergence: got {choice!r}, expected 'report' or 'stop'")


def named(models: Sequence[torch.nn.Module], optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.nn.Parameter]]:
    """Return name and parameter of all that the optimizer updates, in the models' order."""
    expected = {id(param) for group in optimizer.param_groups for param in group["params"]}
    found = [
        (f"model{number}.{name}" if len(models) > 1 else name, param)
        for number, model in enumerate(models)
        for name, param in model.named_parameters()
        if id(param) in expected
    ]
    if len(found) != len(expected):
        raise ConfigError(
            f"the optimizer has {len(expected)} parameters, of which the models name {len(found)}: pass all models whose"
            " parameters it updates"
        )
    return found


def groups(optimizer: torch.optim.Optimizer, names: Mapping[int, str], place: ModelParallel) -> list[dict[str, Any]]:
    """Return the param groups with names.

    With expert parallelism every group is there twice, without and with experts, on every rank: experts have another
    data-parallel group.
    """
    found: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", *KERNEL_CHOICES)}
        for expert in (False, True) if place.expert_size > 1 else (False,):
            params = [param for param in group["params"] if (place.process_group(param) is not None) == expert]
            own = {"process_group": place.expert_data_group} if expert else {}
            found.append({**settings, **own, "params": [(names[id(param)], param) for param in params]})
    return found


def base_of(optimizer: torch.optim.Optimizer) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class of `optimizer` and the arguments that make one like it."""
    known = inspect.signature(type(optimizer).__init__).parameters
    kwargs = {
        key: value
        for key, value in optimizer.defaults.items()
        if key in known and not (key in KERNEL_CHOICES and not value)
    }
    return type(optimizer), kwargs
