"""What a processor needs of the training process, as an interface. `ttp.session` implements it with the optimizer and
the checkpoint writer; tests implement it with a few lines."""

from __future__ import annotations

from typing import Protocol

from ttp.proto.messages import CommitRecord, PublishOrder, Registration, ShareResult, WriteOrder


class StateHolder(Protocol):
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
