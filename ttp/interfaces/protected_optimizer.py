"""What a session needs of an optimizer in order to protect its state, as an interface.

`TTPReplicaOptimizer` implements it with state of its own; `ttp.adopt` implements it over any torch optimizer of a trainer
that knows nothing of ttp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ttp.checkpoint.format.types import HeldTensor
from ttp.interfaces.update_tracker import UpdateTracker
from ttp.proto.messages import CommitRecord, ShardGroup


class UpdateMarks(Protocol):
    """When the newest update has finished on the device: any thread may ask."""

    def drain(self) -> None:
        """Block until it has (at once on a CPU)."""

    def drain_within(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for it; say whether it has."""

    @property
    def ordered(self) -> bool:
        """True on an accelerator: `end_update` may come before the device has finished the update."""


class ProtectedOptimizer(Protocol):
    """An optimizer that reports its steps to a tracker and whose state can be read, updated and loaded from other threads."""

    device: torch.device
    on_point: Callable[[str, int], None] | None
    """Called with a point's name and the step, for fault injection."""
    spans_job: bool
    """Every rank of the job enters the collective that makes the commit record: what that counts is known of all."""

    workload: str
    """Ranks with the same one have the same part of the model, and their own times of a step can be compared; empty: with no other rank's."""

    @property
    def lane(self) -> UpdateMarks: ...

    @property
    def current_step(self) -> int:
        """Updates that are in the state."""

    @property
    def last_record(self) -> CommitRecord | None:
        """Record of the newest update; None before the first one and after a load."""

    def attach(self, tracker: UpdateTracker, attempt: int = 0) -> None:
        """Report the phases of every step to `tracker` from now on; `attempt`: this attempt's number, the same on every rank."""

    def rewire(self, successor: Callable[[Any], Any]) -> None:
        """Use the process groups that have taken the place of these: `successor` returns each one's successor. No collective is under way."""

    # --- any thread that has the gate ---

    def roll_forward(self, record: CommitRecord) -> int:
        """Do the local update of `record.step` in place of the training thread; return the new state step. No collective."""

    def holdings(self, step: int | None = None) -> dict[str, list[HeldTensor]]:
        """Return views of the state of `step` (the newest unless given) by group id. Raises CheckpointError if not held."""

    def host_state(self, step: int | None = None) -> dict[str, Any]:
        """Return the JSON-able part of the state of `step`, equal on every rank, with the hyper-parameters as `param_groups`."""

    @property
    def work_done(self) -> int:
        """A number that grows while an update progresses, whichever thread does it."""

    # --- what the job has, on whichever rank it lies ---

    def shard_groups(self) -> tuple[ShardGroup, ...]:
        """Return what this rank holds, for its registration."""

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Return key and whole shape of every tensor of the job's state."""

    def param_names(self, group: int) -> list[str]:
        """Return the names of all parameters of a param group."""

    def layout_json(self) -> str:
        """Return facts for the manifest."""

    # --- loading (the training thread) ---

    def load_targets(self) -> list[HeldTensor]:
        """Return what `load_begin` will; the state stays what it is."""

    def load_begin(self) -> list[HeldTensor]:
        """Return views of all the state, to be filled in place. Until `load_end` the state belongs to no step."""

    def check_host_state(self, saved: dict[str, Any]) -> None:
        """Check what `load_end` would take, while the state stays what it is. Raises ValueError naming the key's path."""

    def load_end(self, step: int, host_state: dict[str, Any]) -> None:
        """Take the filled state as that of `step`. Collective. Raises CheckpointMismatch."""
