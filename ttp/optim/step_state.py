"""Which step an optimizer's state is of, how far the next step has come, and whether the state is whole.

Owns these facts, their reports to the tracker, and their marks on the device. Never touches the state itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ttp.errors import ProtocolError
from ttp.interfaces.update_tracker import NullTracker, UpdateTracker
from ttp.optim.device_stream import Lane
from ttp.proto.messages import CommitRecord


class StepState:
    """One optimizer's. `touch`, `ready`, `in_collective`: the training thread; the rest: whichever thread has the gate."""

    def __init__(self, device: torch.device) -> None:
        self.step = 0
        """Updates that are in the state."""
        self.last_record: CommitRecord | None = None
        """Record of the newest update; None before the first one and after a load."""
        self.host_state: dict[str, Any] = {}
        """The JSON-able part of the state of `step`."""
        self.torn = ""
        """Why the live state is not that of a step (an update or a load that has begun and not ended); empty: it is whole."""
        self.lane = Lane(device)
        self.tracker: UpdateTracker = NullTracker()
        self.on_point: Callable[[str, int], None] | None = None
        self._computing = self._ready = 0

    def point(self, name: str, step: int = 0) -> None:
        """The step has come to this point. `step` 0: the one that is being done."""
        if self.on_point is not None:
            self.on_point(name, step or self.step + 1)

    def touch(self, force: bool = False) -> bool:
        """Report that gradients are about to change, once a step, and say whether it was; waits while frozen. The reduced ones,
        often the same memory, are void."""
        step = self.step + 1
        begins = force or bool(self._ready) or self._computing != step
        if begins:
            self.tracker.computing(step)
            self._computing, self._ready = step, 0
        return begins

    def ready(self, step: int, check: Callable[[int], None]) -> None:
        """This rank's reduced gradients of `step` are final once the current stream gets here. Waits for the device: until then a reduction may
        be aborted, and what it left would be in what this rank contributes. `check(step)` then raises if one was."""
        self.lane.mark_ready()
        self.lane.await_ready()
        check(step)
        self._ready = step
        self.tracker.ready(step)
        self.point("ready", step)

    @contextlib.contextmanager
    def in_collective(self) -> Iterator[None]:
        """This thread may wait for other ranks: it is not suspected of a hang, and the time is not its own."""
        before, self.tracker.waiting = self.tracker.waiting, True
        try:
            yield
        finally:
            self.tracker.waiting = before

    def expect(self, record: CommitRecord) -> None:
        """Raise ProtocolError unless the state is whole, of the step before `record`'s, and READY for that one."""
        step = record.step
        if self.torn or self.step != step - 1 or self._ready != step:
            raise ProtocolError(
                f"update of step {step}: the state is {self.torn or f'that of step {self.step}'} and reduced gradients are"
                f" {f'ready for step {self._ready}' if self._ready else 'not ready'}, expected state {step - 1} and gradients of"
                f" {step}"
            )

    def tear(self, doing: str) -> None:
        """The state belongs to no step from here until `updated` or `restart`."""
        self.torn = f"in the middle of {doing}"

    def updated(self, record: CommitRecord) -> None:
        """The update of `record` has ended. The host state follows."""
        self.step, self.last_record = record.step, record
        self._ready, self.torn = 0, ""

    def restart(self, step: int, record: CommitRecord | None = None) -> None:
        """The state is that of `step`, by a load; its record is known, or not. The host state follows."""
        self.step, self.last_record = step, record
        self._computing = self._ready = 0
        self.torn = ""

    def holds(self, step: int | None) -> bool:
        """Say whether the live state is that of `step` (None: of any)."""
        return not self.torn and step in (None, self.step)

    @property
    def held(self) -> str:
        """What the live state is, for a message."""
        return f"is {self.torn}" if self.torn else f"holds step {self.step}"
