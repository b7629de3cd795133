"""`transformers.Trainer`, protected by a callback.

    callback = TTPCallback(save_dirs=["checkpoints"])
    trainer = Trainer(model=model, args=args, train_dataset=samples, callbacks=[callback])
    callback.train(trainer)
    callback.close()

Owns the joining of the Trainer's loop with `ttp.protect`. The Trainer itself knows only one way to go on where it stood: a
checkpoint of its own form, for the step count and the data that it skips. `checkpoint` makes one of the newest checkpoint of
ttp; the rest (optimizer, schedule) is loaded from that directly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import TrainerCallback
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import has_length

from ttp.adopt.protect import Guard, protect
from ttp.adopt.trainer_state.host_objects import from_json
from ttp.adopt.transformers_reentry import EnteredTrainer, exporting
from ttp.checkpoint import find
from ttp.checkpoint.find import open_checkpoint
from ttp.checkpoint.format.signature import key_of_environment
from ttp.checkpoint.reader import Reader
from ttp.errors import CheckpointError, CheckpointMismatch, ConfigError, DataMismatch, Regroup
from ttp.exchange.json_collectives import broadcast_json
from ttp.groups.vacancy import vacant
from ttp.persist import ttp_to_persist
from ttp.regroup.wrappers import count_anew
from ttp.runtime.rank_runtime import show

_FOLDER = "ttp_resume"
_PASSES = "ttp_passes_over_the_stream"

_ONE_PASS = (
    "transformers.Trainer resumes a training data set without a length within its first pass only: let max_steps end within one pass,"
    " repeat the stream itself (datasets: .repeat(None)), or give a data set with a length"
)


class TTPCallback(TrainerCallback):  # type: ignore[misc]
    """Protects the rank from the beginning of `trainer.train` to its end."""

    def __init__(self, *, save_dirs: Sequence[str | os.PathLike[str]], **options: Any) -> None:
        """`options` go to `ttp.protect`: save_interval, compare_every, on_divergence, on_nonfinite, reseed, on_data_mismatch, layout, log_dir,
        settings, in_place."""
        self._save_dirs = save_dirs
        self._options = options
        self._pause = contextlib.ExitStack()
        self._progress: _Progress | None = None
        self.guard: Guard | None = None
        """From the beginning of training on."""
        self._entered: EnteredTrainer | None = None
        """The Trainer, where `train` of this callback was called."""
        self._trainer: Any = None
        """The Trainer, once `checkpoint` was called, as `train` does."""

    def train(self, trainer: Any) -> Any:
        """Call `trainer.train` with what `checkpoint` returns, protected; return what it returns (all ranks call, `ttp_to_persist` is not needed). With
        `in_place=True` it is entered again when a rank was replaced."""
        entered = self._entered = EnteredTrainer(trainer)
        train = functools.wraps(trainer.train)(lambda: self._train(trainer, entered))  # by the name that messages show
        return ttp_to_persist(train)()

    def _train(self, trainer: Any, entered: EnteredTrainer) -> Any:
        if self.guard is None:
            return trainer.train(resume_from_checkpoint=None if vacant() else self.checkpoint(trainer))
        self._pause.close()
        taken = self.guard.session.step_state().get("state", {}).get("trainer", {})
        return entered.enter(self.guard.step, {key: value for key, value in taken.items() if key != _PASSES})

    def checkpoint(self, trainer: Any) -> str | None:
        """Return what `trainer.train(resume_from_checkpoint=...)` takes, None for a run's beginning (all ranks call).

        Rank 0 writes it into the Trainer's output directory, which all ranks share. Raises CheckpointError on every rank where it
        cannot.
        """
        self._trainer = trainer
        path = refusal = ""
        cause: Exception | None = None
        if not dist.is_initialized() or dist.get_rank() == 0:
            try:
                found = find.find_newest_valid(
                    [Path(directory) for directory in self._save_dirs], key=key_of_environment()
                )
                path = str(self._write(found, trainer)) if found is not None else ""
            except Exception as error:  # whatever it is: the others wait for it
                cause, refusal = error, f"{type(error).__name__}: {error}"
        device = trainer.args.device if dist.is_initialized() else torch.device("cpu")
        path, refusal = broadcast_json([path, refusal], device)
        if refusal:
            raise CheckpointError(f"rank 0 could not make a checkpoint of the Trainer's form: {refusal}") from cause
        return path or None

    def close(self) -> None:
        """Stop protecting, after `train` has returned."""
        self._pause.close()
        if self.guard is not None:
            self.guard.close()
            self.guard = None

    def _write(self, found: Reader, trainer: Any) -> Path:
        state = found.manifest.state["trainer"].get("state")
        saved = state.get("trainer") if isinstance(state, dict) else None
        if saved is None:
            raise CheckpointMismatch(
                f"{found.path} was not written by a transformers.Trainer: use another directory, or move it away"
            )
        folder = Path(trainer.args.output_dir) / _FOLDER
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        weights = open_checkpoint(found.path, deep=False).weights()
        trainer.model.load_state_dict(weights, strict=False)  # tied weights are there once
        trainer.model.save_pretrained(folder)
        state = TrainerState(**{key: value for key, value in from_json(saved).items() if key != _PASSES})
        state.global_step = found.manifest.step
        state.save_to_json(str(folder / "trainer_state.json"))
        return folder

    # --- what the Trainer calls ---

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        loader: Any = objects.get("train_dataloader")
        if (guard := self.guard) is None:
            guard = self.guard = self._protect(state, loader, objects)
            self._say_what_begins_anew(args)
            session = guard.session
            if self._entered is not None and (session.reentry is not None or session.regrouping.rehearses):
                raise Regroup("training begins anew, now that its session has begun")
        assert self._progress is not None
        self._progress.follow(state)
        if guard.step != state.global_step:
            raise ConfigError(
                f"the newest checkpoint is of step {guard.step}, the Trainer is at step {state.global_step}: call"
                " trainer.train(resume_from_checkpoint=callback.checkpoint(trainer))"
            )
        if self._progress.passes:
            self._say_one_pass(f"step {guard.step} is in pass {self._progress.passes + 1} over the stream")
        loader = getattr(loader, "base_dataloader", loader)  # what accelerate has wrapped
        if getattr(loader, "batch_sampler", None) is not None and loader.num_workers == 0:
            loader.collate_fn = guard.seeded_collate(loader.collate_fn)

    def _protect(self, state: Any, loader: Any, objects: dict[str, Any]) -> Guard:
        optimizer, schedule = objects["optimizer"], objects["lr_scheduler"]
        follows_updates = not isinstance(schedule, ReduceLROnPlateau)
        self._progress = _Progress(state, streams=loader is not None and not has_length(loader), trainer=self._trainer)
        model = objects["model"]
        if self._entered is not None and self._options.get("in_place"):
            model = self._entered.model
            model.why_not_in_place = self._entered.why_not(loader)
            count_anew(model)
        return protect(
            model,
            getattr(optimizer, "optimizer", optimizer),  # what accelerate has wrapped
            schedulers=[schedule] if follows_updates else [],
            state={"trainer": self._progress, **({} if follows_updates else {"schedule": schedule})},
            save_dirs=self._save_dirs,
            **self._options,
        )

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        assert self._progress is not None and self.guard is not None
        if self._progress.begin_pass() == 2 and self.guard.session.rank == 0:
            show(
                logging.WARNING,
                f"pass 2 over a stream begins after step {state.global_step}: a restart within it is an error. {_ONE_PASS}",
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self._pause.close()

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self._pause_before_more(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self._pause_before_more(control)

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self._pause.close()
        if self.guard is not None:
            self.guard.save()  # the last step is on disk before anybody leaves

    def _say_what_begins_anew(self, args: Any) -> None:
        """The Trainer gives callbacks their state back only where it was asked to."""
        names = [type(each).__name__ for each in exporting(self._trainer)] if self._trainer is not None else []
        if names and not args.restore_callback_states_from_checkpoint and self.guard and not self.guard.session.rank:
            show(
                logging.WARNING,
                f"{', '.join(names)}: each restart begins its counts anew, as restore_callback_states_from_checkpoint is False; give"
                " TrainingArguments(restore_callback_states_from_checkpoint=True), and they go on",
            )

    def _say_one_pass(self, where: str) -> None:
        """The Trainer would skip as many batches of the first pass, and train on others. Raises DataMismatch."""
        if self._options.get("on_data_mismatch", "error") == "error":
            raise DataMismatch(f"{where}. {_ONE_PASS}; or continue with other data by on_data_mismatch='warn'")
        show(logging.WARNING, f"{where}. {_ONE_PASS}")

    def _pause_before_more(self, control: Any) -> None:
        """An evaluation or a save of the Trainer's own takes as long as it takes: no hang."""
        if self.guard is not None and (control.should_evaluate or control.should_save):
            self._pause.close()
            self._pause.enter_context(self.guard.pause())


class _Progress:
    """The Trainer's own progress as host state. It is given back through the Trainer's checkpoint, before training begins."""

    def __init__(self, state: Any, *, streams: bool, trainer: Any = None) -> None:
        """`streams`: the training data have no length. `trainer`: whose callbacks export their state."""
        self._state = state
        self._streams = streams
        self._trainer = trainer
        self.passes = 0
        """Passes over a stream that were begun, over all attempts; 0 where the data have a length, which the Trainer reckons with."""

    def follow(self, state: Any) -> None:
        """The Trainer has another state object now."""
        self._state = state

    def begin_pass(self) -> int:
        """Count a pass, and return how many there are."""
        self.passes += self._streams
        return self.passes

    def state_dict(self) -> dict[str, Any]:
        """Everything but the history of the log, which grows with every step."""
        fields = {field.name: getattr(self._state, field.name) for field in dataclasses.fields(self._state)}
        if self._trainer is not None:  # the Trainer writes them only in a save of its own
            live = TrainerState(stateful_callbacks=[*exporting(self._trainer), self._trainer.control])
            fields["stateful_callbacks"] = live.stateful_callbacks
        return {**fields, "log_history": [], _PASSES: self.passes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Only what the Trainer's own checkpoint has not: `TTPCallback.checkpoint` has handed the rest on. The pass in flight is begun again."""
        self.passes = max(int(state_dict.get(_PASSES, 0)) - 1, 0)
