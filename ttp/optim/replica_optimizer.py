"""TTPReplicaOptimizer and TTPOddReplicaOptimizer: ZeRO-1 with copies, around any element-wise torch optimizer.

Owns the order of one step: reduce, ready, agree, update, gather. Holds every shard of the FP32 state on R ranks, reports to a
tracker the phases of the protocol, and can finish a step from another thread with nothing but a commit record. Never
writes checkpoints, never talks to a controller.

    backward          buckets are reduced while it runs                                    state = t - 1
    step: ready(t)    this rank's reduced gradients are final
          agree       one small all-reduce: squares, overflow, the caller's sums; everyone builds the same CommitRecord
          begin_update, local update of the held shards (no collective), end_update        state = t
          gather      masters -> parameters where they are not one memory, all-gather within the row
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ttp.checkpoint.format.types import HeldTensor
from ttp.errors import CheckpointError, ConfigError
from ttp.interfaces.update_tracker import UpdateTracker
from ttp.optim import base_state
from ttp.optim.assembly import mark_copied, named_groups
from ttp.optim.buckets import GradBuckets
from ttp.optim.comparison import Divergence
from ttp.optim.partition import Cut, Gather, build_part, by_process_group, expected_tensors, job_params
from ttp.optim.replica_check import ReplicaCheck
from ttp.optim.shard_layout.workload import digest
from ttp.optim.shards_only import OptimizerOfShards
from ttp.optim.step_agreement.overflow import SkippedSteps
from ttp.optim.step_agreement.participation import Ending
from ttp.optim.step_agreement.spanning import Spanning
from ttp.optim.step_agreement.step_result import ClipNorm, ClipValue, LossScale, ScaleState, StepResult, clip_factor
from ttp.optim.step_state import StepState
from ttp.proto.messages import CommitRecord, ShardGroup

__all__ = ["ClipNorm", "ClipValue", "LossScale", "StepResult", "TTPOddReplicaOptimizer", "TTPReplicaOptimizer"]

log = logging.getLogger("ttp")

NamedParams = Iterable[tuple[str, torch.nn.Parameter]] | Iterable[dict[str, Any]]


class TTPReplicaOptimizer(OptimizerOfShards):
    """A torch optimizer whose state is stored on `replicas` ranks each: two halves of the data-parallel group for R=2.

    1. `loss = optimizer.scale_loss(loss)`, `loss.backward()`; all passes of a step but the last within `no_sync()`
    2. `result = optimizer.step(sums=[loss])`; then the LR scheduler's step, which works on `param_groups`
    3. `optimizer.zero_grad()`

    Every rank calls all of them in step. After `step` the gradients are used up (`p.grad` is None). Between backward and `step` they are being reduced:
    clipping and loss scale are `clip` and `loss_scale`, never torch's `clip_grad_norm_` or GradScaler. A parameter that backward does not reach counts as a
    zero gradient. A step whose gradient is not finite is skipped on every rank. Buffers of the model (batch norm's statistics) are in no checkpoint.
    """

    ring = False

    def __init__(
        self,
        params: NamedParams,
        base: type[Optimizer] = torch.optim.AdamW,
        *,
        group: Any = None,
        span: Any = None,
        copies: Collection[str] = (),
        barrier: Any = None,
        replicas: int = 2,
        clip: ClipNorm | ClipValue | None = None,
        loss_scale: LossScale | None = None,
        micro_batches: int = 1,
        bucket_bytes: int = 25 * 2**20,
        grad_dtype: torch.dtype | None = None,
        local_copy: bool = False,
        masters_apart: bool = False,
        gradient_accumulation_shard: bool = False,
        compare_every: int = 100,
        on_divergence: str = "report",
        hosts: Sequence[str] | None = None,
        timeout: timedelta | None = None,
        **base_kwargs: Any,
    ) -> None:
        """Cut the state and build the groups (a collective over `group`; rank 0's parameters become everyone's).

        `params`: (name, parameter) pairs, or dicts whose "params" are such pairs. `group`: the data-parallel process
        group, WORLD unless given; a dict may name another one for its parameters as "process_group" (experts that are spread
        over the data-parallel ranks). Parameters may be DTensors of a mesh of the ranks that split the model.
        `copies`: names of parameters that a rank of another stage has as well, which counts and saves them (tied embeddings);
        the caller sums their gradients (`gradient`) before `step`.
        `span`: the process group of all ranks that share the model, `group` unless given: over it go the step's norm, overflow
        and `sums`, so that its commit record proves that all of them were ready.
        `micro_batches`: backward passes a step; gradients are averaged over ranks and passes
        (see `gradient_divisor`). `grad_dtype`: dtype in which gradients are kept and sent, the parameter's unless given.
        `replicas`: ranks that hold each shard; a lone rank has all state and no copy. `masters_apart`: FP32 parameters are their
        own masters unless this is True; then masters have memory of their own, as those of 16-bit parameters always have.
        `gradient_accumulation_shard`: gradients are reduced after every backward pass of a step (see `no_sync`), and each rank keeps the
        sums of its shards in place of whole gradients. All ranks make as many passes. `copies` are left out: their gradients stay whole.
        `hosts[rank]`: the machine of each rank of the group, to keep a shard's holders apart (found out unless given).
        `barrier`: where `span` does not hold all ranks that share the model, a process group that does (barrier mode): one
        more all-reduce of 56 bytes right before the update makes the commit record prove that all of them were ready,
        and an overflow anywhere skips the step everywhere. `compare_every`: after so many steps the replicas' bits are
        compared (0: never). `on_divergence`: a difference is reported ("report"), ends the job ("stop"), or has the process replaced whose replica
        most holders prove wrong ("repair"); with the latter two `save` compares as well. `base_kwargs` go to `base`.

        Raises LayoutError when the state cannot be split over the group, ConfigError for a parameter or base that
        cannot be used.
        """
        accumulate = gradient_accumulation_shard
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ConfigError("this rank is not a member of `group`; pass the data-parallel group that it is in")
        groups, named = named_groups(params, copies)
        device = named[0].param.device
        named = mark_copied(named, copies, barrier if span is None else span, device)
        kwargs, defaults = base_state.base_defaults(base, base_kwargs, device)
        super().__init__(groups, defaults)
        self._built = True
        self._group = dist.group.WORLD if group is None and dist.is_initialized() else group
        span = self._group if span is None else span
        self.spanning = Spanning(span, barrier, device)
        self.spans_job = self.spanning.spans_job
        world = self._group.size() if self._group is not None else 1
        self.clip, self.gradient_divisor = clip, float(world * micro_batches)
        """The summed gradient is divided by this and by the loss scale within the update."""
        self.part_name: Callable[[Any], str] | None = None
        """Of a process group: what the names of its shards begin with in messages; None: with nothing."""
        if compare_every < 0:
            raise ConfigError(f"compare_every: got {compare_every}, expected a number of steps, or 0 for never")
        self.compare_every = compare_every
        self.device = device
        self._steps = StepState(device)
        self.lane = self._steps.lane
        self._rule, self._skipped = loss_scale, SkippedSteps(loss_scale)
        self._scale = ScaleState(loss_scale.initial if loss_scale else 1.0)
        self._backup_step = -1

        cut = Cut(replicas, self.ring, bucket_bytes, grad_dtype, local_copy, masters_apart, accumulate, hosts, timeout)
        self._parts = [
            build_part(of, named, places, cut, device) for of, places in by_process_group(named, self._group)
        ]
        self._check = ReplicaCheck(self._parts, self._steps, device, on_divergence)
        self.on_divergence = self._check.on_divergence
        self.layout = self._parts[0].layout
        """How the parameters of `group` are cut."""
        self.workload = digest([part.layout.params_digest() for part in self._parts])
        self._params = job_params(self._parts, span, device)
        self._gather = Gather(self._parts)
        self._local_copy = local_copy
        self._at_ready = base_state.settings_of(self.param_groups)
        for part in self._parts:
            part.shards.create_base(base, kwargs, self._at_ready)
        if self.lane.ordered:
            with self.lane.roll_stream():
                for part in self._parts:
                    part.shards.warm_up(base, kwargs, self._at_ready, isinstance(clip, ClipValue))
        self._kinds = base_state.state_kinds(base, kwargs, self._at_ready, device)
        self._divisor = self.gradient_divisor
        self._steps.host_state = self._host_backup = self._describe()
        placed = [bucket for part in self._parts for bucket in part.buckets()]
        placed.sort(key=lambda entry: -entry[0])  # as backward fills them, whichever part they belong to
        launched = functools.partial(self._steps.point, "backward")
        waits = self._steps.in_collective
        self._buckets = GradBuckets([bucket for _, bucket in placed], self.lane, self._steps.touch, launched, waits)

    @property
    def current_step(self) -> int:
        """Updates that are in the state."""
        return self._steps.step

    @property
    def divergences(self) -> tuple[Divergence, ...]:
        """Tensors of which replicas were found to differ, each once, as first seen; the same on every rank of the group."""
        return self._check.divergences

    @property
    def last_record(self) -> CommitRecord | None:
        """Record of the newest update; None before the first one and after a load."""
        return self._steps.last_record

    @property
    def on_point(self) -> Callable[[str, int], None] | None:
        """Called with a point's name and the step, for fault injection: backward, ready, record, updating, done, gathering."""
        return self._steps.on_point

    @on_point.setter
    def on_point(self, call: Callable[[str, int], None] | None) -> None:
        self._steps.on_point = call

    # --- the training thread ---

    def attach(self, tracker: UpdateTracker, attempt: int = 0) -> None:
        """Report the phases of every step to `tracker` from now on; `attempt`: this attempt's number, the same on every rank."""
        self._steps.tracker = tracker
        self.spanning.attempt = attempt

    @property
    def loss_scale(self) -> float:
        return self._scale.scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply the loss by the loss scale; the update divides by it again."""
        return loss if self._rule is None else loss * self._scale.scale

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate without reducing: for all backward passes of a step but the last. With `gradient_accumulation_shard` each of them
        needs a `no_sync()` of its own, and its gradients are reduced by the end of it (a collective)."""
        return self._buckets.no_sync()

    def micro_batch(self, params: Iterable[torch.nn.Parameter]) -> AbstractContextManager[None]:
        """The same for a backward pass that reaches no other parameters than these, where all of a step's passes that reach them are
        made so, the last one too (those of a pipeline's stage): `step` does the rest."""
        return self._buckets.micro_batch(params)

    def gradient(self, name: str) -> torch.Tensor:
        """Return this rank's part of a parameter's gradient, accumulated within `no_sync` and not reduced yet: to change it in
        place before `step`. Raises ConfigError for a name that is not there, and for one whose gradient accumulates in shards."""
        return self._buckets.gradient(name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Start a step: forget all gradients (`p.grad` is None until backward comes to it, whatever `set_to_none`)."""
        self._steps.touch(force=True)
        self._buckets.zero()

    @torch.no_grad()
    def step(self, sums: Sequence[float] | torch.Tensor | None = None) -> StepResult:  # type: ignore[override]
        """Finish the step's reductions, agree with all ranks, update the held shards, gather the parameters.

        `sums`: small numbers (a loss, a token count) that come back summed over the ranks; as many on every rank. Collective:
        every rank calls it. It is `agree`, `begin_update`, `apply`, `end_update`, `start_gather`, `finish_gather`, in this order.
        """
        record, ending = self.agree(sums)
        step = record.step
        self.begin_update(record)
        self.apply(record)
        self.end_update(step)
        self.start_gather(step)
        self.finish_gather()
        if self.compare_every and step % self.compare_every == 0:
            self.check_replicas()
        self.boundary(step, ending)
        return StepResult(step, record.grad_norm, record.clip_factor, record.skipped, record.loss_scale, record.sums)

    @torch.no_grad()
    def agree(self, sums: Sequence[float] | torch.Tensor | None = None) -> tuple[CommitRecord, Ending]:
        """Finish the reductions, be ready, and agree on the commit record with all ranks (collectives), and on how the step ends."""
        state, step = self._steps, self.current_step + 1
        state.touch()
        self.finish_gather()  # a gather still under way may write where the update will
        with state.in_collective():
            self._buckets.finish()
            self._at_ready = base_state.settings_of(self.param_groups)
            self._rates = tuple(float(group["lr"]) for group in self._at_ready)
            self._divisor = self.gradient_divisor
            squares = self._squares()  # launched before the wait: the device has something to do
            state.ready(step, self.spanning.check_communicators)
            record, ending = self._agree(step, squares, sums)
        state.point("record", step)
        return record, ending

    def begin_update(self, record: CommitRecord) -> None:
        """Take the gate for the update that `record` commits; waits while frozen."""
        self._steps.tracker.begin_update(record.step, record, record.step - 1 if self._local_copy else -1)

    @torch.no_grad()
    def apply(self, record: CommitRecord) -> None:
        """Do the local update between `begin_update` and `end_update`; no collective."""
        try:
            # While this thread waited at the gate, another one may have rolled this very step forward.
            if self.current_step != record.step:
                self._apply(record)
                self.lane.mark_updated()
        except BaseException:
            self._steps.tracker.fail_update(record.step)
            raise

    def end_update(self, step: int) -> None:
        """Give the gate back: the state is that of `step`."""
        self._steps.tracker.end_update(step)
        self._steps.point("done", step)

    def boundary(self, step: int, ending: Ending) -> None:
        """`step` is finished here. Where some rank has a preemption notice: does not return while the process has to be led out."""
        if ending is not Ending.GO_ON:
            self._steps.tracker.boundary(step, ending is Ending.SAVE)

    @torch.no_grad()
    def start_gather(self, step: int) -> None:
        """Begin to share the updated parameters; from `apply` until `finish_gather` they are half new."""
        self._gather.start()
        self._steps.point("gathering", step)

    def finish_gather(self) -> None:
        """Wait until the parameters are whole; at once where nothing is being gathered."""
        with self._steps.in_collective():
            self._gather.finish()

    def compare_replicas(self) -> tuple[Divergence, ...]:
        """Compare the bits of this step's state with the other holders' and return what differs (a collective over the group).

        What is new is reported once, by the group's first rank.
        """
        return self._check.compare()

    def check_replicas(self) -> tuple[Divergence, ...]:
        """Compare, and do what `on_divergence` says about a difference (a collective); return it where that is to report it. Raises ReplicasDiffer, WrongReplica, WrongPeer."""
        return self._check.check()

    def masters_from_params(self) -> None:
        """Take the parameters as masters again, after somebody wrote into the model (a pretrained state dict): on every rank."""
        for part in self._parts:
            part.shards.masters_from_params()

    def rewire(self, successor: Callable[[Any], Any]) -> None:
        """Use the process groups that have taken the place of these: `successor` returns each one's successor. No collective is under way."""
        self._group = successor(self._group)
        self.spanning.rewire(successor)
        for part in self._parts:
            part.rewire(successor)

    @torch.no_grad()
    def fill(self, replaced: Collection[int]) -> None:
        """Give the ranks in `replaced`, which hold nothing, what their replicas hold; a step that was under way is given up (a collective of all
        ranks, whose groups were made again; `load_end` follows on those ranks, `keep` on the others). Raises LayoutError, CheckpointError."""
        self._buckets.give_up()
        self._gather.give_up()
        for part in self._parts:
            part.fill(replaced, self.device)

    def close(self) -> None:
        """Take the hooks off the parameters, so that another optimizer may have them."""
        self._buckets.close()

    # --- any thread that has the gate ---

    def roll_forward(self, record: CommitRecord) -> int:
        """Do the local update of `record.step` in place of the training thread; return the new state step.

        Of the record only what this rank cannot know by itself is used: the clip factor, and whether the step is skipped.
        Raises ProtocolError, with nothing changed, unless this rank stands READY at that step.
        """
        with self.lane.after_ready(), torch.no_grad():
            self._apply(record)
            self.lane.mark_updated()
        self.lane.drain()
        return self.current_step

    @property
    def work_done(self) -> int:
        """A number that grows while an update progresses, whichever thread does it."""
        return sum(part.shards.updated for part in self._parts)

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Return key and whole shape of every tensor of the job's state, on whichever rank it lies."""
        return expected_tensors(self._params, self._kinds)

    def param_names(self, group: int) -> list[str]:
        """Return the names of all parameters of a param group, on whichever rank they lie."""
        return [param.name for param in self._params if param.group == group]

    def shard_groups(self) -> tuple[ShardGroup, ...]:
        """Return what this rank holds, for its registration."""
        return tuple(group for part in self._parts for group in part.shard_groups(self.part_name))

    def holdings(self, step: int | None = None) -> dict[str, list[HeldTensor]]:
        """Return views of the state of `step` (the newest unless given) by group id. Raises CheckpointError if not held."""
        backup = self._from_backup(step)
        return {part.layout.group_id(shard): held for part in self._parts for shard, held in part.held(backup)}

    def host_state(self, step: int | None = None) -> dict[str, Any]:
        """Return the JSON-able part of the state of `step`, equal on every rank: loss scale and hyper-parameters."""
        return self._host_backup if self._from_backup(step) else self._steps.host_state

    def layout_json(self) -> str:
        return self.layout.to_json()

    # --- loading (the training thread) ---

    def load_targets(self) -> list[HeldTensor]:
        """Return what `load_begin` will, to find out where it can be read; the state stays what it is."""
        return [target for part in self._parts for target in part.shards.targets()]

    def load_begin(self) -> list[HeldTensor]:
        """Return views of all the state, to be filled in place. Until `load_end` the state belongs to no step."""
        self._steps.tear("a load")
        return self.load_targets()

    def keep(self, step: int, record: CommitRecord | None) -> None:
        """Take the state as it is, that of `step`, whose record is `record`, where another rank has just been filled with it: a step that was under
        way is given up. Hyper-parameters stay, as the program has set them. Refreshes the parameters. Collective: the filled ranks
        call `load_end`."""
        self._steps.restart(step, record)
        self.on_divergence.equal_after = step
        self._backup_step = -1
        self._share_params()

    def check_host_state(self, saved: dict[str, Any]) -> None:
        base_state.check_host_state(self.param_groups, saved, self._rule is not None)

    def load_end(self, step: int, host_state: dict[str, Any], record: CommitRecord | None = None) -> None:
        """Take the filled state as that of `step`, whose record is `record`, and refresh the parameters. Collective.

        Raises CheckpointMismatch when `host_state` belongs to another arrangement of param groups.
        """
        base_state.restore_hyper_parameters(self.param_groups, host_state["param_groups"], step)
        if self._rule is not None:
            self._scale = base_state.saved_scale(host_state)
        for part in self._parts:
            part.shards.spread_scalars()
        self._set_step(step, record)
        self._share_params()

    def count_from(self, step: int) -> None:
        """Take the state as it is, before the first step, for that of `step`: a pretrained model whose steps count on."""
        if self.current_step:
            raise ConfigError(
                f"the state is that of step {self.current_step}: steps are counted by the optimizer alone"
            )
        self._set_step(step)

    # --- inside ---

    def _share_params(self) -> None:
        with torch.no_grad():
            self._gather.start()
            self._gather.finish()
        self.lane.mark_updated()  # a dump may come before the first update

    def _set_step(self, step: int, record: CommitRecord | None = None) -> None:
        self._steps.restart(step, record)
        self.on_divergence.equal_after = step
        self._backup_step = -1
        self._at_ready = base_state.settings_of(self.param_groups)
        self._steps.host_state = self._host_backup = self._describe()

    def _squares(self) -> torch.Tensor:
        """Return the sum of squares (FP64, 0-d) of the reduced gradients that this rank counts."""
        return torch.stack([part.shards.square_sum() for part in self._parts]).sum()

    def _agree(
        self, step: int, squares: torch.Tensor, sums: Sequence[float] | torch.Tensor | None
    ) -> tuple[CommitRecord, Ending]:
        """Make the commit record of the spanning collective's result: the same on every rank."""
        tracker = self._steps.tracker
        agreed = self.spanning.agree(step, squares, tracker.notice, tracker.unled, sums)
        scale = self._scale.scale
        self._skipped.note(step, scale, squares, sums, agreed)
        norm = math.inf if agreed.overflow else math.sqrt(agreed.squares) / (scale * self._divisor)
        factor = 1.0 if agreed.overflow else clip_factor(self.clip, norm)
        record = CommitRecord(step, norm, factor, bool(agreed.overflow), scale, self._rates, agreed.sums)
        return record, agreed.ending

    def _apply(self, record: CommitRecord) -> None:
        """The local update of `record.step`: a function of this rank's memory and the record, and of nothing else."""
        state, step = self._steps, record.step
        state.expect(record)
        if self._local_copy:
            for part in self._parts:
                part.shards.copy_now()
            self._host_backup, self._backup_step = state.host_state, state.step
        if not record.skipped:
            factor = record.clip_factor / (self._scale.scale * self._divisor)
            clamp = self.clip.value if isinstance(self.clip, ClipValue) else None
            state.tear(f"the update of step {step}")
            with torch.autocast(self.device.type, enabled=False):
                for number, part in enumerate(self._parts):
                    midway = functools.partial(state.point, "updating", step) if number == 0 else lambda: None
                    part.shards.update(factor, clamp, self._at_ready, self._rates, midway)
        else:
            state.point("updating", step)
        self._scale = self._scale.after(record.skipped, self._rule)
        state.updated(record)
        state.host_state = self._describe(self._rates)

    def _describe(self, learning_rates: Sequence[float] | None = None) -> dict[str, Any]:
        """Build the host state for the state as it is; with `learning_rates`, those of the update just done."""
        return base_state.described(self.current_step, self._scale, self._at_ready, learning_rates or ())

    def _from_backup(self, step: int | None) -> bool:
        if self._steps.holds(step):
            return False
        if step == self._backup_step >= 0:
            return True
        copy = f"a local copy of step {self._backup_step}" if self._backup_step >= 0 else "no local copy"
        raise CheckpointError(
            f"rank {self._parts[0].rank} {self._steps.held} and has {copy}, expected step {step or 'newest'}; "
            f"roll forward first, or take another holder"
        )


class TTPOddReplicaOptimizer(TTPReplicaOptimizer):
    """The same with the ring layout: two replicas over any number of ranks from 2 (3, 5, 7, ...)."""

    ring = True
