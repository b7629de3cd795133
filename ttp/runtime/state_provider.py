"""What a processor writes at a fault: this rank's shards of the optimizer, and the host state that belongs to the same step.

Joins the optimizer with the checkpoint writer. Runs on the processor's work thread while the gate is closed; never uses
a collective and never waits for the training thread.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ttp.checkpoint.format import tiling
from ttp.checkpoint.format.durable import step_of_directory
from ttp.checkpoint.format.keys import param_group_blobs
from ttp.checkpoint.format.manifest import check_json_value
from ttp.checkpoint.format.signature import NO_KEYS, Keys
from ttp.checkpoint.format.types import HeldTensor
from ttp.checkpoint.host_copy import HostCopier
from ttp.checkpoint.store import SharedStore, Store
from ttp.checkpoint.write import WrittenShare, WrittenShares, merge_results, write_share
from ttp.errors import CheckpointError, ConfigError
from ttp.interfaces.protected_optimizer import ProtectedOptimizer
from ttp.proto.messages import CommitRecord, Part, PublishOrder, Registration, ShareResult, WriteOrder

KEPT_STEPS = 3
"""Host states kept: the step in flight, the one before it (what a dump may choose), and one to spare."""


class Publisher(Protocol):
    """Makes what all writers wrote of one step a checkpoint that the next attempt goes on from.

    Called by one rank, on the processor's work thread, when every share is durable; after a failure by another rank, of the
    same staging directory. The job's own is `OptimizerStateProvider.publish`; a session may be given another.
    """

    def publish(self, order: PublishOrder, state: Mapping[str, Any], advance: Callable[[int], None]) -> str:
        """Return where the checkpoint is. Raises what went wrong: nothing is visible then.

        state: the optimizer's host state at the order's step. advance: called as the work progresses.
        """

    @property
    def work_done(self) -> int:
        """A number that grows while `publish` progresses; any thread."""


_NO_STATE = "{}"


def _nothing_around(point: str, step: int, path: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class StepStates:
    """The trainer's host state after each of the last few steps, by step.

    Written by the training thread, read by the work thread: the lock guards `_states`.
    """

    def __init__(self) -> None:
        self._states: dict[int, str] = {}
        self._lock = threading.Lock()
        self.late: Callable[[], Mapping[str, Any]] = dict
        """Returns what is added to any state when it is written: what is known by then, of later steps too. Called by any thread."""

    def put(self, step: int, state: Mapping[str, Any]) -> None:
        """Keep a copy of `state` as what step + 1 needs to go on, if step is committed. Raises ConfigError unless it is JSON:
        found now, not at the fault."""
        if not isinstance(state, Mapping):
            raise ConfigError(f"step {step}: the step state is a {type(state).__name__}, expected a mapping")
        try:
            check_json_value(state, "state")
        except CheckpointError as error:
            raise ConfigError(f"step {step}: the step state is invalid: {error}; convert arrays and tensors") from None
        body = json.dumps(state)
        with self._lock:
            self._states[step] = body
            for old in sorted(self._states)[:-KEPT_STEPS]:
                del self._states[old]

    def get(self, step: int) -> dict[str, Any]:
        """Return the state after `step`, or an empty mapping when the trainer never set one."""
        return {**self._kept(step), **self.late()}

    def check(self, step: int) -> None:
        """Raise ConfigError where states are given, and none for `step`, whose update is about to be agreed on: no rank could save it."""
        with self._lock:
            missing = self._missing(step)
        if missing:
            raise ConfigError(missing)

    def _kept(self, step: int) -> Any:
        with self._lock:
            missing, body = self._missing(step), self._states.get(step, _NO_STATE)
        if missing:
            raise CheckpointError(missing)
        return json.loads(body)

    def _missing(self, step: int) -> str:
        """Why there is no state of `step`; empty: there is one, or the trainer gives none. A checkpoint of such a trainer has an empty one."""
        if step in self._states or set(self._states.values()) <= {_NO_STATE}:
            return ""
        kept = ", ".join(str(s) for s in sorted(self._states))
        return (
            f"step {step}: no host state is kept (kept: steps {kept}); call session.set_step_state(step, ...) before every"
            " optimizer.step()"
        )


class OptimizerStateProvider:
    """The `StateProvider` of a rank whose optimizer is protected."""

    def __init__(
        self,
        optimizer: ProtectedOptimizer,
        registration: Registration,
        publisher: Publisher | None = None,
        store: Store | None = None,
        keys: Keys = NO_KEYS,
        before: Mapping[str, int] | None = None,
    ) -> None:
        """registration: what this rank registers with at step 0. store: where checkpoints are; None: in directories that all ranks
        share. publisher: who makes checkpoints of what the writers wrote, if it is not this class. keys: what checkpoints are signed
        with, and whose are valid. before: the checkpoints that were there already, inode by path."""
        self.optimizer = optimizer
        self._publisher = publisher
        self.store = store or SharedStore()
        self.keys = keys
        self._digests = keys.sign is not None and publisher is None
        self.step_states = StepStates()
        self.around: Callable[[str, int, str], contextlib.AbstractContextManager[None]] = _nothing_around
        """`with around(point, step, path):` encloses every write and publish, for fault injection."""
        self._registration = registration
        self.standby = ""
        """Address of the standby controller that this rank has started, if any."""
        self._written = WrittenShares()
        self._copier = HostCopier(optimizer.device)
        self._early: HostCopier | None = None
        self._on_host: tuple[int, dict[str, list[HeldTensor]]] | None = None
        """A step, and this rank's state of it in host memory: written and taken as a whole."""
        self._reading: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        """Held while the device is read, where `copy_to_host` does so as well: a write waits for a copy, and the other way round."""
        self._rank = registration.rank
        self.layout: dict[str, Any] = json.loads(registration.layout)
        """For the manifest."""
        self._before = dict(before or {})
        self._resumed = 0
        """The step that was resumed from; 0: none."""
        self._trusted: frozenset[str] = frozenset()
        self.checkpoint = ""
        """The newest published checkpoint that this rank knows; empty: none. Written by the training thread and by the one that publishes, read by any."""
        self._io_done = 0  # written by the thread that carries out the order, read by any

    def set_step_state(self, step: int, state: Mapping[str, Any]) -> None:
        """Keep what the trainer gives for the step whose update comes next, or, before training, for step 0. Raises ConfigError for any other step:
        a fault would save what belongs to another one, or nothing."""
        done = self.optimizer.current_step
        if step != done + 1 and (step or done):
            raise ConfigError(
                f"session.set_step_state: got step {step} after {done} updates, expected {done + 1}, the step whose update comes next. Call it before"
                " optimizer.step(), with optimizer.current_step + 1; steps count from 1"
            )
        self.step_states.put(step, state)

    def registration(self) -> Registration:
        choice = getattr(self.optimizer, "on_divergence", None)
        repairs = choice is not None and choice.choice == "repair"
        return replace(
            self._registration,
            state_step=self.optimizer.current_step,
            standby=self.standby,
            repairs=repairs,
            own_checkpoints=self._publisher is not None,
        )

    def roll_forward(self, record: CommitRecord) -> int:
        return self.optimizer.roll_forward(record)

    def write(self, order: WriteOrder) -> ShareResult:
        """Write the ordered parts, or use again what an earlier write attempt at the same step has of them."""
        directory, name, step = order.directory, order.tmp_name, order.step
        reused, left = self._written.take(step, directory, name, order.parts)
        parts = [part for part in order.parts if part in left]
        result = merge_results(reused, self.write_parts(directory, name, step, parts)) if parts else reused
        self._written.add(step, WrittenShare(directory, name, frozenset(order.parts), result))
        return result

    def write_parts(self, directory: str, tmp_name: str, step: int, parts: Sequence[Part]) -> ShareResult:
        """Write these parts of `step` into directory/tmp_name. Raises CheckpointError if this rank does not hold them."""
        with self._reading:
            return self._write_parts(directory, tmp_name, step, parts)

    def _write_parts(self, directory: str, tmp_name: str, step: int, parts: Sequence[Part]) -> ShareResult:
        on_host = self._on_host
        holdings = on_host[1] if on_host is not None and on_host[0] == step else self.optimizer.holdings(step)
        tensors: list[HeldTensor] = []
        for part in parts:
            if part.group_id not in holdings:
                raise CheckpointError(
                    f"rank {self._rank}: asked to write shard group {part.group_id}, which it does not hold"
                )
            tensors += tiling.split_parts(holdings[part.group_id], part.count)[part.index]
        suffix = "-".join(f"{p.group_id[:6]}.{p.index}.{p.count}" for p in parts[:4])
        with self.around("write", step, f"{directory}/{tmp_name}"):
            return write_share(
                directory,
                tmp_name,
                self._rank,
                tensors,
                {},
                suffix=suffix,
                advance=self._advance,
                digests=self._digests,
                copier=self._copier,
            )

    def prepare_copy(self) -> None:
        """Make what `copy_to_host` needs, while the device is well."""
        if self.optimizer.device.type != "cpu":
            self._early, self._reading = HostCopier(self.optimizer.device), threading.Lock()

    def copy_to_host(self, step: int) -> None:
        """Copy this rank's state of `step` to the host, before something is asked of the device that may never come back: a write of that step asks
        nothing of the device from then on. Waits for a write that reads it now. On the CPU nothing is done. One thread at a time."""
        if self._early is None:
            return
        with self._reading:
            if self._on_host is not None and self._on_host[0] == step:
                return
            self._on_host, copied = None, dict[str, list[HeldTensor]]()
            for group, tensors in self.optimizer.holdings(step).items():
                copied[group] = [replace(tensor, values=self._early(tensor.values)) for tensor in tensors]
                self._advance(sum(tensor.values.nbytes for tensor in tensors))
            self._on_host = step, copied

    def drop_copy(self) -> None:
        """Give the memory of that copy back: the state changes again."""
        self._on_host = None

    def publish(self, order: PublishOrder) -> str:
        with self.around("publish", order.step, f"{order.directory}/{order.tmp_name}"):
            if self._publisher is None:
                self.checkpoint = self._publish(order)
                return self.checkpoint
            return self._publisher.publish(order, self.optimizer.host_state(order.step), self._advance)

    def _publish(self, order: PublishOrder) -> str:
        fields: dict[str, Any] = {
            "step": order.step,
            "results": order.results,
            "cause": order.cause,
            "record": self._record_of(order),
            "state": self.host_state(order.step),
            "layout": self.layout,
            "blobs": param_group_blobs(self._param_groups(order.step)),
            "rank": self._rank,
            "term": order.term,
            "expected": self.optimizer.expected_tensors(),
            "trusted": self._trusted,
            "passed_over": self.passed_over,
            "advance": self._advance,
            "keys": self.keys,
        }
        return self.store.publish(order.directory, order.tmp_name, **fields)

    def _record_of(self, order: PublishOrder) -> CommitRecord | None:
        """Return the commit record of the ordered step: this rank's own where it has one, which no order can change."""
        own = self.optimizer.last_record
        return own if own is not None and own.step == order.step else order.record

    @property
    def work_done(self) -> int:
        """Bytes, files, entries and buckets that orders and updates have got through so far: it grows while a write, a publish,
        a roll forward or the training thread's own update progresses. Any thread."""
        publishing = 0 if self._publisher is None else self._publisher.work_done
        return self._io_done + publishing + self.optimizer.work_done

    def _advance(self, count: int) -> None:
        self._io_done += count

    def trust(self, path: str) -> None:
        """Note a published checkpoint that this run has written or verified: `publish` need not read it again in full."""
        self._trusted |= {path}
        self.checkpoint = path

    def resumes_from(self, path: str, step: int) -> None:
        """Note the checkpoint of `step` that is loaded: those of earlier steps are this run's history."""
        self._trusted |= {path}
        self._resumed = step

    def pass_over(self, checkpoints: Mapping[str, int]) -> None:
        """Take what the others have passed over (inode by path): this process has come later, in a lost one's place."""
        self._before = dict(checkpoints)

    @property
    def passed_over(self) -> dict[str, int]:
        """Published checkpoints, inode by path, that were there when the attempt began, and from which it has not resumed: they are another run's, or
        were refused. None of them holds a step of this run."""
        return {
            path: inode
            for path, inode in self._before.items()
            if path not in self._trusted and (step_of_directory(Path(path)) or 0) >= self._resumed
        }

    def host_state(self, step: int) -> Mapping[str, Any]:
        """Return all host state that belongs to `step`: the optimizer's and the trainer's."""
        return {"optimizer": self.optimizer.host_state(step), "trainer": self.step_states.get(step)}

    def _param_groups(self, step: int) -> list[dict[str, Any]]:
        """Return the base optimizer's param groups at `step`, with names in place of parameters, as stock torch has them."""
        groups: list[dict[str, Any]] = [dict(group) for group in self.optimizer.host_state(step)["param_groups"]]
        for index, group in enumerate(groups):
            group["params"] = self.optimizer.param_names(index)
        return groups
