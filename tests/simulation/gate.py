"""A simulated gate with the rules of the real one: where a rank's phase is kept, and what a freeze holds up."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.training import Training
from ttp.proto.messages import CommitRecord, Phase, StateReport

KEPT_STEPS = 3
_COMPUTE, _READY, _UPDATING, _DONE = Phase  # found faster than attributes of an enumeration


class Gate:
    """One rank's gate and optimizer state. The state is one number per shard group, a function of all that was applied."""

    def __init__(self, rank: int, training: Training) -> None:
        self.rank = rank
        self.training = training
        self.phase, self.step, self.state_step = _COMPUTE, 1, 0
        self.values = {group: training.start(group) for group in training.groups_of(rank)}
        self.backup: tuple[int, dict[str, int]] | None = None
        self.records: tuple[CommitRecord, ...] = ()
        self.host_states: dict[int, int] = {}
        """The data position and the like after each of the last few steps."""
        self._host_state = 0
        self.gradients_of = 0
        """The step whose reduced gradients are in memory, whole."""
        self.barred = False
        self.final = False
        self.torn = False
        self.busy = False
        """An update or a roll-forward holds the lock."""
        self.freeze_id = -1
        self._waiting: list[Callable[[], None]] = []
        self._when_free: list[Callable[[], None]] = []

    def enter(self, go_on: Callable[[], None]) -> None:
        """Training thread: go on once the gate is open."""
        if self.barred or self.torn:
            self._waiting.append(go_on)
        else:
            go_on()

    def compute(self, step: int) -> None:
        """Draw the batch of a step; the gradients in memory are no longer those of the step before."""
        self.phase, self.step, self.gradients_of = _COMPUTE, step, 0
        self._host_state = self.training.next_host_state(self._host_state, step)

    def ready(self, step: int) -> None:
        """Reduced gradients are final; what the trainer has to remember of the step is noted before its update."""
        self.phase, self.step, self.gradients_of = _READY, step, step
        self.host_states[step] = self._host_state
        self.host_states.pop(step - KEPT_STEPS, None)

    def begin(self, record: CommitRecord) -> None:
        """Hold the lock and begin the update of `record.step`: the values are half written until `end`."""
        self._take(record)

    def _take(self, record: CommitRecord) -> None:
        if self.training.local_copy:
            self.backup = (self.state_step, dict(self.values))
        self.busy = True
        self.phase, self.step = _UPDATING, record.step
        self.records = (*self.records, record)[-2:]
        self._clean = dict(self.values)
        self.values = {group: -1 for group in self.values}

    def end(self) -> None:
        """The update is done."""
        record = self.records[-1]
        whole = self.gradients_of == record.step
        self.values = {g: self.training.apply(g, value, record, whole) for g, value in self._clean.items()}
        self.state_step = record.step
        self.phase = _DONE
        self._free()

    def fail(self) -> None:
        """The update raised half way."""
        self.torn = True
        self._free()

    def _free(self) -> None:
        self.busy = False
        calls, self._when_free = self._when_free, []
        for call in calls:
            call()

    def when_free(self, call: Callable[[], None]) -> None:
        if self.busy:
            self._when_free.append(call)
        else:
            call()

    def bar(self, freeze_id: int) -> None:
        self.freeze_id = freeze_id
        self.barred = True

    def report(self, freeze_id: int) -> StateReport:
        backup = -1 if self.backup is None else self.backup[0]
        return StateReport(
            self.rank, freeze_id, not self.busy, self.phase, self.step, self.state_step, self.torn, backup, self.records,
            self.final,
        )  # fmt: skip

    def thaw(self, freeze_id: int) -> None:
        if self.final or freeze_id != self.freeze_id:
            return
        self.barred = False
        calls, self._waiting = self._waiting, []
        for call in calls:
            self.enter(call)

    def can_roll(self, record: CommitRecord) -> bool:
        ready = self.phase is _READY and self.step == record.step
        return self.barred and not self.busy and not self.torn and ready and self.state_step == record.step - 1

    def start_roll(self, record: CommitRecord) -> None:
        self.final = True
        self._take(record)

    def held(self, step: int) -> dict[str, int]:
        """Return the values of a step that this rank has, half written or not."""
        if step != self.state_step and self.backup is not None and self.backup[0] == step:
            return self.backup[1]
        return self.values
