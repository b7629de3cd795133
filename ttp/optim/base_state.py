"""The user's torch optimizer, run on flat FP32 pieces of parameters.

Owns how a base optimizer is built over pieces and how its state comes to exist before the first step, with exactly the
values that it would have had by itself: so a checkpoint of step 0 has the same keys as any other, and a loader has
tensors to fill. Owns the JSON-able part of that state: how it is described, checked and put back. Never communicates.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ttp.checkpoint.format.manifest import check_json_value
from ttp.errors import CheckpointError, CheckpointMismatch, ConfigError
from ttp.inputs import checked
from ttp.optim.step_agreement.step_result import ScaleState

_FUSED = ("Adam", "AdamW", "SGD")
"""Bases whose fused kernel is the default where torch has one for the device."""
_NOT_ELEMENT_WISE = ("LBFGS", "Adafactor", "Muon", "SparseAdam")
_PLAIN = frozenset((bool, int, float, str, type(None)))
"""Most settings: done with at once, as there may be a param group for each parameter, and this is done in each step."""
KERNEL_CHOICES = ("fused", "foreach", "capturable", "differentiable")


def base_defaults(
    base: type[Optimizer], kwargs: Mapping[str, Any], device: torch.device
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments for `base` and all its hyper-parameters with them, the fused kernel chosen where torch has one for `device`.

    Raises ConfigError for a base whose update of an element depends on other elements, or that cannot start from
    existing state; whatever `base` itself raises for wrong arguments passes through.
    """
    if base.__name__ in _NOT_ELEMENT_WISE:
        raise ConfigError(
            f"base {base.__name__} is not element-wise: its update of an element depends on others, so its state cannot "
            f"be cut into shards; use AdamW, SGD, Adagrad, RMSprop or the like"
        )
    probe = torch.nn.Parameter(torch.zeros(1, device=device))
    chosen = dict(kwargs)
    if base.__name__ in _FUSED and not any(name in chosen for name in KERNEL_CHOICES):
        try:
            base([probe], **{**chosen, "fused": True})
            chosen["fused"] = True
        except (RuntimeError, TypeError):
            pass  # no fused kernel for this device (or in this torch): the base's own default
    defaults = dict(base([probe], **chosen).defaults)
    if defaults.get("differentiable"):
        raise ConfigError("differentiable=True cannot work on shards; leave it out")
    return chosen, defaults


def create_state(base: Optimizer) -> None:
    """Give every parameter of `base` its fresh state. Parameters carry FP32 values and `grad`; both keep their bits.

    Raises ConfigError when the fresh state cannot be known, or cannot be cut into shards.
    """
    make_state(base)
    _check_state(base)


def make_state(base: Optimizer) -> None:
    """The same for an optimizer whose state need not be cut: it may have any shape. Raises ConfigError when it cannot be known."""
    if isinstance(base, torch.optim.SGD):
        _create_momentum(base)
    elif hasattr(base, "_init_group"):
        # Every optimizer of torch creates its state lazily in `_init_group(group, list, list, ...)`.
        lists = len(inspect.signature(base._init_group).parameters) - 1
        for group in base.param_groups:
            base._init_group(group, *([] for _ in range(lists)))
    else:
        _create_by_probing(base)


def state_kinds(
    base: type[Optimizer], kwargs: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], device: torch.device
) -> list[dict[str, bool]]:
    """Return, for each param group, its state's keys and whether each is 0-d (one number for a whole parameter).

    Found on parameters of one element, so that a rank knows it of groups of which it holds nothing.
    """
    probes = [torch.nn.Parameter(torch.zeros(1, device=device)) for _ in groups]
    for probe in probes:
        probe.grad = torch.zeros_like(probe)
    optimizer = base([{**group, "params": [probe]} for group, probe in zip(groups, probes, strict=True)], **kwargs)
    create_state(optimizer)
    return [
        {key: value.dim() == 0 for key, value in optimizer.state[probe].items() if torch.is_tensor(value)}
        for probe in probes
    ]


def _create_momentum(base: torch.optim.SGD) -> None:
    """Zeros are what SGD's first step makes of no buffer, as long as dampening is 0: buf = momentum * 0 + grad."""
    for group in base.param_groups:
        if not group["momentum"]:
            continue
        if group["dampening"]:
            raise ConfigError(
                f"SGD with dampening {group['dampening']} treats its first step differently from a step with a zero "
                f"buffer; use dampening=0"
            )
        for param in group["params"]:
            base.state[param]["momentum_buffer"] = torch.zeros_like(param)


@torch.no_grad()
def _create_by_probing(base: Optimizer) -> None:
    """Let a base that we do not know make its state in a step of zero gradients that moves nothing; undo the step count."""
    params = [param for group in base.param_groups for param in group["params"]]
    kept = [(param, param.detach().clone(), param.grad) for param in params]
    settings = [dict(group) for group in base.param_groups]
    for param in params:
        param.zero_()
        param.grad = torch.zeros_like(param)
    for group in base.param_groups:
        group.update({name: 0.0 for name in ("lr", "weight_decay") if name in group})
    base.step()
    for group, setting in zip(base.param_groups, settings, strict=True):
        group.update(setting)
    for param, values, grad in kept:
        param.copy_(values)
        param.grad = grad
        for key, value in base.state[param].items():
            if torch.is_tensor(value) and value.dim() == 0 and key == "step":
                value.zero_()
            elif torch.is_tensor(value) and bool(value.any()):
                raise ConfigError(
                    f"base {type(base).__name__}: the fresh value of its state {key!r} is not zero and cannot be known; "
                    f"give the class an `_init_group(group)` method that creates the state"
                )


def _check_state(base: Optimizer) -> None:
    for group in base.param_groups:
        for param in group["params"]:
            for key, value in base.state[param].items():
                if value is None or (torch.is_tensor(value) and value.shape in (param.shape, torch.Size(()))):
                    continue
                got = f"shape {tuple(value.shape)}" if torch.is_tensor(value) else f"a {type(value).__name__}"
                raise ConfigError(
                    f"base {type(base).__name__}: its state {key!r}: got {got}, expected a tensor of the parameter's shape or "
                    f"a 0-d tensor, so that it can be cut into shards"
                )


def hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a param group without its parameters, tensors (a tensor learning rate) and NumPy's scalars as numbers."""
    return {key: _number(value) for key, value in group.items() if key not in ("params", "param_names")}


def settings_of(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each group's hyper-parameters. Raises ConfigError for a value that no checkpoint can carry: now, not at the fault."""
    settings = [hyper_parameters(group) for group in groups]
    for number, group in enumerate(settings):
        for key, value in group.items():
            if type(value) in _PLAIN:
                continue
            try:
                check_json_value(value, f"param_groups[{number}].{key}")
            except CheckpointError as error:
                raise ConfigError(f"{error}. Keep it outside the param groups, or as such a value") from None
    return settings


def _number(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_number, value))
    return value.item() if torch.is_tensor(value) or getattr(value, "ndim", None) == 0 else value


def described(
    step: int, scale: ScaleState, groups: Sequence[Mapping[str, Any]], learning_rates: Sequence[float]
) -> dict[str, Any]:
    """Return the JSON-able part of the state of `step`; `learning_rates`, where given, take the place of the groups' own."""
    listed = [{k: list(v) if isinstance(v, tuple) else v for k, v in group.items()} for group in groups]
    for group, rate in zip(listed, learning_rates, strict=False):
        group["lr"] = rate
    forgiven = {"forgiven": scale.forgiven} if scale.forgiven else {}  # with hysteresis only
    return {
        "step": step,
        "loss_scale": {"scale": scale.scale, "good_steps": scale.good_steps, **forgiven},
        "param_groups": listed,
    }


def check_host_state(groups: Sequence[Mapping[str, Any]], saved: dict[str, Any], scales: bool = False) -> None:
    """Check what a checkpoint has of `described` before anything is loaded: each setting is of the kind, and a list as long, as in `groups`; where
    this run `scales` its loss, so did that one. A setting that is None in `groups`, or that one side lacks, may be anything; the number of groups
    is for `restore_hyper_parameters`. Raises ValueError naming the key's path."""
    listed = checked.items(*checked.field(saved, "param_groups", ""))
    for group, (item, path) in zip(groups, listed, strict=False):
        for key, value in checked.mapping(item, path).items():
            if key != "params" and key not in KERNEL_CHOICES:
                own = group.get(key, group.get("lr") if key == "initial_lr" else None)
                _check_setting(own, value, f"{path}.{key}")
    if scales:
        scale = checked.mapping(*checked.field(saved, "loss_scale", ""))
        if checked.number(*checked.field(scale, "scale", "loss_scale")) <= 0:
            raise checked.Invalid("loss_scale.scale", scale["scale"], "a finite number above 0")
        checked.integer(*checked.field(scale, "good_steps", "loss_scale"))
        checked.integer(scale.get("forgiven", 0), "loss_scale.forgiven")


def _check_setting(own: object, value: object, path: str) -> None:
    """Check that a saved value can take the place of this run's own. Raises Invalid."""
    match own:
        case torch.Tensor():
            _check_setting(own.item(), value, path)
            try:
                torch.empty((), dtype=own.dtype).fill_(value)  # type: ignore[call-overload]
            except (RuntimeError, ValueError, OverflowError):
                raise checked.Invalid(path, value, f"a number that a tensor of {own.dtype} can hold") from None
        case bool():
            checked.boolean(value, path)
        case int() | float():
            fits = isinstance(value, float) or (type(value) is int and abs(value) <= checked.INT64_MAX)
            if not fits:
                raise checked.Invalid(path, value, "a number")
        case str():
            checked.string(value, path)
        case list() | tuple():
            found = list(checked.items(value, path))
            if own and len(found) != len(own):
                raise checked.Invalid(path, value, f"a list of length {len(own)}")
            for mine, (item, where) in zip(own, found, strict=False):
                _check_setting(mine, item, where)
        case Mapping():
            checked.mapping(value, path)


def saved_scale(saved: Mapping[str, Any]) -> ScaleState:
    """Return the loss scale that `described` has written."""
    scale = saved["loss_scale"]
    return ScaleState(float(scale["scale"]), int(scale["good_steps"]), int(scale.get("forgiven", 0)))


def restore_hyper_parameters(groups: Sequence[dict[str, Any]], saved: Sequence[Mapping[str, Any]], step: int) -> None:
    """Put the values saved with `step` back into `groups`, as torch's load_state_dict does, those too that this run's have not yet (a
    scheduler's `initial_lr`); the choice of kernel stays this run's own, and a number that is a tensor stays that tensor. Raises CheckpointMismatch for another arrangement of param groups."""
    if len(saved) != len(groups):
        raise CheckpointMismatch(
            f"the checkpoint of step {step} has {len(saved)} param groups, the optimizer has {len(groups)}; group the"
            " parameters as in the run that wrote it"
        )
    for group, old in zip(groups, saved, strict=True):
        for key, value in old.items():
            if key == "params" or key in KERNEL_CHOICES:
                continue
            own = group.get(key)
            if torch.is_tensor(own):
                own.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(own, tuple) else value
