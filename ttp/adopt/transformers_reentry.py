"""`transformers.Trainer.train`, entered again in the same process: with the model, optimizer and schedule that are there, from the newest step.

The Trainer can resume, from a folder. Owns that folder, which holds its step count alone, and what of the Trainer is put back before: the
rest is the optimizer's and the guard's. Private names of transformers: `tests/chaos/test_in_place_transformers.py` fails where another version has others.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import has_length

from ttp.adopt.trainer_state.host_objects import from_json


class EnteredTrainer:
    """One Trainer, from before its `train` is called."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._random = torch.get_rng_state(), random.getstate(), np.random.get_state()
        """As the program left them: the order of samples is drawn from torch's seed."""

    @property
    def model(self) -> Any:
        """The model as it is trained, within its wrapper."""
        return self._trainer.model_wrapped

    def why_not(self, loader: object) -> str:
        """Return why this Trainer cannot be entered again; empty: it can."""
        args = self._trainer.args
        # They count: a new process would begin at 0, and ranks would stop at different steps.
        counting = [type(each).__name__ for each in exporting(self._trainer)]
        cases = (
            (self._trainer.model_init is not None, "model_init"),
            (bool(args.neftune_noise_alpha), "neftune_noise_alpha"),
            (args.auto_find_batch_size, "auto_find_batch_size"),
            (bool(args.deepspeed) or bool(args.fsdp), "deepspeed or fsdp"),
            (loader is not None and not has_length(loader), "a data set without a length"),
            (bool(counting), f"{', '.join(counting)}, whose state no new process has"),
            (not hasattr(self._trainer, "_load_from_checkpoint"), "this version of transformers"),
        )
        return next((f"transformers.Trainer with {what}" for applies, what in cases if applies), "")

    def enter(self, step: int, taken: Mapping[str, Any]) -> Any:
        """Call `train` with what this process has. `taken`: what was taken of the Trainer's state in `step`; 0: it begins anew."""
        trainer = self._trainer
        trainer._created_lr_scheduler = False  # it keeps the schedule that it has
        torch.set_rng_state(self._random[0])
        random.setstate(self._random[1])
        np.random.set_state(self._random[2])
        if not step:
            return trainer.train()
        state = TrainerState(**from_json(taken))
        state.global_step, state.log_history = step, trainer.state.log_history
        trainer._load_from_checkpoint = lambda *args, **kwargs: None  # the weights are there
        try:
            with tempfile.TemporaryDirectory(prefix="ttp_trainer_") as folder:
                state.save_to_json(str(Path(folder) / "trainer_state.json"))
                return trainer.train(resume_from_checkpoint=folder)
        finally:
            del trainer._load_from_checkpoint


def exporting(trainer: Any) -> list[Any]:
    """Return the Trainer's callbacks that export a state, which a resume may give back: they count something."""
    return [each for each in trainer.callback_handler.callbacks if isinstance(each, ExportableState)]
