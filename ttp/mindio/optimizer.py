"""The optimizer of the facade: Megatron's interface around a replica optimizer.

Owns the translation, and where a step's collectives end so that the trainer's own bookkeeping is never behind the state
that is saved:

    reduce_model_grads   take the gradients (main_grad, or grad) into the buckets
    step                 reduce, agree (left when the work thread has rolled this step forward), begin_to_update, the local
                         update, end_to_update
    gather_model_params  nothing: the gather begins with the end of the update, and is waited for by whatever comes next:
                         `zero_grad`, a forward pass, a checkpoint. By then the trainer has counted its schedule and its samples
                         on, so the state that a fault finds half gathered is not half counted

Never writes a file, never talks to a controller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ttp.errors import CheckpointError, ConfigError, Overtaken
from ttp.exchange.json_collectives import world
from ttp.mindio import given
from ttp.mindio.job import current_job
from ttp.mindio.model_parallel import job_names, sum_shared_gradients
from ttp.mindio.scaler import loss_scale_of
from ttp.mindio.state_files import native, param_state
from ttp.mindio.state_files.whole_state import WholeState, gather_whole, load_whole, part_tensors
from ttp.mindio.zeros import CountingOddReplicaOptimizer, CountingReplicaOptimizer
from ttp.optim.replica_optimizer import ClipNorm
from ttp.optim.replica_optimizer import TTPOddReplicaOptimizer as OddCore
from ttp.optim.replica_optimizer import TTPReplicaOptimizer as Core
from ttp.optim.step_agreement.participation import Ending
from ttp.proto.messages import CommitRecord


class TTPReplicaOptimizer:
    """A Megatron optimizer whose state is stored on two ranks each; the data-parallel size is even.

    1. `zero_grad()`, forward and backward passes, which leave the gradients in `main_grad` (or `grad`)
    2. `reduce_model_grads(args, timers)`, `step(args, timers)`, `gather_model_params(args, timers)`
    3. the learning-rate schedule's step, `ttp_set_ckpt_args`

    Every rank calls all of them in step.
    """

    core_class: type[Core] = Core
    counting_class: type[Core] = CountingReplicaOptimizer
    keeps_fp32_grads = True
    """Gradients of `main_grad` are kept and sent in FP32; False: in the parameters' type."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        clip_grad: float,
        log_num_zeros_in_grad: bool,
        params_have_main_grad: bool,
        use_contiguous_buffers_in_local_ddp: bool,
        fp16: bool,
        bf16: bool,
        params_dtype: torch.dtype,
        grad_scaler: Any,
        models: Sequence[torch.nn.Module] | torch.nn.Module,
        local_copy: bool = False,
        *,
        on_divergence: str = "report",
    ) -> None:
        """Take over the parameters and settings of `optimizer` (a collective of all ranks; in each data-parallel group the first rank's
        parameters become everyone's).

        clip_grad: largest global L2 norm, 0 for none. models: what has the parameters, for their names; parameters of 16 bits
        have FP32 masters. local_copy: keep the state of the step before as well. on_divergence: replicas that differ are reported ("report"),
        or end the job ("stop"). Raises ConfigError, LayoutError.
        """
        given.check_divergence(on_divergence)
        given.check(optimizer, fp16, bf16, params_dtype)
        self._job = current_job()
        self.models = [models] if isinstance(models, torch.nn.Module) else list(models)
        self.grad_scaler = grad_scaler
        self.clip_grad = clip_grad
        self.local_copy = local_copy
        self._main_grad = params_have_main_grad
        named = given.named(self.models, optimizer)
        if params_have_main_grad and (name := next((n for n, p in named if not hasattr(p, "main_grad")), None)):
            raise ConfigError(
                f"params_have_main_grad is True, but {name!r} has no main_grad: wrap the model for data parallelism (which adds"
                " it) before the optimizer is built, or pass False"
            )
        base, kwargs = given.base_of(optimizer)
        self.place = self._job.built(self)
        """Which part of the model this rank has."""
        self._names = job_names(self.place, self.models, named)
        self._params = self._names.named
        own = {id(param): name for name, param in named}
        self._order = [[(own[id(param)], param) for param in group["params"]] for group in optimizer.param_groups]
        self._groups_each = 2 if self.place.expert_size > 1 else 1
        self.log_num_zeros_in_grad = log_num_zeros_in_grad
        self.core = (self.counting_class if log_num_zeros_in_grad else self.core_class)(
            given.groups(optimizer, {id(param): name for name, param in self._params}, self.place),
            base,
            group=self.place.data_group,
            span=dist.group.WORLD if self.place.splits_model else None,
            copies=self._names.copies,
            loss_scale=loss_scale_of(grad_scaler),
            grad_dtype=torch.float32 if params_have_main_grad and self.keeps_fp32_grads else None,
            local_copy=local_copy,
            compare_every=0,  # `zero_grad` does it, where a peer's death cannot keep the trainer from its bookkeeping
            on_divergence=on_divergence,
            **kwargs,
        )
        self.core.part_name = self.place.part_name
        self._given = optimizer
        # As in Megatron: a schedule that works on either acts on the update.
        optimizer.param_groups = self.core.param_groups
        self.core.close()  # gradients are taken at `reduce_model_grads`: which backward pass is the last, only the trainer knows
        self.compare_every = 100
        """After so many steps the replicas' bits are compared (0: never)."""
        self.optimizer = LocalUpdate(self)
        self.error_dump = False
        """True from `set_dump_args` on: what is saved is a dying gasp."""
        self.save_args: dict[str, Any] = {}
        """What `set_dump_args` was given: rank, step, rank_list. Empty before."""
        self.ending = Ending.GO_ON
        """What all ranks do when they have finished this step."""
        self._begun = True
        """The trainer has begun something new since the last update."""
        for model in self.models:
            model.register_forward_pre_hook(lambda *_: self._begin())
        self._reduced = False
        self._record: CommitRecord | None = None
        """What the ranks have agreed on for the step that is being done."""
        self._clipped_to = clip_grad
        self._overtaken = False
        """That step's update was done by the work thread: the trainer has its bookkeeping to do, and no more."""
        self._whole: WholeState | None = None
        self._shown = False
        """A dying gasp's state is shown to the save handler."""
        self._saved_elsewhere = False
        """The save handler runs here beside the save rank's: another rank writes."""
        self._brought_together = False
        """`save_parameter_state` has gathered this step's state: the next `need_write_file` need not."""
        self._awaited: tuple[dict[str, Any], dict[str, int]] | None = None
        """Host state and step counts of a distributed optimizer whose tensors `load_parameter_state` is to load."""

    # --- a step ---

    @property
    def current_step(self) -> int:
        """The step whose update is in the state."""
        return self.core.current_step

    @current_step.setter
    def current_step(self, step: int) -> None:
        """Say before the first step which one the state is of (the trainer's iteration, loaded or 0)."""
        if step != self.core.current_step:
            self.core.count_from(step)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.core.param_groups

    def get_loss_scale(self) -> torch.Tensor:
        return torch.tensor([self.core.loss_scale], dtype=torch.float32, device=self.core.device)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return self.core.scale_loss(loss)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a step: the parameters are whole, and gradients are zero."""
        self._begin()
        self._job.end_pause()
        if self.compare_every and self.current_step and self.current_step % self.compare_every == 0:
            self.core.check_replicas()
        self.core.zero_grad()

    def _begin(self) -> None:
        """The trainer begins something new after an update: from here the parameters are whole."""
        if self._begun:
            return
        self._job.settle(self.current_step)
        self.core.finish_gather()
        self._begun = True

    def reduce_model_grads(self, args: Any = None, timers: Any = None) -> None:
        """Take the gradients of this step; they are averaged over the data-parallel ranks within `step`.

        Where the model is split, gradients of which several ranks have a part each are summed first (a collective)."""
        with torch.no_grad():
            sum_shared_gradients(self.place, self._names, self._main_grad)
            for name, param in self._params:
                grad = param.main_grad if self._main_grad else param.grad  # type: ignore[attr-defined]
                kept = self.core.gradient(name)
                if grad is None:
                    kept.zero_()
                elif grad is not kept:
                    kept.copy_(grad)
                param.grad = kept if kept.dtype == param.dtype else None
        self._reduced = True

    def step(self, args: Any = None, timers: Any = None) -> tuple[bool, float | None, int | None]:
        """Update the state; return (updated, the gradient's norm or None, its zeros or None). Not updated: a gradient was not finite."""
        step = self.current_step + 1
        self.begin_to_update(self.current_step)
        self.optimizer.step()
        self.end_to_update()
        record = self.core.last_record
        if record is None or record.step != step:
            raise CheckpointError(f"step {step}: the state is that of step {self.current_step}")
        if record.skipped:
            return False, None, None
        zeros = round(record.sums[0]) if self.log_num_zeros_in_grad else None
        return True, record.grad_norm if self.clip_grad > 0 else None, zeros

    def clip_grad_norm(self, clip_grad: float) -> float:
        """Have this step's update clipped to `clip_grad` (0: not at all), and return the gradient's norm over all ranks and model parts before it
        (a collective of all ranks, once a step): a trainer's own `step` calls this where Megatron's does."""
        self._agree(clip_grad)
        assert self._record is not None
        return self._record.grad_norm

    def count_zeros(self) -> int:
        """Return the zeros of this step's gradient over all ranks and model parts (a collective of all ranks, unless `clip_grad_norm` was
        called before). Raises ConfigError without `log_num_zeros_in_grad`."""
        if not self.log_num_zeros_in_grad:
            raise ConfigError("count_zeros of an optimizer that counts none: build it with log_num_zeros_in_grad=True")
        self._agree()
        assert self._record is not None
        return round(self._record.sums[0])

    def begin_to_update(self, iteration: int) -> None:
        """Agree with all ranks that the update may begin, and begin it: a trainer's own `step` calls this right before
        `self.optimizer.step()`. iteration: the one before this step's; the optimizer counts for itself."""
        self._agree()
        self.start_updating()

    def _agree(self, clip_grad: float | None = None) -> None:
        """Agree on this step with all ranks, once. clip_grad: the update's, the constructor's unless given."""
        if self._record is not None:
            if clip_grad not in (None, self._clipped_to):
                raise ConfigError(
                    f"invalid clip_grad: got {clip_grad}, expected {self._clipped_to}, on which the ranks have agreed for step"
                    f" {self._record.step}. Call clip_grad_norm once a step, before begin_to_update and count_zeros"
                )
            return
        if not self._reduced:
            self.reduce_model_grads()
        self._whole, self._brought_together = None, False
        if self._awaited is not None:
            raise CheckpointError(
                "invalid start: got a distributed optimizer's state without its tensors. Call optimizer.load_parameter_state(filename)"
                " after load_state_dict, or optimizer.reload_model_params() to begin with fresh moments"
            )
        step = self.current_step + 1
        self._clipped_to = self.clip_grad if clip_grad is None else clip_grad
        self.core.clip = ClipNorm(self._clipped_to) if self._clipped_to > 0 else None
        try:
            self._record, self.ending = self.core.agree()
        except Overtaken:
            self._record, self._overtaken = self.core.last_record, True
        except RuntimeError as error:
            if not self._job.overtaken_after(error, step):
                raise
            self._record, self._overtaken = self.core.last_record, True
        finally:
            self._reduced = False

    def start_updating(self) -> None:
        """Take the gate (`ttp_start_updating_os`). Raises ConfigError before the ranks have agreed."""
        if self._record is None:
            raise ConfigError(
                "ttp_start_updating_os without a step that the ranks have agreed on: call optimizer.step(), or"
                " optimizer.begin_to_update(iteration), which calls it"
            )
        if not self._overtaken:
            try:
                self.core.begin_update(self._record)
            except Overtaken:
                self._overtaken = True

    def apply(self) -> None:
        """The local update, between `begin_to_update` and `end_to_update`; no collective."""
        if self._record is None:
            raise ConfigError("optimizer.step() of the inner optimizer comes after begin_to_update")
        self.core.apply(self._record)  # nothing, where the work thread has done it

    def end_to_update(self) -> None:
        """The update is finished."""
        self.end_updating(self.current_step)

    def end_updating(self, step: int) -> None:
        """Give the gate back (`ttp_end_updating_os`)."""
        if self._record is None or step != self._record.step:
            begun = "none" if self._record is None else f"that of step {self._record.step}"
            raise ConfigError(f"ttp_end_updating_os({step}): the update that was begun is {begun}")
        self._record = None
        self._begun = False
        # What torch's schedules look for, as its own `step` is never called.
        self._given._opt_called = True  # type: ignore[attr-defined]
        if not self._overtaken:
            self.core.end_update(step)
            self.core.start_gather(step)

    def gather_model_params(self, args: Any = None, timers: Any = None) -> None:
        """Nothing remains to do: the gather has begun with the end of the update, and what comes next waits for it."""

    def reload_model_params(self) -> None:
        """Take the model's parameters as they are now, after somebody loaded weights into it."""
        self._awaited = None
        self.core.masters_from_params()

    # --- checkpoints ---

    def set_dump_args(self, rank: int, step: int, rank_list: Sequence[int]) -> None:
        """The save handler says that a dying gasp is written: by `rank`, of `step`, from the shards that `rank_list` wrote."""
        self.save_args.update(rank=rank, step=step, rank_list=list(rank_list))
        self.error_dump = True

    def need_write_file(self) -> bool:
        """Say whether this rank writes the checkpoint's file.

        In a periodic checkpoint every rank asks, and the state of each model part is brought together on its first rank
        (collectives). At a fault it is true on the save rank. Raises ReplicasDiffer with `on_divergence="stop"`.
        """
        rank, _ = world()
        if self.error_dump:
            return bool(self.save_args["rank"] == rank)
        if self._shown or self._saved_elsewhere:  # in a save handler that has not called set_dump_args: no collective
            return self._shown
        if self._brought_together:
            self._brought_together = False
            return self._whole is not None
        self._begin()
        self._job.long_pause()
        if self.core.on_divergence.acts and self.core.on_divergence.equal_after < self.current_step:
            self.core.check_replicas()
        self._whole = gather_whole(self.core, self._names.own, self.place.data_group, self._writer)
        return self._whole is not None

    @property
    def _writer(self) -> int:
        """The rank that writes the file of this rank's model part in a periodic checkpoint."""
        group = self.place.expert_data_group or self.place.data_group
        return 0 if group is None else dist.get_process_group_ranks(group)[0]

    def part_tensors(self) -> dict[str, tuple[int, ...]]:
        """Return key and shape of every tensor of this rank's model part."""
        return part_tensors(self.core, self._names.own)

    def show(self, state: WholeState) -> None:
        """Have `state_dict` return `state`, and the model's parameters be its masters, in memory of their own: what a collective
        in progress still writes goes into the old memory. Work thread, before the save handler."""
        self._whole, self._shown, self._saved_elsewhere = state, True, False
        for name, param in self._params:
            param.data = state.master(name).to(param.device, param.dtype)

    def leave_to_save_rank(self) -> None:
        """The save handler runs here, and another rank writes the file. Work thread."""
        self._whole, self._shown, self._saved_elsewhere = None, False, True

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state of this rank's model part at this step, on the rank for which `need_write_file` is true. Raises
        CheckpointError elsewhere. The trainer's own optimizer loads it as well, without TTP."""
        whole = self._whole
        if whole is None and world()[1] == 1:
            whole = gather_whole(self.core, self._names.own, None, 0)
        if whole is None:
            raise CheckpointError(
                f"rank {world()[0]} holds only shards of step {self.current_step}: have every rank call"
                " optimizer.need_write_file() first, and save on the one where it is true"
            )
        own = whole.renamed(self._names.own)
        return {**own.to_dict(), **native.entries(own, self._order, self._groups_each)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's shards of what `state_dict` returned (all ranks call, each with its model part's). Raises CheckpointMismatch.

        The whole state of the trainer's own optimizer, without TTP, is taken as well; its model's weights are loaded before. Of its
        distributed optimizer this has no tensors: `load_parameter_state` follows."""
        self._awaited = None
        if native.is_distributed(state_dict):
            self._awaited = native.read_distributed(state_dict, self._order, self._groups_each, self.core.host_state())
        elif native.is_native(state_dict):
            self._load(native.read(state_dict, self._order, self._groups_each, self.core.host_state()))
        else:
            self._load(WholeState.from_dict(state_dict))

    def save_parameter_state(self, filename: str) -> None:
        """Write the file of Megatron's distributed optimizer, on the rank for which `need_write_file` is true (all ranks call, in a
        periodic checkpoint a collective): without TTP the trainer loads it. Raises CheckpointMismatch if the base is not Adam."""
        writes = self.need_write_file()
        self._brought_together = not (self.error_dump or self._shown or self._saved_elsewhere)
        if writes:
            assert self._whole is not None
            group = self.place.data_group
            ranks = world()[1] if group is None else dist.get_world_size(group)
            param_state.save(filename, self._whole.renamed(self._names.own), self._chunks, ranks)

    def load_parameter_state(self, filename: str) -> None:
        """Take this rank's shards from the file of Megatron's distributed optimizer (all ranks call, each with its model part's file),
        after `load_state_dict`. Nothing remains to do where that was given what `state_dict` returned with TTP."""
        if self._awaited is not None:
            host, steps = self._awaited
            self._load(WholeState(0, param_state.load(filename, self._chunks, steps), host))
            self._awaited = None

    @property
    def _chunks(self) -> list[list[tuple[str, torch.nn.Parameter]]]:
        """The trainer's own name and the parameter of each model chunk, in the order of its gradient buffer."""
        own = {id(param): name for members in self._order for name, param in members}
        return [[(own[id(p)], p) for p in model.parameters() if id(p) in own] for model in self.models]

    def _load(self, state: WholeState) -> None:
        load_whole(state.renamed({own: name for name, own in self._names.own.items()}), self.core, self._names.own)


class TTPOddReplicaOptimizer(TTPReplicaOptimizer):
    """The same for any data-parallel size from 2: 3, 5, 7."""

    core_class = OddCore
    counting_class = CountingOddReplicaOptimizer


class DistributedOptimizerWithoutFP32Grad(TTPReplicaOptimizer):
    """Gradients are kept and sent in the parameters' type (`--release-fp32-grad`); masters and moments stay FP32."""

    keeps_fp32_grads = False


class OddDistributedOptimizerWithoutFP32Grad(TTPOddReplicaOptimizer):
    """The same for any data-parallel size from 2."""

    keeps_fp32_grads = False


class LocalUpdate:
    """What `optimizer.optimizer` is: the update of this rank's shards, for a trainer's own `step`."""

    def __init__(self, owner: TTPReplicaOptimizer) -> None:
        self._owner = owner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._owner.param_groups

    def step(self) -> None:
        """Do the update between `begin_to_update` and `end_to_update`."""
        self._owner.apply()
