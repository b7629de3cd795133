"""Megatron's gradient scalers, as the replica optimizer's own loss scale.

Owns the translation of their fields. The scale lives in the optimizer, for it belongs to the state of a step.
"""

from __future__ import annotations

from typing import Any

from ttp.errors import ConfigError
from ttp.optim.replica_optimizer import LossScale


def loss_scale_of(scaler: Any) -> LossScale | None:
    """Return the rule of a Megatron grad scaler: none, constant, or dynamic. Raises ConfigError."""
    if scaler is None:
        return None
    try:
        scale = float(scaler.scale)
    except (AttributeError, TypeError, ValueError):
        raise ConfigError(
            f"grad_scaler: got a {type(scaler).__name__} without a number as `scale`, expected Megatron's"
        ) from None
    if not hasattr(scaler, "growth_interval"):
        return LossScale(scale, dynamic=False)
    return LossScale(
        scale,
        growth_interval=int(scaler.growth_interval),
        growth_factor=float(scaler.growth_factor),
        backoff_factor=float(scaler.backoff_factor),
        hysteresis=int(getattr(scaler, "hysteresis", 1)),
        least=float(getattr(scaler, "min_scale", LossScale().least)),
    )
