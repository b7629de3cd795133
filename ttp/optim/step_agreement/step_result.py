"""What one step decides besides the update itself: clipping, the loss scale, and the result that a caller sees.

Owns plain values and arithmetic on Python floats, so that every rank computes the same bits. Never touches tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ttp.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ClipNorm:
    """Scale the gradient down to a global L2 norm of `max_norm` (torch.nn.utils.clip_grad_norm_'s formula)."""

    max_norm: float

    def __post_init__(self) -> None:
        if not self.max_norm > 0:
            raise ConfigError(f"ClipNorm.max_norm: got {self.max_norm}, expected a number above 0, or clip=None")


@dataclass(frozen=True, slots=True)
class ClipValue:
    """Clamp every element of the averaged gradient to [-value, value]."""

    value: float

    def __post_init__(self) -> None:
        if not self.value > 0:
            raise ConfigError(f"ClipValue.value: got {self.value}, expected a number above 0, or clip=None")


@dataclass(frozen=True, slots=True)
class LossScale:
    """Loss scaling for FP16. Dynamic: back off at an overflow, grow after `growth_interval` good steps (as GradScaler).

    `hysteresis`: at so many overflows since the scale last grew it begins to be lowered, then at each (as Megatron's scaler);
    `least`: it is never lowered below.
    """

    initial: float = 65536.0
    dynamic: bool = True
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    hysteresis: int = 1
    least: float = 1e-30

    def __post_init__(self) -> None:
        if not (math.isfinite(self.initial) and self.initial > 0):
            raise ConfigError(f"LossScale.initial: got {self.initial}, expected a finite number above 0")
        if self.growth_interval < 1 or self.growth_factor < 1 or not 0 < self.backoff_factor <= 1:
            raise ConfigError(
                f"LossScale got growth_interval {self.growth_interval}, growth_factor {self.growth_factor}, "
                f"backoff_factor {self.backoff_factor}, expected >= 1, >= 1, and above 0 up to 1"
            )
        if self.hysteresis < 1 or not self.least > 0:
            raise ConfigError(
                f"LossScale got hysteresis {self.hysteresis}, least {self.least}, expected >= 1, and above 0"
            )


@dataclass(frozen=True, slots=True)
class ScaleState:
    """The loss scale now, the good steps since it last changed, and the overflows that were let pass."""

    scale: float = 1.0
    good_steps: int = 0
    forgiven: int = 0
    """Overflows since the scale last grew that have not lowered it, because of the rule's hysteresis."""

    def after(self, skipped: bool, rule: LossScale | None) -> ScaleState:
        """Return the state after one more step."""
        if rule is None or not rule.dynamic:
            return self
        if skipped and self.forgiven + 1 < rule.hysteresis:
            return ScaleState(self.scale, 0, self.forgiven + 1)
        if skipped:
            return ScaleState(max(self.scale * rule.backoff_factor, rule.least), 0, self.forgiven)
        if self.good_steps + 1 < rule.growth_interval:
            return ScaleState(self.scale, self.good_steps + 1, self.forgiven)
        grown = self.scale * rule.growth_factor
        return ScaleState(grown if grown <= 3.0e38 else self.scale, 0)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What `step` returns to the training loop; equal on every rank."""

    step: int
    grad_norm: float
    """Global L2 norm of the averaged, unscaled gradient before clipping; inf when `skipped`."""
    clip_factor: float
    skipped: bool
    loss_scale: float
    """The scale that this step's gradients carried."""
    sums: tuple[float, ...]


def clip_factor(clip: ClipNorm | ClipValue | None, grad_norm: float) -> float:
    """Return what gradients are multiplied by; 1.0 when they are not clipped by norm."""
    if not isinstance(clip, ClipNorm):
        return 1.0
    return min(1.0, clip.max_norm / (grad_norm + 1e-6))
