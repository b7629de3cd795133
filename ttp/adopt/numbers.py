"""Whether the passes of a step gave finite numbers, from what they compute anyway: a loss that the model returns, and the gradient of its
output. No pass over parameters, and no wait for a device before the step's collective.

Owns the numbers of one step's passes on this rank. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.distributed.tensor import DTensor


class PassNumbers:
    """One small tensor a number; NaN and infinity survive the sums that they are made of."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor] = []

    def forget(self) -> None:
        """A new step begins."""
        self._losses, self._gradients = [], []

    def look_at(self, output: object) -> None:
        """A forward pass has ended with this output."""
        for value in _tensors(output):
            if value.numel() == 1:
                self._losses.append(_local(value).detach().float().reshape(()))
            elif value.requires_grad:
                value.register_hook(self._look_at_gradient)  # type: ignore[no-untyped-call]

    def _look_at_gradient(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None:  # DDP's own functions give none for an output that the loss does not use
            self._gradients.append(_local(gradient).detach().sum(dtype=torch.float32))

    def zero_or_nan(self, device: torch.device) -> torch.Tensor:
        """Return 0.0, or NaN if a number is not finite (FP64, 0-d)."""
        numbers = [*self._losses, *self._gradients]
        if not numbers:
            return torch.zeros((), dtype=torch.float64, device=device)
        total = torch.stack([number.to(device, torch.float64) for number in numbers])
        return torch.where(total.isfinite().all(), 0.0, torch.nan).to(torch.float64)

    def are_finite(self) -> bool:
        return all(number.isfinite().item() for number in (*self._losses, *self._gradients))

    def where(self, rank: int) -> str:
        """Name what is not finite, as far as this rank knows."""
        if not all(number.isfinite().item() for number in self._losses):
            return f"the loss of rank {rank} is not finite"
        if not self.are_finite():
            return f"the gradient of the model's output is not finite on rank {rank}"
        return "a loss or a gradient is not finite on another rank, or in the model"


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _tensors(output: object) -> Iterator[torch.Tensor]:
    values = output.values() if isinstance(output, Mapping) else output
    for value in values if isinstance(values, Iterable) and not torch.is_tensor(values) else (values,):
        if torch.is_tensor(value) and value.is_floating_point():
            yield value
