"""The learning rate as a pure function of the step: a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from .config.schema import Config


def learning_rate(config: Config, step: int) -> float:
    """Return the rate of update `step` (from 1): linear warm-up, then a cosine or a line down to end_learning_rate."""
    peak = config.optimizer_config.learning_rate
    schedule = config.optimizer_config.learning_rate_scheduler_kwargs
    if schedule is None:
        return peak
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    progress = min(1.0, (step - schedule.warmup_steps) / (config.decay_steps - schedule.warmup_steps))
    share = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule.use_cosine else 1.0 - progress
    return schedule.end_learning_rate + share * (peak - schedule.end_learning_rate)
