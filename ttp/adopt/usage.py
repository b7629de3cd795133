"""How a trainer uses its guard, as far as that can be seen from here: what it would lose without noticing is said, once, on rank 0.

Owns three warnings: of batches fetched outside guard.batches, of a schedule that ttp does not know, and of a job that ends with nothing saved. Changes nothing and decides nothing. Where it
cannot be known whether a trainer looks after itself, nothing is said (its place in the data), or the words are right either way (its weights).
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from ttp.adopt.adopted_state import unwrapped
from ttp.checkpoint.format.durable import newest_step
from ttp.runtime.rank_runtime import show
from ttp.session import ResumePoint, Session, find_session

_KNOWN_AFTER = 2
"""Steps of an attempt without one of the guard's batches: no step to warm up, but a loop that does not ask for them."""

_UNSCHEDULED = (
    "the optimizer has a scheduler of torch that ttp.protect was not given: a restart begins its schedule again, with other learning rates;"
    ' give schedulers=[scheduler] where its step() follows every optimizer.step(), else state={"scheduler": scheduler}'
)


class Usage:
    """What one trainer did with its guard in this attempt."""

    def __init__(
        self,
        model: torch.nn.Module,
        session: Session,
        resumed: ResumePoint | None,
        *,
        save_interval: int,
        keeps_state: bool,
        unknown_schedule: Callable[[], bool] = lambda: False,
    ) -> None:
        """After the resume. `keeps_state`: the trainer gave state of its own, which may have its place in the data. `unknown_schedule`: asked
        after some steps, whether a scheduler changes the learning rate that ttp was not given."""
        self._session = session
        self._resumed = resumed
        self._save_interval = save_interval
        self._keeps_place = keeps_state
        self._unknown_schedule = unknown_schedule
        self._counts_epochs = False
        self._saves_itself = False
        self._ended = False
        self._steps = self._newest_step = 0
        self._found = session.holder.checkpoint
        module: Any = unwrapped(model)  # torch gives the method no types
        # No bound method: a copy of the model would copy what it is bound to.
        self._hook = module.register_state_dict_pre_hook(lambda *_: self._state_taken())
        atexit.register(self._process_ends)

    # --- what the trainer does ---

    def asks_for_the_step(self) -> None:
        """Before its first step: a loop over steps begins there. Later: it may be a log's line."""
        if not self._steps:
            self._keeps_place = True

    def asks_for_epochs(self) -> None:
        self._counts_epochs = True

    def asks_for_batches(self) -> None:
        self._keeps_place = True

    def step_ended(self, step: int) -> None:
        """A step of this attempt is finished."""
        self._steps, self._newest_step = self._steps + 1, step
        if self._steps == _KNOWN_AFTER and not self._keeps_place:
            self._warn(self._uncounted())
        if self._steps == _KNOWN_AFTER and self._unknown_schedule():
            self._warn(_UNSCHEDULED)

    def release(self) -> None:
        """Let the model go (any number of times)."""
        self._hook.remove()
        atexit.unregister(self._process_ends)

    def end(self) -> None:
        """The guard is closed (any number of times)."""
        self.release()
        if self._ended or self._session.pid != os.getpid():  # a child that was forked
            return
        self._ended = True
        written = self._session.holder.checkpoint != self._found or self._newest_step <= newest_step(
            self._session.save_dirs, self._session.holder.passed_over
        )
        goes_on = self._save_interval > 0 and self._resumed is not None  # the steps since the newest are the interval's
        # After an exception others may have saved the step, and the controller reports the outcome.
        raised = self._session.raised or self._session.exception_on_its_way() is not None
        if self._steps and not (written or goes_on or raised or self._saves_itself):
            self._warn(self._unsaved())

    # --- inside ---

    def _state_taken(self) -> None:
        """The trainer has the model's state, for a file of its own as a rule."""
        self._saves_itself = True

    def _process_ends(self) -> None:
        if find_session() is self._session and getattr(sys, "last_value", None) is None:
            self.end()

    def _warn(self, text: str) -> None:
        if self._session.rank == 0:
            show(logging.WARNING, text)

    def _uncounted(self) -> str:
        restart = (
            "a restart begins" if self._resumed is None else f"this attempt, after step {self._resumed.step}, began"
        )
        what = "the interrupted epoch" if self._counts_epochs else "the whole loop"
        return (
            f"the first {_KNOWN_AFTER} steps of this attempt took no batch from guard.batches(loader) or guard.enumerate(loader):"
            f" {restart} {what} at its first batch again, expected `for batch in guard.batches(loader)` within `for epoch in"
            " guard.epochs(count)`, or `for step in range(guard.step + 1, last + 1)` where data is a function of the step; a trainer"
            " that keeps its place by itself says so by reading guard.step before its first step"
        )

    def _unsaved(self) -> str:
        first, last = self._newest_step - self._steps + 1, self._newest_step
        steps = f"step {last}" if first == last else f"steps {first} to {last}"
        interval = f" (save_interval is {self._save_interval})" if self._save_interval else ""
        return (
            f"TTP wrote no checkpoint in this attempt, {steps}{interval}: unless the trainer saves the weights itself, they are lost;"
            " call guard.save() as the last line of train, on all ranks"
        )
