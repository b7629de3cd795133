"""The learning rate as a function of samples: warm-up, then constant. Its count is part of a checkpoint."""

from __future__ import annotations

from typing import Any


class OptimizerParamScheduler:
    def __init__(self, optimizer: Any, max_lr: float, warmup_samples: int) -> None:
        self.optimizer, self.max_lr, self.warmup_samples = optimizer, max_lr, warmup_samples
        self.num_steps = 0
        self.step(0)

    def step(self, increment: int) -> None:
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = self.max_lr * min(1.0, (self.num_steps + 8) / self.warmup_samples)

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_steps = 0
        self.step(state_dict["num_steps"])
