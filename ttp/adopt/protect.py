"""`ttp.protect`: a trainer that knows nothing of ttp, protected with a line in five places.

    guard = ttp.protect(model, optimizer, schedulers=[scheduler], save_dirs=["checkpoints"])

    @ttp.ttp_to_persist
    def train():
        for epoch in guard.epochs(epochs):           # in place of range(epochs)
            for batch in guard.batches(loader):      # in place of loader
                ...                                  # unchanged: zero_grad, forward, backward, optimizer.step(), scheduler.step()

Owns the joining of the adopted optimizer, the trainer's host state and a session. Over the same protocol and the same
checkpoints as `ttp.start`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from ttp.adopt.adopted_state import parameters_of
from ttp.adopt.averages import Average
from ttp.adopt.guard_options import GuardOptions
from ttp.adopt.megatron import distributed_optimizer
from ttp.adopt.optimizer import AdoptedOptimizer
from ttp.adopt.trainer_state.feed import Feed
from ttp.adopt.trainer_state.frozen_parameters import FrozenParameters
from ttp.adopt.trainer_state.host_objects import HostObjects, Stateful, check_taken
from ttp.adopt.trainer_state.loader_parts import parts
from ttp.adopt.trainer_state.loader_states import LoaderStates, check_kept
from ttp.adopt.trainer_state.position import DataPosition, check_position
from ttp.adopt.trainer_state.seeds import Seeds
from ttp.adopt.trainer_state.seen import SeenBatches, check_record
from ttp.adopt.usage import Usage
from ttp.config import Settings
from ttp.curves.board import open_board, prepare
from ttp.curves.guard_curves import GuardCurves
from ttp.errors import CheckpointError, ConfigError, NotAsBefore
from ttp.exchange.error_file import refusals_in_one_line
from ttp.exchange.json_collectives import check_joined
from ttp.groups.process_groups import Successor
from ttp.inputs import checked
from ttp.optim.step_agreement.step_result import ClipNorm
from ttp.regroup.wrappers import leave_pass, renew_attributes, renew_model, switches, wrapper_around
from ttp.runtime.rank_runtime import show
from ttp.runtime.step_copies import BUDGET, CopyOptions
from ttp.session import ResumePoint, Session, start

T = TypeVar("T")

_ROUNDS_ANEW = (
    "DistributedDataParallel forms its buckets anew after the first step of every attempt: on three ranks or more the step after a"
    " restart is rounded otherwise, in the last bit; find_unused_parameters=True keeps the buckets as they are"
)

_MODES = {
    "norm": "the all-reduce of the gradient norm shows that all ranks are ready; ttp clips",
    "barrier": "one all-reduce of 64 bytes before each optimizer.step() shows that all ranks are ready",
}


@refusals_in_one_line()
def protect(
    model: torch.nn.Module,
    optimizer: Optimizer,
    *,
    save_dirs: Sequence[str | os.PathLike[str]],
    schedulers: Sequence[Any] = (),
    state: Mapping[str, Stateful] | None = None,
    averages: Mapping[str, Average] | None = None,
    clip: ClipNorm | None = None,
    save_interval: int = 0,
    save_wait: bool = True,
    compare_every: int = 100,
    on_divergence: str = "report",
    on_nonfinite: str = "warn",
    reseed: bool = True,
    on_data_mismatch: str = "error",
    resume: str = "auto",
    copies: str | None = None,
    copy_budget: float = BUDGET,
    copy_every: int | None = None,
    layout: Mapping[str, Any] | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    settings: Settings | None = None,
    in_place: bool | str = False,
    tensorboard: str | os.PathLike[str] | None = None,
) -> Guard:
    """Protect this rank and load the newest checkpoint (all ranks call, after `init_process_group`, `fully_shard` and the
    building of the optimizer; DDP's wrapper or the model within).

    schedulers: those whose `step()` follows every optimizer.step(). state: other objects with `state_dict` and
    `load_state_dict` (plain values, equal on all ranks), given back as they were when the step's gradients were ready.
    averages: averages of the weights by name ({"ema": AveragedModel(...)}), saved with every step: ttp calls their
    `update_parameters(model)` at the end of each optimizer.step(), and the trainer does not.
    clip: let ttp clip by the global norm, in place of the trainer's own clipping: the collective for the norm then also is
    the barrier. save_interval: a periodic checkpoint after so many steps (0: none). save_wait: False has training wait
    only until the state is copied into the agent's memory, and processes of low priority write it. compare_every: after so many steps
    replicas' bits are compared (0: never). on_divergence: a difference between them is reported ("report"), ends the job ("stop"), or has the process
    replaced whose replica most holders prove wrong ("repair"); with the latter two saves compare as well. reseed: seed all random generators as a function of the place in the run.
    on_nonfinite: what follows a step in which the loss that the model returns, the gradient of its output or, with `clip`, the norm is NaN or infinite
    on some rank: "warn" (once, by that rank), "skip" (the update changes nothing; with `clip` that is so in any case), "stop" (NonFinite on all ranks,
    before the update). Without `clip` a number that first comes up within the backward pass is seen in the next step's loss.
    on_data_mismatch: after a restart, other batches, learning rates or frozen parameters than before are an "error", or only a reason to "warn".
    copies: "memory" keeps copies of what each rank holds in its node's memory and, of what has no replica on another node, in the next node's: a
    fault that takes state without a replica then costs a few steps, in place of all since the newest checkpoint. copy_every: behind every so many
    steps; None: as often as the budget lets. copy_budget: copies take at most this part of the steps' time.
    in_place: a rank that dies is replaced by another process and the others keep running, as `docs/how_in_place_works.md` has it: the loop is in a
    function that `ttp_to_persist` decorates and that was rehearsed once ("unrehearsed": also without), and the program joins by `ttp.init_process_group`.
    tensorboard: a folder in which rank 0 writes curves, of the loss what `guard.session.report_loss` gets.
    save_dirs, resume, layout, log_dir, settings: as `ttp.start` and `Session.resume` take them.
    Raises what they raise, LayoutError, and ConfigError for an optimizer that cannot be protected and for replicas that differ.
    """
    check_joined("ttp.protect")
    copy_options = CopyOptions(copies, copy_budget, copy_every)
    options = GuardOptions(resume, save_interval, bool(save_wait), compare_every, reseed, on_data_mismatch, tensorboard)
    if clip is not None and not isinstance(clip, ClipNorm):
        raise ConfigError(f"clip: got {clip!r}, expected ttp.ClipNorm(max_norm), or None")
    if on_nonfinite not in ("warn", "skip", "stop"):
        raise ConfigError(f"invalid on_nonfinite: got {on_nonfinite!r}, expected 'warn', 'skip' or 'stop'")
    for name, objects in (("state", state), ("averages", averages)):
        if objects is not None and not isinstance(objects, Mapping):
            got = checked.shown(objects)
            raise ConfigError(f"invalid {name}: got {got}, expected a mapping of names to objects, {{'name': object}}")
    if hasattr(schedulers, "step"):
        raise ConfigError(f"schedulers: got a {type(schedulers).__name__}, expected a list of schedulers, [scheduler]")
    # The chaos harness and a rehearsal judge by the bits of each step: in barrier mode there are no others.
    known = settings or Settings.from_env()
    if known.rehearse_every and distributed_optimizer(optimizer) is not None:
        raise ConfigError(
            "invalid TTP_REHEARSE: Megatron-Core keeps process groups of its own, expected a trainer whose groups are torch's. Leave TTP_REHEARSE out"
        )
    judged = bool(known.chaos or known.rehearse_every)
    adopted = AdoptedOptimizer(
        model,
        optimizer,
        clip,
        averages,
        norm_needed=judged,
        on_nonfinite=on_nonfinite,
        copied=copy_options.enabled,
        on_divergence=on_divergence,
    )
    adopted.not_filled = (
        "" if options.reseed and options.save_wait else "reseed=False" if options.save_wait else "save_wait=False"
    )
    try:
        prepare(options.tensorboard, adopted.rank, "tensorboard")
        host = HostObjects(schedulers, state or {})
        session = start(
            adopted,
            save_dirs=save_dirs,
            layout=layout,
            log_dir=log_dir,
            settings=settings,
            copies=copy_options,
            in_place=in_place,
        )
        try:
            return Guard(model, adopted, host, session, options)
        except BaseException:
            session.close()
            raise
    except BaseException:
        adopted.close()
        raise


class Guard:
    """What protects one trainer. Made by `ttp.protect`."""

    def __init__(
        self,
        model: torch.nn.Module,
        adopted: AdoptedOptimizer,
        host: HostObjects,
        session: Session,
        options: GuardOptions,
    ) -> None:
        self.session = session
        self._model = model
        self._outermost = model
        """It, or DistributedDataParallel around it."""
        self._successor: Successor | None = None
        """Of the newest time that the process groups were made again."""
        self._adopted = adopted
        self._host = host
        self._options = options
        self._passes = 0
        """Forward passes of the step in flight."""
        self._all_passes = 0
        """Those of all steps, over all attempts of the job."""
        self._recomputed = False
        """The step in flight has had a forward pass within its backward pass."""
        self._switches: dict[int, list[tuple[Any, str, Any]]] = {}
        """Those of the model by step, as they were when its gradients were ready: an evaluation that a fault ends leaves others."""
        self._can_be_replaced = False
        """A step was finished in this process."""
        self._recovered = False
        """The step in flight is the first one since a recovery in place."""
        if not options.save_wait:
            session.prepare_saves()
        self._seeds = seeds = Seeds(adopted.device, enabled=options.reseed)
        frozen = FrozenParameters(parameters_of(model))
        self._seen = seen = SeenBatches(
            session.rank, session.world_size, options.on_data_mismatch, frozen, adopted.learning_rates
        )
        self._loader_states = LoaderStates(session.rank, session.world_size, adopted.exchange)
        self._feed = Feed(seeds, seen, self._loader_states)
        self._position = DataPosition(self._feed, seen)
        session.holder.step_states.late = lambda: {
            "seen": seen.record(),
            "loaders": list(self._loader_states.kept),
        }
        if self.session.rank == 0:
            show(logging.INFO, f"{adopted.mode} mode: {_MODES[adopted.mode]}")
            if _rounds_anew(model, self.session.world_size):
                show(logging.INFO, _ROUNDS_ANEW)
        self._take(0)
        session.enters_again_after = (
            "it has not finished a step of its own yet"  # what the program sets before is in no step's state
        )
        session.regrouping.on_regroup(self._renew)
        session.regrouping.on_enter_again(self._entered_again)
        self._resumed = point = self.session.resume(options.resume, check=_check_state)
        if point is not None:
            self._give_back(point.step, point.state)
            if self.session.rank == 0:
                show(logging.INFO, "the optimizer's settings (lr and the like) are the checkpoint's, not the script's")
        elif different := adopted.compare_replicas():
            raise ConfigError(
                f"before the first step, {different[0]}, expected the same weights on replicas; seed all ranks alike"
            )
        done = adopted.current_step
        self._curves = GuardCurves(open_board(options.tensorboard, done) if session.rank == 0 else None, done)
        session.on_loss = self._curves.loss
        session.regrouping.on_step_back(self._step_back)
        adopted.on_ready = self._take
        adopted.on_step_end = self._step_ended
        # torch.compile would trace hooks of a module that it compiles, and compile anew at every step.
        untraced: Any = torch.compiler.disable
        self._hooks = [
            model.register_forward_pre_hook(untraced(self._before_forward), with_kwargs=True),
            model.register_forward_hook(untraced(self._after_forward)),
        ]
        session.warns_unsaved = False  # Usage knows of a trainer that saves by itself
        self._usage = Usage(
            model,
            session,
            point,
            save_interval=options.save_interval,
            keeps_state=host.has_state,
            unknown_schedule=lambda: adopted.has_scheduler and not (host.has_schedules or host.has_state),
        )

    # --- where the run stands ---

    @property
    def step(self) -> int:
        """Updates so far, over all attempts of the job."""
        self._usage.asks_for_the_step()
        return self._adopted.current_step

    @property
    def resumed(self) -> ResumePoint | None:
        """Where the run goes on; None: from its beginning."""
        self._usage.asks_for_the_step()
        return self._resumed

    @property
    def epoch(self) -> int:
        return self._position.epoch

    @property
    def grad_norm(self) -> float:
        """Global norm of the newest step's gradient before clipping; 0.0 without `clip`."""
        record = self._adopted.last_record
        return record.grad_norm if record is not None else 0.0

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that are left of `count`: in place of `range(count)`."""
        self._usage.asks_for_epochs()
        return self._position.epochs(count)

    def batches(self, loader: Iterable[T], *, refetch: bool | None = None, limit: int | None = None) -> Iterator[T]:
        """Yield the batches that are left of this epoch: in place of `loader`, which must give the same ones again in every
        run (a function of seed and epoch, as DistributedSampler is). A loader with a `state_dict` of its own goes on from it, unless it
        has workers, whose random numbers no state has. `refetch`: True fetches its batches again from the epoch's first, as those of any other; False
        goes on from the state with workers, too. `limit`: the epoch ends after so many, in place of a `break` behind the step."""
        self._looks_at(loader)
        return (batch for _, batch in self._position.batches(loader, refetch=refetch, limit=limit))

    def enumerate(
        self, loader: Iterable[T], *, refetch: bool | None = None, limit: int | None = None
    ) -> Iterator[tuple[int, T]]:
        """Yield the batches that are left of this epoch with their numbers in it, from 0: in place of `enumerate(loader)`. For what
        depends on that number, as gradient accumulation does: in an epoch that is gone on with it does not begin at 0."""
        self._looks_at(loader)
        return self._position.batches(loader, refetch=refetch, limit=limit)

    # --- beside the steps ---

    def save(self, *, wait: bool = True) -> str:
        """Write a checkpoint of the current step (all ranks call, between two steps); return its path. `wait`: see `Session.save`."""
        self._position.warn_if_left()
        return self.session.save(wait=wait)

    @contextlib.contextmanager
    def pause(self, at_most_s: float = 3600.0) -> Iterator[None]:
        """Say that this rank does something else than steps for a while (an evaluation): no hang. Training draws the random numbers that
        it would draw without."""
        with self.session.pause(at_most_s), self._seeds.kept():
            yield

    def seeded_collate(self, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a loader's `collate_fn` that draws the same for the same batch in every attempt, where a trainer skips batches without putting them
        together: each batch is one forward pass."""
        numbers = itertools.count(self._all_passes)

        def seeded(samples: Any) -> Any:
            self._seeds.seed_collate(next(numbers))
            return collate(samples)

        return seeded

    def close(self) -> None:
        """Stop protecting; the model and the optimizer are as they were found. Says when ttp has saved nothing."""
        self._usage.release()
        for hook in self._hooks:
            hook.remove()
        self._adopted.close()
        self._curves.close()
        self.session.close()
        self._usage.end()  # a fault may have had this rank save, while it waited for the others

    # --- inside ---

    def _take(self, step: int) -> None:
        """Keep what the run needs to go on after `step`."""
        if self._recovered:
            self._check_recovered()
        if self._recomputed:  # as if the pass had not been repeated
            self._seeds.seed_after(step, self._passes - 1)
        if step:
            self._loader_states.take(step, self._position.epoch, self._position.batch)
            self._take_switches(step)
        data = {"position": self._position.state_dict(), "fed": self._feed.used}
        random = {"seed": self._seeds.base, "passes": self._passes, "all_passes": self._all_passes}
        self.session.set_step_state(step, {**self._host.take(step), **data, **random})

    def _take_switches(self, step: int) -> None:
        """Keep the switches of the model after `step`, and those after the step before, which may be the newest."""
        if self.session.reentry is not None or self.session.regrouping.rehearses:
            before = {step - 1: self._switches[step - 1]} if step - 1 in self._switches else {}
            self._switches = {**before, step: switches(self._outermost)}

    def _give_back(self, step: int, state: Mapping[str, Any]) -> None:
        self._host.give_back(state, updated=step > 0)
        self._position.load_state_dict(state["position"])
        self._seeds.base = state["seed"]
        self._all_passes = int(state.get("all_passes", 0))
        self._seen.expect(state.get("seen", {}))
        self._loader_states.give_back(state.get("loaders", []))
        self._feed.used = bool(state.get("fed"))
        if step and not self._feed.used:  # what is drawn next is the next step's batch, as before the restart
            self._seeds.seed_after(step, int(state.get("passes", 0)) - 1)

    def _looks_at(self, loader: object) -> None:
        """The trainer takes its batches from this loader."""
        self._usage.asks_for_batches()
        if any(getattr(part, "persistent_workers", False) for _, part in parts(loader)):
            self.session.end_in_place("a loader's workers are persistent")

    def _look_around(self) -> None:
        """Find the wrapper of the model in its first pass, which is too late for a process in a lost one's place."""
        if (wrapper := wrapper_around(self._model)) is not None and wrapper is not self._outermost:
            self._outermost = wrapper
            if self._successor is not None:  # as `train` was entered
                renew_model(wrapper, self._successor)
            self.session.end_in_place("ttp.protect was given the model within DistributedDataParallel")

    def _renew(self, successor: Successor) -> None:
        """The process groups were made again."""
        self._successor = successor
        renew_model(self._outermost, successor)
        renew_attributes(self._adopted.optimizer, successor)

    def _step_back(self) -> None:
        """`train` is entered again: all is as it was after the newest step."""
        self._adopted.step_back()
        self._host.step_back()
        self._passes, self._recomputed = 0, False
        leave_pass(self._outermost)
        step = self._adopted.current_step
        self._curves.step_back(step, self._adopted.last_record)
        for holder, name, value in self._switches.get(step, ()):
            setattr(holder, name, value)
        self._give_back(step, self.session.holder.step_states.get(step))

    def _entered_again(self) -> None:
        """All ranks are about to enter `train` after a recovery (a collective, where a periodic save is due that the fault has ended)."""
        self._recovered = True
        self._seen.recovered = True
        self._loader_states.ask_again()
        step, every = self._adopted.current_step, self._options.save_interval
        if every and step % every == 0 and self.session.newest_saved < step:
            self._save_periodically()

    def _check_recovered(self) -> None:
        """The first step since a recovery is about to be READY: every rank is to have made as many passes for it (a collective)."""
        self._recovered = False
        passes = self._adopted.exchange(self._passes)
        if len(set(passes)) > 1:
            raise NotAsBefore(
                f"step {self._adopted.current_step + 1} has {passes} forward passes on ranks 0 to {len(passes) - 1} after a recovery in place,"
                " expected as many on each. Have train() count its batches from its beginning"
            )

    def _before_forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if not module.training:
            return
        step = self._adopted.current_step + 1
        if _in_backward():
            self._recomputed = True
        else:
            self._adopted.begin_pass()
            self._host.begin_pass()
            self._passes, self._all_passes = self._passes + 1, self._all_passes + 1
            if self._passes == 1:
                self._curves.step_begins()
                if step - 1 not in self._switches:  # the first step of this process
                    self._look_around()
                    self._take_switches(step - 1)
                self._seen.forward(step, (args, kwargs), self._adopted.learning_rates(), counted=self._feed.used)
        self._seeds.seed_pass(step, self._passes - 1)

    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if module.training:
            self._adopted.begin_backward(output)
            if not _in_backward():
                self._seeds.seed_after(self._adopted.current_step + 1, self._passes - 1)

    def _step_ended(self, step: int) -> None:
        self._passes, self._recomputed = 0, False
        protection = self.session.protection
        self._curves.step_ends(step, self._adopted.last_record, protection.processor.step_s if protection else None)
        self._usage.step_ended(step)
        if self._options.compare_every and step % self._options.compare_every == 0:
            texts = self._adopted.check_replicas()
            if texts and self.session.rank == 0:
                what = self._adopted.on_divergence.reported("; ".join(texts))
                show(logging.WARNING, f"silent corruption? After step {step}, {what}")
        if self._options.save_interval and step % self._options.save_interval == 0:
            self._save_periodically()
        reentry = self.session.reentry
        if reentry is not None and not self._can_be_replaced:
            self._can_be_replaced = True
            if why := self._adopted.why_not_filled():  # what was done to the model behind ttp.protect
                self.session.end_in_place(why)
            reentry.begin()

    def _save_periodically(self) -> None:
        try:
            self.session.save(periodic=True, wait=self._options.save_wait)
        except CheckpointError as error:  # on every rank: a disk that refuses does not end a healthy training
            if self.session.rank == 0:
                show(logging.ERROR, f"{error}; training continues without this checkpoint")


def _check_state(state: Mapping[str, Any]) -> None:
    """Judge what a checkpoint has of `_take`. Raises ValueError naming the key."""
    check_taken(state)
    check_position(*checked.field(dict(state), "position", ""))
    seed, path = checked.field(dict(state), "seed", "")
    checked.integer(seed, path, -(2**63), 2**64 - 1)
    if "seen" in state:  # older checkpoints have none of these
        check_record(state["seen"], "seen")
        check_kept(*checked.field(dict(state), "loaders", ""))
        checked.boolean(*checked.field(dict(state), "fed", ""))
        for name in ("passes", "all_passes"):
            checked.integer(*checked.field(dict(state), name, ""))


def _rounds_anew(model: torch.nn.Module, world_size: int) -> bool:
    """Say whether the first step of an attempt adds the gradients up in another order than later steps do."""
    is_ddp = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    return is_ddp and world_size > 2 and not model.find_unused_parameters


def _in_backward() -> bool:
    """Say whether this is activation checkpointing: a forward pass within a backward pass is the last one, computed again, and
    must draw the same noise."""
    return torch._C._current_graph_task_id() != -1
