"""What a processor needs of the training process, as an interface. `ttp.session` implements it with the optimizer and
the checkpoint writer; tests implement it with a few lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ttp.proto.messages import CommitRecord, PublishOrder, Registration, ShareResult, WriteOrder


class StateProvider(Protocol):
    """A rank's replica of the job's state. Every method but `registration` is called by the processor's work thread only,
    one at a time, while the gate is closed; the main thread may be stuck in a collective meanwhile."""

    def registration(self) -> Registration:
        """Return what this rank holds right now; any thread, no I/O."""

    def roll_forward(self, record: CommitRecord) -> int:
        """Do the local update of `record.step` and return the new state step. No collective."""

    def write(self, order: WriteOrder) -> ShareResult:
        """Write the ordered parts into `order.directory/order.tmp_name`, durable (fsync) on return."""

    def publish(self, order: PublishOrder) -> str:
        """Write metadata and manifest, rename, replace the tracker; return the published path.

        A valid checkpoint of that step that is there already is kept, and its path returned."""


class ControllerStarter(Protocol):
    """Starts controllers as processes of this node, and knows which ones other ranks have started. `start` and `look` are called on
    one thread of the processor's, and may block."""

    def start(self, known: tuple[str, ...]) -> str:
        """Start a controller that waits for ranks, enter it where `look` finds it, and return its address.

        `known`, unless empty: leave it undone when others than these have been entered meanwhile. Raises what went wrong.
        """

    def look(self) -> tuple[str, ...]:
        """Return the addresses of all controllers that ranks have started, in the order in which they take over."""

    def on_end(self, ended: Callable[[str], None]) -> None:
        """Call `ended(address)`, on any thread, whenever a controller that this rank has started ends."""
