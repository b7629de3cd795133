"""A simulated rank's replica: its shards' values, its gradients, and what its trainer remembers of the last few steps."""

from __future__ import annotations

from tests.simulation.training import Training
from ttp.proto.messages import CommitRecord

KEPT_STEPS = 3
HALF_WRITTEN = -1


class Replica:
    """The state is one number per shard group, a function of all that was applied. The gate says who may touch it, and when."""

    def __init__(self, rank: int, training: Training) -> None:
        self.training = training
        self.state_step = 0
        self.values = {group: training.start(group) for group in training.groups_of(rank)}
        self.backup: tuple[int, dict[str, int]] | None = None
        self.host_states: dict[int, int] = {}
        """The data position and the like after each of the last few steps."""
        self._host_state = self._before = 0
        self.gradients_of = 0
        """The step whose reduced gradients are in memory, whole."""
        self._clean = self.values
        self._record: CommitRecord | None = None

    def compute(self, step: int) -> None:
        """Draw the batch of a step; the gradients in memory are no longer those of the step before."""
        self.gradients_of = 0
        self._before, self._host_state = self._host_state, self.training.next_host_state(self._host_state, step)

    def step_back(self, step: int) -> None:
        """The step is given up before its update: what the trainer remembers is that of the step before."""
        self.gradients_of, self._host_state = 0, self._before
        self.host_states.pop(step, None)

    def enter(self, step: int) -> None:
        """Training begins anew behind `step`: what the trainer remembers is that step's."""
        self.gradients_of = 0
        self._host_state = self.host_states[step]
        self.host_states = {known: state for known, state in self.host_states.items() if known <= step}

    def take_host_state(self, step: int, source: Replica) -> None:
        self.host_states = {step: source.host_states[step]}
        self._host_state = self.host_states[step]

    def reduced(self, step: int) -> None:
        """Reduced gradients are final; what the trainer has to remember of the step is noted before its update."""
        self.gradients_of = step
        self.host_states[step] = self._host_state
        self.host_states.pop(step - KEPT_STEPS, None)

    @property
    def copy_step(self) -> int:
        """The step of the copy that the next update makes; -1: none."""
        return self.state_step if self.training.local_copy else -1

    def begin(self, record: CommitRecord) -> None:
        """Begin the update of `record.step`: the values are half written until `end`."""
        if self.training.local_copy:
            self.backup = (self.state_step, dict(self.values))
        self._record, self._clean = record, dict(self.values)
        self.values = {group: HALF_WRITTEN for group in self.values}

    def end(self) -> int:
        """The update is done; return the step of the state."""
        record = self._record
        assert record is not None
        whole = self.gradients_of == record.step
        self.values = {g: self.training.apply(g, value, record, whole) for g, value in self._clean.items()}
        self.state_step = record.step
        return record.step

    def held(self, step: int) -> dict[str, int]:
        """Return the values of a step that this rank has, half written or not."""
        if step != self.state_step and self.backup is not None and self.backup[0] == step:
            return self.backup[1]
        return self.values
