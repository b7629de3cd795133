"""Order on an accelerator: the side stream of the reductions and the events that mark gradients and updates as finished.

Owns streams and events; on a CPU every method is a no-op. Never launches work itself.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Lane:
    """A side stream beside the training thread's stream, one for roll forwards, and two marks that other threads can wait for."""

    def __init__(self, device: torch.device) -> None:
        # Any back end with streams: cuda, or one that a plug-in registers (npu, musa).
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._device = device
        self._side = None if self._module is None else self._module.Stream(device)
        # Made now: at a fault a driver may have anything but launches wait for the whole device.
        self._roll = None if self._module is None else self._module.Stream(device)
        self._ready: Any = None
        self._updated: Any = None

    @property
    def ordered(self) -> bool:
        """True when waiting for a collective orders the stream and does not block the thread."""
        return self._module is not None

    def side(self) -> AbstractContextManager[Any]:
        """Enter the side stream, after all that is queued on the current stream."""
        if self._side is None:
            return nullcontext()
        self._side.wait_stream(self._module.current_stream(self._device))
        return self._module.stream(self._side)  # type: ignore[no-any-return]

    def keep_for_side(self, memory: torch.Tensor) -> None:
        """Whoever gives `memory` back: it has no other user before the side stream gets here."""
        if self._side is not None:
            memory.record_stream(self._side)

    def join(self) -> None:
        """Make the current stream wait for the side stream."""
        if self._side is not None:
            self._module.current_stream(self._device).wait_stream(self._side)

    def mark_ready(self) -> None:
        """Mark the reduced gradients as final once the current stream gets here."""
        self._ready = self._mark()

    def mark_updated(self) -> None:
        """Mark the update as finished once the current stream gets here."""
        self._updated = self._mark()

    def roll_stream(self) -> AbstractContextManager[Any]:
        """Enter the stream of roll forwards, after all that is queued on the current stream: to warm it up."""
        if self._roll is None:
            return nullcontext()
        self._roll.wait_stream(self._module.current_stream(self._device))
        return self._module.stream(self._roll)  # type: ignore[no-any-return]

    def after_ready(self) -> AbstractContextManager[Any]:
        """Enter the stream of roll forwards, for another thread, after the gradients are final.

        The training thread's own stream may be stuck in a collective for ever, so nothing may be queued behind it.
        """
        if self._roll is None:
            return nullcontext()
        for event in (self._ready, self._updated):
            if event is not None:
                self._roll.wait_event(event)
        return self._module.stream(self._roll)  # type: ignore[no-any-return]

    def await_ready(self) -> None:
        """Block until the reduced gradients are final on the device. Any thread."""
        if self._ready is not None:
            self._ready.synchronize()

    def drain(self) -> None:
        """Block until the newest update has finished on the device. Any thread."""
        if self._updated is not None:
            self._updated.synchronize()

    def drain_within(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the newest update to finish on the device; say whether it has. Any thread."""
        if self._updated is None:
            return True
        deadline = time.monotonic() + timeout_s
        while not self._updated.query():  # device events know no timed wait
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.0005)
        return True

    def _mark(self) -> Any:
        if self._module is None:
            return None
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        return event
