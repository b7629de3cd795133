"""`transformers.Trainer` in one process: what it trains on after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from ttp.adopt.transformers_callback import TTPCallback
from ttp.config import Settings

OFF = Settings(enable=False)
STEPS, SAVED = 7, 4


class Model(torch.nn.Module):
    """Keeps what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.inputs: list[list[float]] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.inputs.append(x.view(-1).tolist())
        return {"loss": self.layer(x).square().mean()}

    def save_pretrained(self, folder: Path) -> None:
        torch.save(self.state_dict(), folder / "pytorch_model.bin")


def masked(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A collator that hides a part of each sample, another one each time."""
    x = torch.stack(samples)
    return {"x": x * (torch.rand(x.shape) > 0.5)}


class Stop(TrainerCallback):  # type: ignore[misc]
    """Ends the training behind the first pass of a step."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if state.global_step == SAVED + 1:
            raise ZeroDivisionError


def train(folder: Path, *, cut: bool) -> list[list[float]]:
    settings = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        seed=3,
    )
    torch.manual_seed(0)
    model = Model()
    samples: Any = list(torch.arange(1.0, 61.0).view(20, 3))
    protection = TTPCallback(save_dirs=[folder], settings=OFF, save_interval=SAVED)
    callbacks = [protection, *([Stop()] if cut else [])]
    trainer = Trainer(model=model, args=settings, train_dataset=samples, data_collator=masked, callbacks=callbacks)
    if cut:
        with pytest.raises(ZeroDivisionError):
            trainer.train()
        trainer.accelerator.free_memory()
    else:
        trainer.train(resume_from_checkpoint=protection.checkpoint(trainer))
    protection.close()
    return model.inputs


def test_a_collator_that_draws_draws_the_same_after_a_restart(tmp_path: Path) -> None:
    """The batches that are fetched ahead, too; in the middle of an epoch, with accumulated gradients."""
    whole = train(tmp_path / "whole", cut=False)
    train(tmp_path / "cut", cut=True)
    again = train(tmp_path / "cut", cut=False)
    assert len(whole) == 2 * STEPS and again == whole[2 * SAVED :]
