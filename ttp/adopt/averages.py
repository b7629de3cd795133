"""Averages of the weights (EMA, SWA) that belong to the state of a step, as the optimizer's own state does.

Owns their tensors' addresses and the one moment at which they change: within the update, behind the gate, on whichever thread does it. So
no fault finds weights of one step and an average of another. Keeps no copy; never decides when a step is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from ttp.errors import ConfigError
from ttp.optim.shard_layout.split import local_of


class Average(Protocol):
    """What `torch.optim.swa_utils.AveragedModel` is."""

    def update_parameters(self, model: torch.nn.Module) -> None:
        """Take the model's weights into the average: local maths, in place."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return tensors by name, those that the average works on and no copies."""


class Averages:
    """The averages of one trainer, by name."""

    def __init__(self, averages: Mapping[str, Average], device: torch.device) -> None:
        """Raises ConfigError for an object that is none, or whose state is not tensors of its own on `device` or the CPU."""
        self._averages = dict(averages)
        for name, average in averages.items():
            if not name or "." in name:
                raise ConfigError(
                    f"averages: got the name {name!r}, expected a name without a dot, as in {{'ema': ...}}"
                )
            if not (hasattr(average, "update_parameters") and hasattr(average, "state_dict")):
                raise ConfigError(
                    f"averages[{name!r}]: got a {type(average).__name__}, expected torch.optim.swa_utils.AveragedModel, or an"
                    " object with update_parameters(model) and state_dict()"
                )
            for key, value in average.state_dict().items():
                if not torch.is_tensor(value) or value.device.type not in (device.type, "cpu"):
                    what = f"on {value.device}" if torch.is_tensor(value) else f"a {type(value).__name__}"
                    raise ConfigError(
                        f"averages[{name!r}]: {key}: got {what}, expected tensors on {' or '.join(sorted({'cpu', device.type}))}; keep counters as tensors too"
                    )
        self._tensors = dict(self._live())
        if sorted(map(_address, self._tensors.values())) != sorted(_address(value) for _, value in self._live()):
            raise ConfigError(
                "averages: state_dict() returns copies, expected the tensors that update_parameters changes"
            )
        self._versions = self._now()

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return every tensor by its key in a checkpoint: `average.<name>.<its own key>`."""
        return self._tensors

    def update(self, model: torch.nn.Module) -> None:
        """Take in the weights of a step that is being finished."""
        for average in self._averages.values():
            average.update_parameters(model)
        self._versions = self._now()

    def loaded(self) -> None:
        """The tensors were filled from a checkpoint."""
        self._versions = self._now()

    def check_untouched(self) -> None:
        """Raise ConfigError when somebody else has changed an average since the last update, or bound other tensors."""
        live = dict(self._live())
        for key, tensor in self._tensors.items():
            other = live.get(key)
            if other is None or _address(other) != _address(tensor):
                raise ConfigError(
                    f"{key}: got another tensor than when ttp.protect was called, expected the same one, changed in place"
                )
        changed = [key for key, version in self._now().items() if version != self._versions[key]]
        if changed:
            raise ConfigError(
                f"{changed[0]} was changed between two steps: ttp.protect calls update_parameters within optimizer.step(); leave"
                " your own call out"
            )

    def _live(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, average in self._averages.items():
            for key, value in average.state_dict().items():
                yield f"average.{name}.{key}", value

    def _now(self) -> dict[str, int]:
        """Return torch's counts of changes in place; not of a module's buffers, which its forward passes may change."""
        aside = {
            f"average.{name}.{key}"
            for name, average in self._averages.items()
            if isinstance(average, torch.nn.Module)
            for key, _ in average.named_buffers()
        }
        return {key: local_of(value)._version for key, value in self._tensors.items() if key not in aside}


def _address(tensor: torch.Tensor) -> tuple[int, int]:
    local = local_of(tensor)
    return local.data_ptr(), local.numel()
