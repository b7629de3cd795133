"""Any torch optimizer as one that ttp protects: its hooks tell the phases, its memory is read in place.

Owns the order of one step around the trainer's own `optimizer.step()`:

    pre hook     the closure, if there is one         forward and backward passes
                 host state, buffers, ready(t)        this rank's reduced gradients are final        state = t - 1
                 agree                                one small all-reduce over all ranks makes the commit record
                 begin_update, clip (norm mode)
    step         the optimizer's own update           local maths
    post hook    end_update                                                                          state = t

In *barrier* mode the all-reduce is 64 bytes that only this needs. In *norm* mode (`clip`) it carries the global gradient norm
that clipping needs anyway: the trainer's own clipping is left out then. Never writes checkpoints, never talks to a controller.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ttp.adopt.adopted_state import AdoptedState, check_optimizer
from ttp.adopt.averages import Average
from ttp.adopt.comparing import AdoptedCheck
from ttp.adopt.filling import fill, why_not_filled
from ttp.adopt.megatron import MegatronState, distributed_optimizer
from ttp.adopt.numbers import PassNumbers
from ttp.adopt.own_backward import OwnBackward
from ttp.checkpoint.format.types import HeldTensor
from ttp.errors import CheckpointError, ConfigError, NonFinite, ProtocolError
from ttp.exchange.json_collectives import exchange_json, world
from ttp.interfaces.update_tracker import UpdateTracker
from ttp.optim.base_state import check_host_state, hyper_parameters, restore_hyper_parameters
from ttp.optim.on_divergence import OnDivergence
from ttp.optim.shard_layout.split import gradient_of
from ttp.optim.shard_layout.workload import workload_of
from ttp.optim.step_agreement.participation import Ending
from ttp.optim.step_agreement.spanning import Spanning
from ttp.optim.step_agreement.step_result import ClipNorm, clip_factor
from ttp.optim.step_state import StepState
from ttp.proto.messages import CommitRecord, ShardGroup

log = logging.getLogger("ttp")


class AdoptedOptimizer:
    """Implements `ttp.interfaces.protected_optimizer.ProtectedOptimizer` over the trainer's own model and optimizer."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        clip: ClipNorm | None = None,
        averages: Mapping[str, Average] | None = None,
        norm_needed: bool = False,
        on_nonfinite: str = "warn",
        copied: bool = False,
        on_divergence: str = "report",
    ) -> None:
        """A collective over WORLD. `copied`: the job has copies in memory. `norm_needed`: the commit record has the gradient's norm in barrier mode as well (on every rank alike).
        Raises ConfigError, LayoutError for what cannot be protected."""
        distributed = distributed_optimizer(optimizer)
        if distributed is not None:
            optimizer = distributed.optimizer
        check_optimizer(optimizer, any(hasattr(param, "device_mesh") for param in model.parameters()), copied)
        self.optimizer = optimizer
        self._model = model
        self.not_filled = ""
        """Why `why_not_filled`, beside its own reasons: set before the session begins."""
        self.clip = clip
        self._on_nonfinite = on_nonfinite
        self._numbers = PassNumbers()
        self.rank = world()[0]
        self._warned = False
        self._norm_needed = clip is not None or norm_needed
        self.on_ready: Callable[[int], None] = lambda step: None
        """Called with the step before it is READY: the trainer's host state is taken now."""
        self.on_step_end: Callable[[int], None] = lambda step: None
        """Called with the step when it is finished and the gate given back."""
        self._state = (
            AdoptedState(model, optimizer, averages)
            if distributed is None
            else MegatronState(model, distributed, averages)
        )
        self.device = self._state.device
        self._steps = StepState(self.device)
        self._check = AdoptedCheck(self._state, self._steps, self.exchange, OnDivergence(on_divergence))
        self.on_divergence = self._check.on_divergence
        self._backward = OwnBackward(self._steps)
        self.lane = self._steps.lane
        self._spanning = Spanning(_world(), None, self.device)
        self.spans_job = self._spanning.spans_job
        # Megatron's stages may have the same names, and do not do the same work.
        self.workload = workload_of(model) if distributed is None else ""
        self._ending = Ending.GO_ON
        self._record: CommitRecord | None = None
        self._updating = 0
        """The step whose update the training thread has begun and not ended (it writes and reads); 0: none."""
        self._inner = 0
        """Calls of the parent class's step within the step in flight."""
        self._rolling = 0
        """The thread that runs the step in place of the training thread, which stands in the pre hook; 0: none does."""
        self._steps.host_state = self._describe()
        # torch.compile would trace them where a trainer compiles the step.
        untraced: Any = torch.compiler.disable
        self._hooks = [
            optimizer.register_step_pre_hook(untraced(self._before_step)),
            optimizer.register_step_post_hook(untraced(self._after_step)),
        ]

    @property
    def mode(self) -> str:
        """How the ranks learn that all are ready: `norm` or `barrier`."""
        return "barrier" if self.clip is None else "norm"

    @property
    def current_step(self) -> int:
        return self._steps.step

    @property
    def last_record(self) -> CommitRecord | None:
        return self._steps.last_record

    @property
    def on_point(self) -> Callable[[str, int], None] | None:
        """Points in order: backward, ready, record, updating (done, not ended), done."""
        return self._steps.on_point

    @on_point.setter
    def on_point(self, call: Callable[[str, int], None] | None) -> None:
        self._steps.on_point = call

    # --- the training thread ---

    def attach(self, tracker: UpdateTracker, attempt: int = 0) -> None:
        self._steps.tracker = tracker
        self._spanning.attempt = attempt

    def rewire(self, successor: Callable[[Any], Any]) -> None:
        """Use the process groups that have taken the place of these: `successor` returns each one's successor. No collective is under way."""
        self._spanning.rewire(successor)

    def step_back(self) -> None:
        """The step in flight is given up before its update: gradients, buffers and settings are as they were after the newest one."""
        self._backward.over()  # one that raised
        self._numbers.forget()
        restore_hyper_parameters(self.optimizer.param_groups, self._steps.host_state["param_groups"], self.current_step)
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                param.grad = None
        self._state.step_back()

    def begin_pass(self) -> None:
        """A forward pass of the next step begins: its gradients are about to change. Waits while frozen."""
        self._backward.over()  # one that raised
        self._check_whole()
        if self._steps.touch():
            self._numbers.forget()
        elif all(param.grad is None for group in self.optimizer.param_groups for param in group["params"][:1]):
            self._numbers.forget()  # zero_grad without a step: GradScaler has left it out

    def _check_whole(self) -> None:
        """Give the gate back where the optimizer's own update raised and the trainer continued: no hook reports that."""
        step, self._updating = self._updating, 0
        if step:
            self._steps.tracker.fail_update(step)
            raise ProtocolError(
                f"the optimizer's update of step {step} raised, and the trainer went on: its state is half of that step's; let"
                " the exception leave train, the job then continues from a whole state"
            )

    def begin_backward(self, output: object) -> None:
        """A forward pass has ended: look at its loss, if that is there, and have its backward pass look at the output's gradient and at the time."""
        self._numbers.look_at(output)
        self._backward.watch(output)

    def check_replicas(self) -> list[str]:
        """See `AdoptedCheck.check` (a collective over WORLD)."""
        return self._check.check()

    def learning_rates(self) -> list[float]:
        """Return each param group's learning rate as it is now; none where a device has one, which would have to be waited for."""
        rates = [group["lr"] for group in self.optimizer.param_groups if "lr" in group]
        on_host = all(not torch.is_tensor(rate) or rate.device.type == "cpu" for rate in rates)
        return [float(rate) for rate in rates] if on_host else []

    @property
    def has_scheduler(self) -> bool:
        """A scheduler of torch was built for the optimizer: it marks the step."""
        return hasattr(self.optimizer.step, "_wrapped_by_lr_sched")

    def exchange(self, value: Any) -> list[Any]:
        """Return every rank's JSON value (a collective over WORLD)."""
        with self._steps.in_collective():
            return exchange_json(value, self.device)

    def close(self) -> None:
        """Take the hooks off the optimizer."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return other arguments for the step, None for those that it was called with."""
        if self._rolling == threading.get_ident():
            return None
        if self._updating and self._step_calls() > 1:
            self._inner += 1
            return None
        self._check_whole()
        self._check_call(args, kwargs)
        instead = _run_closure(args, kwargs)
        self._state.check_unchanged()
        step = self.current_step + 1
        self._backward.over()
        with self._steps.in_collective():
            self._state.share_buffers()
        self.on_ready(step)
        with self._steps.in_collective():
            self._steps.ready(step, self._spanning.check_communicators)
            record, self._ending = self._agree(step)
        self._steps.point("record", step)
        self._steps.tracker.begin_update(step, record)
        try:
            self._begin(record)
        except BaseException:
            self._steps.tracker.fail_update(step)
            raise
        self._updating, self._inner = step, 0
        return instead

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._rolling == threading.get_ident() or not self._updating:
            return
        if self._inner:
            self._inner -= 1
            return
        step = self._updating
        self._steps.point("updating", step)
        try:
            self._end()
        except BaseException:  # an average's own update raised: this rank has no state of this step
            self._updating = 0
            self._steps.tracker.fail_update(step)
            raise
        self.lane.mark_updated()
        self._steps.tracker.end_update(step)
        self._updating = 0
        self._steps.point("done", step)
        self.on_step_end(step)
        if self._ending is not Ending.GO_ON:
            self._steps.tracker.boundary(step, self._ending is Ending.SAVE)

    def _step_calls(self) -> int:
        """Count this optimizer's steps on this thread's stack: torch calls the hooks in a class's own step, and in its parent's that
        this one calls."""
        hooked = getattr(type(self.optimizer).step, "__code__", None)  # torch's wrapper, the same for all classes
        frame: FrameType | None = sys._getframe()
        count = 0
        while frame is not None:
            if frame.f_code is hooked and any(value is self.optimizer for value in frame.f_locals.values()):
                count += 1
            frame = frame.f_back
        return count

    def _check_call(self, args: Any, kwargs: Any) -> None:
        """Refuse a step that a roll forward could not repeat, or whose norm would be another."""
        own_step = type(self.optimizer).step
        if _closure(args, kwargs) is not None and not own_step.__module__.startswith("torch.optim."):
            raise ConfigError(
                f"{type(self.optimizer).__name__}.step: got a closure, which may run the model within the update, expected an optimizer"
                " of torch.optim, which runs it first, or backward before step() and step() without arguments"
            )
        if self.clip is not None and getattr(self.optimizer, "grad_scale", None) is not None:
            raise ConfigError(
                f"{type(self.optimizer).__name__} takes the loss scale off within its step (fused), after clipping: call"
                " scaler.unscale_(optimizer) before scaler.step(optimizer)"
            )

    def _agree(self, step: int) -> tuple[CommitRecord, Ending]:
        """The one small all-reduce: whoever has its result knows that every rank was READY(step)."""
        squares = self._own_squares() if self._norm_needed else torch.zeros((), dtype=torch.float64, device=self.device)
        squares = squares + self._numbers.zero_or_nan(self.device)  # the collective then reports an overflow
        agreed = self._spanning.agree(step, squares, self._steps.tracker.notice, self._steps.tracker.unled, None)
        total = math.inf if agreed.overflow else math.sqrt(agreed.squares)
        skipped = (self.clip is not None or self._on_nonfinite == "skip") and not math.isfinite(total)
        if not math.isfinite(total):
            self._nonfinite_at(step, skipped)
        factor = 1.0 if skipped else clip_factor(self.clip, total)
        rates = tuple(float(group["lr"]) for group in self.optimizer.param_groups if "lr" in group)
        return CommitRecord(step, math.inf if skipped else total, factor, skipped, 1.0, rates, ()), agreed.ending

    def _nonfinite_at(self, step: int, skipped: bool) -> None:
        """Some rank's loss or gradients are not finite: on each such rank warn once, on all ranks stop where that was asked for."""
        if self._on_nonfinite == "stop":
            raise NonFinite(
                f"step {step}: {self._numbers.where(self.rank)}: expected finite numbers (on_nonfinite='stop'). The state is that of step"
                f" {step - 1}; correct the data or the learning rate, or resume from an older checkpoint"
            )
        done = "the step is skipped" if skipped else "training continues with it"
        if self._numbers.are_finite():
            return
        if not self._warned:
            log.warning(
                "step %d: %s; %s (on_nonfinite=%r). Said once",
                step,
                self._numbers.where(self.rank),
                done,
                self._on_nonfinite,
            )
        self._warned = True

    def _own_squares(self) -> torch.Tensor:
        """Return the sum of squares (FP64, 0-d) of the gradients that this rank counts: every element of the model's is
        counted once over all ranks."""
        norms = [
            torch.linalg.vector_norm(_dense(gradient_of(param)), dtype=torch.float64)
            for group in self.optimizer.param_groups
            for param in group["params"]
            if param.grad is not None and self._state.counts(param)
        ]
        there = [norm.to(self.device) for norm in norms]  # offloaded gradients are on the CPU
        return torch.stack([*there, torch.zeros((), dtype=torch.float64, device=self.device)]).square().sum()

    # --- the update, on whichever thread has the gate ---

    def _begin(self, record: CommitRecord) -> None:
        """The optimizer's own step follows at once, on this thread."""
        self._steps.expect(record)
        self._steps.tear(f"the update of step {record.step}")
        self._record = record
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if record.skipped:
                    param.grad = None
                elif record.clip_factor != 1.0:
                    param.grad.mul_(record.clip_factor)

    def _end(self) -> None:
        assert self._record is not None
        self._state.updated(self._record.skipped)
        self._steps.updated(self._record)
        self._record = None
        self._steps.host_state = self._describe()

    def roll_forward(self, record: CommitRecord) -> int:
        if self._state.partitioned:
            raise CheckpointError(f"step {record.step}: {type(self.optimizer).__name__} needs all ranks to finish it")
        with self.lane.after_ready(), torch.no_grad():
            self._rolling = threading.get_ident()
            try:
                self._begin(record)
                type(self.optimizer).step(self.optimizer)  # not a trainer's wrapper of it
                self._end()
            finally:
                self._rolling = 0
            self.lane.mark_updated()
        self.lane.drain()
        return self.current_step

    @property
    def work_done(self) -> int:
        return self.current_step

    def holdings(self, step: int | None = None) -> dict[str, list[HeldTensor]]:
        self._check_held(step)
        return self._state.holdings()

    def host_state(self, step: int | None = None) -> dict[str, Any]:
        self._check_held(step)
        return self._steps.host_state

    # --- what the job has ---

    def shard_groups(self) -> tuple[ShardGroup, ...]:
        return self._state.shard_groups()

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        return self._state.shapes

    def param_names(self, group: int) -> list[str]:
        return self._state.group_names[group]

    def layout_json(self) -> str:
        return json.dumps({"adopted": type(self.optimizer).__name__, "mode": self.mode})

    # --- loading ---

    def load_targets(self) -> list[HeldTensor]:
        return self._state.targets()

    def load_begin(self) -> list[HeldTensor]:
        self._steps.tear("a load")
        return self.load_targets()

    def check_host_state(self, saved: dict[str, Any]) -> None:
        check_host_state(self.optimizer.param_groups, saved)

    def load_end(self, step: int, host_state: dict[str, Any], record: CommitRecord | None = None) -> None:
        restore_hyper_parameters(self.optimizer.param_groups, host_state["param_groups"], step)
        self._state.loaded()
        self._steps.restart(step, record)
        self.on_divergence.equal_after = step
        self._steps.host_state = self._describe()
        self.lane.mark_updated()  # a dump may come before the first update

    # --- a process in a lost one's place ---

    def why_not_filled(self) -> str:
        """Return why no process could be given this state in a lost one's place; empty: one could."""
        kept = self._describe()["param_groups"]
        lost = {
            key for known, group in zip(kept, self._hyper_parameters(), strict=True) for key in group.keys() - known
        }
        return self.not_filled or why_not_filled(self._model, self._state, lost)

    def fill(self, replaced: Collection[int]) -> None:
        """Give the ranks in `replaced`, which hold nothing, what others hold that hold the same; a step that was under way is given up (a collective
        of all ranks, whose groups were made again; `load_end` follows on those ranks, `keep` on the others). Raises CheckpointError."""
        fill(self._model, self._state, replaced)

    def keep(self, step: int, record: CommitRecord | None) -> None:
        """Take the state as it is, that of `step`, whose record is `record`: a step that was under way is given up, and `step_back` follows."""
        self._backward.over()
        self._steps.restart(step, record)
        self.on_divergence.equal_after = step

    def compare_replicas(self) -> tuple[str, ...]:
        """Return what differs between those that hold the same (a collective)."""
        return tuple(self._check.differing())

    # --- inside ---

    def _hyper_parameters(self) -> list[dict[str, Any]]:
        """Return each param group's plain settings; what JSON cannot carry stays the program's own."""
        return [
            {key: list(value) if isinstance(value, tuple) else value for key, value in hyper_parameters(group).items()}
            for group in self.optimizer.param_groups
        ]

    def _describe(self) -> dict[str, Any]:
        plain = (bool, int, float, str, type(None))
        groups = [
            {
                key: value
                for key, value in group.items()
                if isinstance(value, plain) or (isinstance(value, list) and all(isinstance(v, plain) for v in value))
            }
            for group in self._hyper_parameters()
        ]
        return {"step": self.current_step, "param_groups": groups}

    def _check_held(self, step: int | None) -> None:
        if not self._steps.holds(step):
            raise CheckpointError(
                f"this rank {self._steps.held}, expected step {step or 'newest'}; take another holder"
            )


def _world() -> Any:
    """Return the process group of all ranks, None where this process is alone."""
    return dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None


def _closure(args: Any, kwargs: Any) -> Callable[[], Any] | None:
    """Return the closure that a step was called with. args: the optimizer, and what was given by place."""
    closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure


def _run_closure(args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Run the passes of `optimizer.step(closure)` ahead of the update, and return the step's arguments with their result in the closure's place."""
    closure = _closure(args, kwargs)
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()
    return args[:1], {**kwargs, "closure": lambda: loss}


def _dense(grad: torch.Tensor) -> torch.Tensor:
    """Return what has the norm of `grad`, which may be sparse (an embedding's)."""
    return grad.coalesce().values() if grad.is_sparse else grad
