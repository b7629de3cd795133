"""The part of torch's Optimizer interface that an optimizer of shards refuses: whole state on one rank, more parameters, GradScaler.

Owns the refusals. Never holds state.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from ttp.errors import CheckpointError, ConfigError


class OptimizerOfShards(Optimizer):
    """A torch optimizer of which each rank has shards only."""

    _built = False
    """True once the layout is fixed."""
    _step_supports_amp_scaling = True
    """torch's GradScaler then gives its scale to the optimizer, which refuses it. Without, it would divide gradients that are being reduced."""

    def _refuse_scale(self, scale: object) -> None:
        raise ConfigError(
            f"GradScaler: got a {type(self).__name__}, whose gradients are reduced while backward runs, expected another optimizer. In place of it"
            " build the optimizer with loss_scale=LossScale(), and call optimizer.scale_loss(loss) and optimizer.step()"
        )

    grad_scale = property(fset=_refuse_scale)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the layout is fixed when the optimizer is built."""
        if self._built:
            raise ConfigError("parameters cannot be added to a built layout; build a new optimizer with all groups")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Refuse: this rank has shards only; a checkpoint is written from `holdings` by every holder."""
        raise CheckpointError("a rank holds only shards; save with a ttp session (or read `holdings()`)")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse: see `state_dict`."""
        raise CheckpointError("a rank holds only shards; load with a ttp session (or `load_begin`)")
