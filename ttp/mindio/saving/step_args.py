"""What the trainer has said with `ttp_set_ckpt_args`: its own objects, and after which step they are as they are.

Owns the handing over from the training thread to the work thread, and the random numbers' states of the same step. The
objects themselves are the trainer's, and live: they are those of a step from the moment it is settled until the update of the
next one.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch

from ttp.errors import CheckpointError

WAIT_S = 10.0
"""A training thread that was let go comes to its next step in milliseconds, unless it meets a collective of its own."""
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Randomness:
    """The states of the process's random number generators at one moment."""

    of_python: Any
    of_numpy: Any
    of_torch: torch.Tensor
    of_device: torch.Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> Randomness:
        on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        return cls(random.getstate(), numpy.random.get_state(), torch.get_rng_state(), on_device)

    def restore(self, device: torch.device) -> None:
        """Set the process's generators to these states."""
        random.setstate(self.of_python)
        numpy.random.set_state(self.of_numpy)
        torch.set_rng_state(self.of_torch)
        if self.of_device is not None:
            torch.get_device_module(device).set_rng_state(self.of_device, device)


@dataclass(frozen=True, slots=True)
class StepArgs:
    """The trainer's objects after `step`."""

    step: int
    args: Any
    randomness: Randomness | None = None
    """Known once the step is settled: the trainer has begun the next one, or a checkpoint, so all that counts steps or samples
    has been counted on."""

    @property
    def settled(self) -> bool:
        return self.randomness is not None

    def labelled(self, step: int) -> Any:
        """Return the objects for a checkpoint of `step`: a leading iteration number, as Megatron has it, says `step`."""
        args = self.args
        if isinstance(args, tuple | list) and args and type(args[0]) is int and args[0] != step:
            return [step, *args[1:]] if isinstance(args, list) else (step, *args[1:])
        return args


class StepArgsBox:
    """The newest one. `put` and `settle` are the training thread's, `await_step` the work thread's; the lock guards the fields."""

    def __init__(self) -> None:
        self._newest: StepArgs | None = None
        self._closed = False
        self._changed = threading.Condition()

    @property
    def empty(self) -> bool:
        """The trainer has not said anything yet."""
        return self._newest is None

    def put(self, step: int, args: Any) -> None:
        """The trainer has finished `step`; it may still be counting on."""
        with self._changed:
            self._newest = StepArgs(step, args)

    def settle(self, step: int, device: torch.device) -> None:
        """The trainer has counted on, and begins something new after `step`."""
        if self._newest is None or self._newest.step != step or self._newest.settled:
            return
        settled = replace(self._newest, randomness=Randomness.now(device))
        with self._changed:
            self._newest = settled
            self._changed.notify_all()

    def close(self) -> None:
        """The training thread has left `train`: nothing newer comes."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def await_step(self, step: int, advance: Callable[[int], None], wait_s: float = WAIT_S) -> StepArgs:
        """Return the objects after `step`, settled; others when the training thread does not come so far within `wait_s`.

        Raises CheckpointError when the trainer has never given any.
        """
        deadline = time.monotonic() + wait_s
        with self._changed:
            while not (self._closed or self._has(step)) and time.monotonic() < deadline:
                self._changed.wait(_POLL_S)
                advance(1)
            if self._newest is None:
                raise CheckpointError(
                    f"step {step}: the trainer has not called ttp_set_ckpt_args yet, so its save handler has nothing to save;"
                    " call it after every iteration"
                )
            return self._newest

    def _has(self, step: int) -> bool:
        newest = self._newest
        return newest is not None and (newest.step > step or (newest.step == step and newest.settled))
