"""The optimizer state of a trainer without TTP: torch's form, and Megatron's around it, read and written.

    torch             state (by number), param_groups
    Megatron, 16 bit  optimizer (torch's form), fp32_from_fp16_params, grad_scaler
    distributed       optimizer (param_groups alone), grad_scaler; the tensors are in a file of their own (`param_state.py`)

Owns the translation between numbers and names. Tensors are shared, not copied, so that a file does not grow. Never reads the
shards of older distributed optimizers, which wrote one file for each data-parallel rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ttp.checkpoint.format.keys import model_key, optim_state_key
from ttp.errors import CheckpointMismatch
from ttp.mindio.state_files.whole_state import WholeState

_SHARDED = ("shard_fp32_from_float16_groups", "param_state", "param_state_sharding_type")

Order = Sequence[Sequence[tuple[str, torch.nn.Parameter]]]
"""Name and parameter of each param group of the trainer's own optimizer, in its order."""


def entries(state: WholeState, order: Order, per_group: int) -> dict[str, Any]:
    """Return what the trainer's own optimizer loads. per_group: param groups of `state` for each of the trainer's."""
    by_name: dict[str, dict[str, torch.Tensor]] = state.to_dict()["moments"]
    numbered: dict[int, dict[str, torch.Tensor]] = {}
    groups: list[dict[str, Any]] = []
    for number, members in enumerate(order):
        hyper = {key: value for key, value in state.host["param_groups"][number * per_group].items()}
        if "betas" in hyper:
            hyper["betas"] = tuple(hyper["betas"])
        first = len(numbered)
        counts = [by_name[name]["step"] for name, _ in members if "step" in by_name.get(name, {})]
        if counts:  # Apex counts once for a group
            hyper["step"] = int(counts[0])
        for name, _ in members:
            numbered[len(numbered)] = by_name.get(name, {})
        groups.append({**hyper, "params": list(range(first, len(numbered)))})
    inner = {"state": {key: value for key, value in numbered.items() if value}, "param_groups": groups}
    masters = [[state.master(name) for name, param in members if param.dtype != torch.float32] for members in order]
    scale = state.host["loss_scale"]
    return {
        **inner,
        "optimizer": inner,
        "fp32_from_fp16_params": masters,
        "grad_scaler": {
            "scale": torch.tensor([scale["scale"]]),
            "growth_tracker": scale["good_steps"],
            "hysteresis_tracker": 0,
        },
    }


def is_native(found: Mapping[str, Any]) -> bool:
    """True for what an optimizer other than ttp.mindio's has returned as its state_dict."""
    return "ttp_form" not in found and ("param_groups" in found or "optimizer" in found)


def is_distributed(found: Mapping[str, Any]) -> bool:
    """True for what Megatron's distributed optimizer returns: no tensors, and param groups without parameters."""
    inner = found.get("optimizer")
    if not isinstance(inner, Mapping) or "state" in inner or not isinstance(groups := inner.get("param_groups"), list):
        return False
    return not any("params" in group for group in groups)


def read_distributed(
    found: Mapping[str, Any], order: Order, per_group: int, host: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the host state, and the step count of each parameter by name. Raises CheckpointMismatch."""
    groups = found["optimizer"]["param_groups"]
    if len(groups) != len(order) or not all(isinstance(group.get("step"), int) for group in groups):
        raise CheckpointMismatch(
            f"invalid optimizer state: got {len(groups)} param groups with the keys {sorted({key for one in groups for key in one})},"
            f" expected {len(order)} with a 'step' each, as Apex's FusedAdam keeps it. Group the parameters as in the run that wrote it"
        )
    steps = {name: group["step"] for members, group in zip(order, groups, strict=True) for name, _ in members}
    return _host(found, groups, per_group, host), steps


def read(found: Mapping[str, Any], order: Order, per_group: int, host: Mapping[str, Any]) -> WholeState:
    """Return the state of the trainer's own optimizer, as that of step 0: it does not know the iteration. Raises CheckpointMismatch.

    Masters that it has not are the model's parameters, which the trainer has loaded before. host: this optimizer's host state now.
    """
    if sharded := [key for key in _SHARDED if key in found]:
        raise CheckpointMismatch(
            f"invalid optimizer state: got {sharded[0]!r}, which has one data-parallel rank's shards, expected the whole state. Load"
            " without the optimizer's state, then call optimizer.reload_model_params(): the moments start anew"
        )
    inner = found.get("optimizer", found)
    groups, states = inner.get("param_groups"), inner.get("state")
    sizes = [len(members) for members in order]
    if not isinstance(groups, list) or [len(group["params"]) for group in groups] != sizes:
        got = [len(group["params"]) for group in groups] if isinstance(groups, list) else type(groups).__name__
        raise CheckpointMismatch(
            f"invalid optimizer state: got param groups of {got} parameters, expected {sizes}. Group the parameters as in the run that"
            " wrote it"
        )
    masters = found.get("fp32_from_fp16_params", [])
    tensors: dict[str, torch.Tensor] = {}
    for number, (members, group) in enumerate(zip(order, groups, strict=True)):
        halves = iter(masters[number] if number < len(masters) else ())
        for (name, param), key in zip(members, group["params"], strict=True):
            master = next(halves, None) if param.dtype != torch.float32 else None
            tensors[model_key(name)] = (param if master is None else master).detach().float().cpu().clone()
            for part, value in _state_of(states, key, group).items():
                tensors[optim_state_key(name, part)] = value.detach().float().cpu()
    return WholeState(0, tensors, _host(found, groups, per_group, host))


def _host(
    found: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], per_group: int, host: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the host state of step 0 with the hyper-parameters and the loss scale that `found` has."""
    hyper = [
        {part: groups[number // per_group].get(part, value) for part, value in before.items()}
        for number, before in enumerate(host["param_groups"])
    ]
    return {**host, "step": 0, "param_groups": hyper, "loss_scale": _scale(found, host)}


def _state_of(states: Any, key: Any, group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    state = dict(states.get(key, {})) if isinstance(states, Mapping) else {}
    if state and "step" not in state and "step" in group:  # Apex counts once for a group
        state["step"] = group["step"]
    return {part: torch.as_tensor(value) for part, value in state.items() if value is not None}


def _scale(found: Mapping[str, Any], host: Mapping[str, Any]) -> Mapping[str, Any]:
    scaler = found.get("grad_scaler")
    if not isinstance(scaler, Mapping) or "scale" not in scaler:
        known: Mapping[str, Any] = host["loss_scale"]
        return known
    return {"scale": float(scaler["scale"]), "good_steps": int(scaler.get("growth_tracker", 0))}
