"""The trainer's host state: schedulers and whatever else has `state_dict` and `load_state_dict`, as JSON and back.

Taken when a step's gradients are ready, before its update: so every survivor has it, wherever it stood when another died. What
the trainer does between that update and the next step is done again on resume for `schedulers` (their `step()`); what stands in
`state` is given back as it was. The values of one rank count for all.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ttp.adopt.trainer_state.ticks import MAX_TICKS, Ticks
from ttp.errors import CheckpointMismatch, ConfigError
from ttp.inputs import checked

MAX_TENSOR_BYTES = 1 << 16
"""Host state rides in the manifest: a generator's state does, a model does not."""

_TAG = "__ttp__"


class Stateful(Protocol):
    """What torch's own checkpoints call so too."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class HostObjects:
    """The schedulers and stateful objects of one trainer."""

    def __init__(self, schedulers: Sequence[Any], state: Mapping[str, Stateful]) -> None:
        """`schedulers`: `step()` follows every update. Raises ConfigError for an object without the two methods."""
        self._schedulers = [Ticks(scheduler) for scheduler in schedulers]
        self._state = dict(state)
        for name, each in [*((f"schedulers[{i}]", s) for i, s in enumerate(schedulers)), *state.items()]:
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise ConfigError(
                    f"{name}: got a {type(each).__name__}, expected an object with state_dict() and load_state_dict()"
                )
        for scheduler in schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                raise ConfigError(
                    "ReduceLROnPlateau follows an evaluation and not every update: give it as state={...}, not in schedulers"
                )

    @property
    def has_schedules(self) -> bool:
        return bool(self._schedulers)

    @property
    def has_state(self) -> bool:
        """True when there is more than schedulers."""
        return bool(self._state)

    def take(self, step: int) -> dict[str, Any]:
        """Return everything as JSON values, `step` being READY (0: before the first). Raises ConfigError for what JSON cannot carry."""
        if step:
            for each in self._schedulers:
                each.count()
        return {
            "schedulers": [
                to_json(t.scheduler.state_dict(), f"schedulers[{i}]") for i, t in enumerate(self._schedulers)
            ],
            "ticks": [each.ticks for each in self._schedulers],
            "early": [each.early for each in self._schedulers],
            "state": {name: to_json(each.state_dict(), name) for name, each in self._state.items()},
        }

    def begin_pass(self) -> None:
        """A forward pass is about to begin."""
        for each in self._schedulers:
            each.begin_pass()

    def step_back(self) -> None:
        """The step in flight is given up: a GradScaler forgets that it has unscaled this step's gradients, which no state_dict has."""
        for each in self._state.values():
            if isinstance(each, torch.amp.GradScaler):
                each._per_optimizer_states.clear()

    def give_back(self, taken: Mapping[str, Any], *, updated: bool) -> None:
        """Load what `take` returned. `updated`: an update has followed it, so the schedulers take their step after it.

        Raises CheckpointMismatch when other objects were saved.
        """
        saved, expected = taken.get("schedulers", []), len(self._schedulers)
        if len(saved) != expected or set(taken.get("state", {})) != set(self._state):
            raise CheckpointMismatch(
                f"the checkpoint has {len(saved)} schedulers and state of {sorted(taken.get('state', {}))}; this run has {expected}"
                f" and {sorted(self._state)}: give ttp.protect the objects of the run that wrote it"
            )
        ticks = taken.get("ticks", [None] * expected)  # older checkpoints have none
        early = taken.get("early", [False] * expected)
        for tick, value, *known in zip(self._schedulers, saved, ticks, early, strict=True):
            tick.scheduler.load_state_dict(from_json(value))
            tick.begin(*known)
            if updated:
                tick.repeat()
        for name, each in self._state.items():
            each.load_state_dict(from_json(taken["state"][name]))


def check_taken(taken: Mapping[str, Any]) -> None:
    """Judge what a checkpoint has of `HostObjects.take`. Raises ValueError naming the key."""
    schedulers = checked.items(taken.get("schedulers", []), "schedulers")
    state = checked.mapping(taken.get("state", {}), "state")
    for count, path in checked.items(taken.get("ticks", []), "ticks"):
        if count is not None:
            checked.integer(count, path, 0, MAX_TICKS)
    for early, path in checked.items(taken.get("early", []), "early"):
        checked.boolean(early, path)
    for name in ("ticks", "early"):
        if name in taken and len(taken[name]) != len(taken.get("schedulers", [])):
            raise checked.Invalid(name, taken[name], "one value for each scheduler")
    for value, path in [*schedulers, *((value, f"state.{name}") for name, value in state.items())]:
        try:
            from_json(value)
        except Exception as error:  # torch raises its own
            raise ValueError(f"{path}: cannot be read: {type(error).__name__}: {error}") from None


def to_json(value: Any, where: str) -> Any:
    """Return a value that JSON carries and `from_json` gives back equal. Raises ConfigError that names the place."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case torch.Tensor():
            return _tensor_to_json(value, where)
        case list():
            return [to_json(item, where) for item in value]
        case tuple():
            return {_TAG: "tuple", "items": [to_json(item, where) for item in value]}
        case Mapping():
            if type(value) is dict and all(isinstance(key, str) and key != _TAG for key in value):
                return {key: to_json(item, f"{where}.{key}") for key, item in value.items()}
            pairs = [[to_json(key, where), to_json(item, f"{where}[{key!r}]")] for key, item in value.items()]
            return {_TAG: "counter" if isinstance(value, Counter) else "dict", "items": pairs}
    raise ConfigError(
        f"{where}: got a {type(value).__name__}, expected numbers, text, booleans, None, small tensors, and lists, tuples and"
        " dictionaries of them; leave it out of state_dict()"
    )


def from_json(value: Any) -> Any:
    """Return what `to_json` was given."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: from_json(item) for key, item in value.items()}
    if value[_TAG] == "tensor":
        dtype, body = getattr(torch, value["dtype"]), bytearray(base64.b64decode(value["bytes"]))
        if not body:
            return torch.empty(value["shape"], dtype=dtype)
        return torch.frombuffer(body, dtype=torch.uint8).view(dtype).view(value["shape"])
    if value[_TAG] == "tuple":
        return tuple(from_json(item) for item in value["items"])
    found = {from_json(key): from_json(item) for key, item in value["items"]}
    return Counter(found) if value[_TAG] == "counter" else found


def _tensor_to_json(tensor: torch.Tensor, where: str) -> dict[str, Any]:
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes > MAX_TENSOR_BYTES:
        raise ConfigError(
            f"{where}: got a tensor of {nbytes} bytes, expected at most {MAX_TENSOR_BYTES}; make it a buffer of the model, or"
            " leave it out of state_dict()"
        )
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    body = base64.b64encode(flat.numpy().tobytes()).decode()
    return {
        _TAG: "tensor",
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "bytes": body,
    }
