"""How an optimizer reports where it is within a step (the four phases of the protocol).

Owns the interface only. `ttp.processor.gate.Gate` implements it; `NullTracker` is what an optimizer has when
nothing watches (`ENABLE_TTP=False`, plain unit tests).
"""

from __future__ import annotations

from typing import Protocol

from ttp.proto.messages import CommitRecord, Digest


class UpdateTracker(Protocol):
    """Called by the training thread, local memory only. `step` counts optimizer updates from 1.

    1. `computing(step)`   gradients of `step` are about to change (first accumulation, zero_grad). Blocks while frozen
    2. `ready(step)`       this rank's reduced gradients of `step` are final; from here to `end_update` they must not change
    3. `begin_update(...)` the commit record is here; takes the gate. Blocks while frozen, for good if the job is lost
    4. `end_update(step)`  the update is finished; gives the gate back
    `fail_update(step)` instead of 4 when the update raised: the state is torn and must not be used.

    `notice` rides on the step's spanning collective; when any rank had it set, every rank calls `boundary(step)` at the
    end of that step, and none begins another. So does `unled`: when every rank had it set as well, `boundary` has them save
    that step together.
    """

    waiting: bool
    """The optimizer sets it while its thread waits in a collective: such a rank is not suspected of a hang."""
    notice: bool
    """This rank has a preemption notice."""
    unled: bool
    """No controller leads this rank."""

    def computing(self, step: int) -> None: ...

    def ready(self, step: int) -> None: ...

    def begin_update(self, step: int, record: CommitRecord, backup_step: int = -1) -> None:
        """`backup_step`: step of the local copy taken so far, -1 for none."""

    def end_update(self, step: int) -> None: ...

    def fail_update(self, step: int) -> None: ...

    def dispute(self, step: int, digests: tuple[Digest, ...]) -> None:
        """The holders of these shard groups have found that they differ in the state of `step`: what this rank has read of them. Blocks while frozen. Called
        before a rank enters the collective in which all learn who is wrong; empty: nothing differs after all."""

    def boundary(self, step: int, unled: bool = False) -> None:
        """`step` is finished on this rank; does not return while the process has still to be led out. `unled`: no rank has a
        controller, and all save the step together."""


class NullTracker:
    """Tracks nothing."""

    waiting = False
    notice = False
    unled = False

    def computing(self, step: int) -> None:
        pass

    def ready(self, step: int) -> None:
        pass

    def begin_update(self, step: int, record: CommitRecord, backup_step: int = -1) -> None:
        pass

    def end_update(self, step: int) -> None:
        pass

    def fail_update(self, step: int) -> None:
        pass

    def dispute(self, step: int, digests: tuple[Digest, ...]) -> None:
        pass

    def boundary(self, step: int, unled: bool = False) -> None:
        pass
