"""When this rank's own backward pass has ended, where the trainer's wrapper then waits for the other ranks.

DistributedDataParallel waits for its all-reduces within `loss.backward()`: on the CPU in a callback that autograd runs when all gradients are there
(torch/csrc/distributed/c10d/reducer.cpp, `finalize_backward`), on an accelerator the stream waits from there on. Autograd runs such callbacks in the
order in which they were queued, and this one is queued when the pass begins, which is before any gradient is there.

Owns these callbacks. Never changes a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ttp.optim.step_state import StepState


class OwnBackward:
    """One optimizer's; the training thread's, or autograd's while that one is in `backward()`."""

    def __init__(self, steps: StepState) -> None:
        self._steps = steps
        self._pass = -1
        self._waits = False

    def watch(self, output: object) -> None:
        """A forward pass has ended with this output: its backward pass will begin there."""
        # Not -1: activation checkpointing, where a pass is computed again within a backward pass.
        begins = self._begins if torch._C._current_graph_task_id() == -1 else self._point
        values = output.values() if isinstance(output, Mapping) else output
        for value in values if isinstance(values, Iterable) and not torch.is_tensor(values) else (values,):
            # Not a leaf: a parameter that the model returns would keep one hook more of each pass.
            if torch.is_tensor(value) and value.grad_fn is not None:
                value.register_hook(begins)  # type: ignore[no-untyped-call]

    def over(self) -> None:
        """The wait is over; at once where there is none."""
        if self._waits:
            self._waits = self._steps.tracker.waiting = False

    def _point(self, gradient: Any) -> None:
        self._steps.point("backward")

    def _begins(self, gradient: Any) -> None:
        self._point(gradient)
        if (task := torch._C._current_graph_task_id()) != self._pass:  # the first of this pass's outputs
            self._pass = task
            _queue(self._ends)

    def _ends(self) -> None:
        self._waits = self._steps.tracker.waiting = True
        _queue(self.over)


def _queue(call: Any) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)
