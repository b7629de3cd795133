"""`lightning.pytorch.Trainer` with automatic optimization, protected by a callback.

    trainer = Trainer(callbacks=[TTPLightning(save_dirs=["checkpoints"])])
    trainer.fit(module, loader)                          # unchanged

Owns the joining of Lightning's loops with `ttp.protect`. A checkpoint has the loops' progress as it was when the step's gradients were ready. A
resume gives it back, and has the loops do what follows that batch once more, without its training step: schedulers, the evaluation, the epoch's end.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch.distributed.fsdp import FSDPModule

from ttp.adopt.protect import Guard, protect
from ttp.errors import ConfigError
from ttp.exchange import error_file


class TTPLightning(Callback):  # type: ignore[misc]
    """Protects the rank from the beginning of `trainer.fit` to its end."""

    def __init__(self, *, save_dirs: Sequence[str | os.PathLike[str]], **options: Any) -> None:
        """`options` go to `ttp.protect`: all but `schedulers`, which Lightning knows."""
        error_file.install()
        self._save_dirs = save_dirs
        self._options = options
        self._pause = contextlib.ExitStack()
        self.guard: Guard | None = None
        """From the beginning of training on."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        _check(trainer)
        trainer._signal_connector.teardown()  # its handler of SIGTERM broadcasts, wherever the rank is
        state = {
            "loops": _Loops(trainer),
            "callbacks": _Callbacks(trainer, self),
            "precision": trainer.precision_plugin,
            **{f"scheduler.{i}": each.scheduler for i, each in enumerate(trainer.lr_scheduler_configs)},
            **({"datamodule": trainer.datamodule} if trainer.datamodule is not None else {}),
        }
        options = {**self._options, "state": {**state, **(self._options.get("state") or {})}}
        for module in trainer.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # the evaluation at the start leaves it whole
        step = _TrainingStep(trainer.model, pl_module.training_step)
        self.guard = protect(step, trainer.optimizers[0], save_dirs=self._save_dirs, **options)
        pl_module.training_step = functools.wraps(pl_module.training_step)(lambda *args, **named: step(*args, **named))
        trainer.fit_loop._data_fetcher = _Fetcher(trainer.fit_loop._data_fetcher, self.guard, self._pause)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._pause_until_next_batch()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._pause_until_next_batch()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Lightning is about to write a checkpoint of its own."""
        self._pause_until_next_batch()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._pause.close()
        if self.guard is not None:
            self.guard.save()  # the last step is on disk before any rank exits

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Hold the rank's state before Lightning moves it off the device."""
        if self.guard is not None:
            self.guard.session.hold_after(exception)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self.guard is not None:
            del pl_module.training_step
            self.guard.close()
            self.guard = None

    def _pause_until_next_batch(self) -> None:
        """What follows takes as long as it takes: no hang."""
        if self.guard is not None:
            self._pause.close()
            self._pause.enter_context(self.guard.pause())


def _check(trainer: Any) -> None:
    """Raise ConfigError for what cannot be protected, with the nearest way that works."""
    strategy = trainer.strategy
    averaging = [each for each in trainer.callbacks if isinstance(each, (StochasticWeightAveraging, WeightAveraging))]
    refusal = ""
    if not trainer.lightning_module.automatic_optimization:
        refusal = (
            "automatic_optimization: got False, expected True, so that one optimizer marks the step; or write the loop with"
            " Lightning Fabric and ttp.protect"
        )
    elif not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy)):
        refusal = (
            f"strategy: got {type(strategy).__name__}, expected DDPStrategy ('ddp'), one device, or, for parameters that are split over"
            " ranks, ModelParallelStrategy with fully_shard in configure_model()"
        )
    elif [type(each).__name__ for each in trainer.optimizers] in ([], ["_MockOptimizer"]):
        refusal = (
            "configure_optimizers: got no optimizer, expected one; leave TTPLightning out where nothing is trained"
        )
    elif isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher):
        refusal = "training_step: got the argument dataloader_iter, expected batch: ttp counts the batches"
    elif trainer.reload_dataloaders_every_n_epochs:
        refusal = (
            f"reload_dataloaders_every_n_epochs: got {trainer.reload_dataloaders_every_n_epochs}, expected 0: build the loader once, with a"
            " sampler that has set_epoch()"
        )
    elif averaging:
        refusal = (
            f"callbacks: got {type(averaging[0]).__name__}, whose average is not of the step that is saved: expected"
            " TTPLightning(averages={'ema': AveragedModel(...)}), which ttp updates with each step"
        )
    if refusal:
        raise ConfigError(refusal)


class _TrainingStep(torch.nn.Module):
    """What `ttp.protect` takes for the model: a pass is a call of `training_step`. Not every strategy calls the module itself for that, and DDP's wrapper stays in
    evaluation mode after Lightning's first evaluation."""

    why_not_in_place = "Lightning's loop cannot be entered again"

    def __init__(self, model: torch.nn.Module, training_step: Any) -> None:
        super().__init__()
        self._orig_mod = model  # the name by which torch.compile's wrapper has it, so that parameters have the names of the model within
        self._training_step = training_step

    def forward(self, *args: Any, **named: Any) -> Any:
        return self._training_step(*args, **named)


class _Loops:
    """The progress of Lightning's loops, and the metrics that callbacks and schedulers monitor, as host state."""

    def __init__(self, trainer: Any) -> None:
        self._fit = trainer.fit_loop
        self._epoch = self._fit.epoch_loop
        self._batch = self._epoch.batch_progress
        self._step = self._epoch.automatic_optimization.optim_progress.optimizer.step
        self._was_last = False
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return {
            "loops": self._fit.state_dict(),
            "accumulate": self._trainer.accumulate_grad_batches,
            "metrics": dict(self._trainer._logger_connector._callback_metrics),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to just before the batch of the saved update, and have the loop finish that batch first."""
        saved = state_dict["loops"]
        total = saved["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]
        if total["ready"] == total["completed"]:  # before the first step
            return
        self._fit.load_state_dict(saved)
        self._trainer.accumulate_grad_batches = state_dict["accumulate"]
        device = self._trainer.strategy.root_device
        metrics = {name: value.to(device) for name, value in state_dict["metrics"].items()}
        self._trainer._logger_connector._callback_metrics.update(metrics)
        for each in (self._batch, self._step):
            each.total.reset_on_restart()
            each.current.reset_on_restart()
        self._was_last, self._batch.is_last_batch = self._batch.is_last_batch, False
        self._fit.update_restart_stage()
        self._epoch.reset = lambda: None  # the epoch that was begun goes on
        self._epoch.advance = self._finish_batch

    def _finish_batch(self, data_fetcher: Any) -> None:
        """In place of the loop's `advance`, once: what it does behind the update, without the calls that take the batch or its loss."""
        epoch = self._epoch
        del epoch.reset, epoch.advance
        for loop in (self._fit, epoch, epoch.val_loop):  # no restart from here on
            loop.on_iteration_done()
        self._step.increment_ready()
        self._step.increment_completed()
        self._batch.increment_ready()
        self._batch.increment_started()
        self._batch.increment_processed()
        self._batch.is_last_batch = self._was_last
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that no optimizer.step() came before it in this process
            epoch.update_lr_schedulers("step", update_plateau_schedulers=False)
            if epoch._num_ready_batches_reached():
                epoch.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        self._batch.increment_completed()


class _Callbacks:
    """The states of the Trainer's other callbacks, as host state."""

    def __init__(self, trainer: Any, own: TTPLightning) -> None:
        self._others = [each for each in trainer.callbacks if each is not own]

    def state_dict(self) -> dict[str, Any]:
        return {each.state_key: state for each in self._others if (state := each.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for each in self._others:
            if each.state_key in state_dict:
                each.load_state_dict(state_dict[each.state_key])


class _Batches:
    """The batches of one epoch, as Lightning's own fetcher gives them."""

    counts_itself = True
    """Lightning's loop counts them as well, and would end the epoch by its own count of another number of ranks."""

    def __init__(self, fetcher: Any) -> None:
        self._fetcher = fetcher
        loaders = fetcher.combined_loader.flattened
        if len(loaders) == 1:
            self._dataloader = loaders[0]  # may have a state of its own
        else:
            self.flattened = loaders

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch, *_ in iter(self._fetcher))


class _Fetcher(_DataFetcher):  # type: ignore[misc]
    """Stands in the place of Lightning's fetcher, and has `guard.enumerate` around it."""

    def __init__(self, fetcher: Any, guard: Guard, pause: contextlib.ExitStack) -> None:
        super().__init__()
        self._fetcher, self._guard, self._pause = fetcher, guard, pause
        self._epochs = guard.epochs(sys.maxsize)
        self.length = fetcher.length
        self._begin()

    def _begin(self) -> None:
        next(self._epochs)
        # Without a length Lightning reads a batch ahead, and so would the loader's state.
        refetch = True if self.length is None else None
        self._batches = self._guard.enumerate(_Batches(self._fetcher), refetch=refetch)

    def __iter__(self) -> _Fetcher:
        """A later epoch begins; the first one of this attempt has begun."""
        self._begin()
        self.fetched, self.done = 0, False
        return self

    def __next__(self) -> tuple[Any, int, int]:
        self._pause.close()
        self._start_profiler()
        try:
            index, batch = next(self._batches)
        finally:
            self._stop_profiler()
        self.fetched = index + 1
        self.done = self._fetcher.done if self.length is None else self.fetched >= self.length
        return batch, index, 0

    def teardown(self) -> None:
        self._fetcher.teardown()
