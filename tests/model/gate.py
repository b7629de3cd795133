"""One rank's gate and optimizer state in the model: the rules of the real gate, as values that can be compared."""

from __future__ import annotations

from dataclasses import dataclass

from ttp.proto.frozen import replace
from ttp.proto.messages import CommitRecord, Phase, StateReport

State = tuple[int, bool]
"""An optimizer state: (step, whether it is what a fault-free run has at that step)."""


@dataclass(frozen=True, slots=True)
class Gate:
    """Where a rank's training thread is, and what a freeze holds up."""

    phase: Phase = Phase.COMPUTE
    step: int = 1
    state: State = (0, True)
    records: tuple[CommitRecord, ...] = ()
    gradients_of: int = 0
    """The step whose reduced gradients are in memory, whole."""
    barred: bool = False
    final: bool = False
    torn: bool = False
    busy: str = ""
    """`update` or `roll` while one holds the lock: the state is half written."""
    freeze_id: int = -1

    @property
    def open(self) -> bool:
        return not (self.barred or self.torn)

    @property
    def content(self) -> State:
        """What somebody who reads the state now gets."""
        return (-1, False) if self.busy else self.state

    def begin(self, record: CommitRecord, how: str) -> Gate:
        """Take the lock for the update of `record.step`."""
        records = (*self.records, record)[-2:]
        return replace(self, busy=how, phase=Phase.UPDATING, step=record.step, records=records)

    def end(self) -> Gate:
        record = self.records[-1]
        step, sound = self.state
        sound = sound and self.gradients_of == record.step == step + 1
        return replace(self, busy="", phase=Phase.DONE, state=(record.step, sound))

    def fail(self) -> Gate:
        """The update raised half way."""
        return replace(self, busy="", torn=True)

    def bar(self, freeze_id: int) -> Gate:
        return replace(self, barred=True, freeze_id=freeze_id)

    def thaw(self, freeze_id: int) -> Gate:
        return self if self.final or freeze_id != self.freeze_id else replace(self, barred=False)

    def vacate(self, freeze_id: int) -> Gate:
        """The process holds no state yet."""
        return replace(self, barred=True, torn=True, freeze_id=freeze_id)

    def regrouped(self, state: State, record: CommitRecord | None) -> Gate:
        """All ranks enter their training anew, this one with that state. What was final or torn is so no more; it stays as shut as it was."""
        return replace(
            self, phase=Phase.COMPUTE, step=state[0] + 1, state=state, gradients_of=0, final=False, torn=False,
            records=() if record is None else (record,),
        )  # fmt: skip

    def can_roll(self, record: CommitRecord) -> bool:
        ready = self.phase is Phase.READY and self.step == record.step
        return self.barred and not self.busy and not self.torn and ready and self.state[0] == record.step - 1

    def report(self, rank: int, freeze_id: int) -> StateReport:
        return StateReport(
            rank,
            freeze_id,
            not self.busy,
            self.phase,
            self.step,
            self.state[0],
            self.torn,
            -1,
            self.records,
            self.final,
        )
