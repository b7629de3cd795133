"""`transformers.Trainer` in one process: what it trains on after a restart."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from tests.unit.checkpoint.signing import make_keys
from ttp.adopt import transformers_callback
from ttp.adopt.transformers_callback import TTPCallback
from ttp.adopt.transformers_reentry import EnteredTrainer
from ttp.config import Settings
from ttp.errors import DataMismatch

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


def numbers_of(samples: list[dict[str, float]]) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor([[each["x"]] * 3 for each in samples])}


def stream(length: int) -> Any:
    samples = datasets.Dataset.from_dict({"x": [float(n) for n in range(length)]})
    return samples.to_iterable_dataset(num_shards=2).shuffle(seed=1, buffer_size=8)


class Stop(TrainerCallback):  # type: ignore[misc]
    """Ends the training behind the first pass of the step after `saved`."""

    def __init__(self, saved: int) -> None:
        self.saved = saved

    def on_substep_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if state.global_step == self.saved + 1:
            raise ZeroDivisionError


def train(folder: Path, saved: int = 0, samples: Any = None, **options: Any) -> list[list[float]]:
    """Return what the model was called with. `saved`: the step that is saved, and behind which the training ends. `samples`: a stream."""
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
    streams = samples is not None
    samples = samples if streams else list(torch.arange(1.0, 61.0).view(20, 3))
    protection = TTPCallback(save_dirs=[folder], settings=OFF, save_interval=saved, **options)
    collate = numbers_of if streams else masked
    callbacks = [protection, *([Stop(saved)] if saved else [])]
    trainer: Any = Trainer(
        model=model, args=settings, train_dataset=samples, data_collator=collate, callbacks=callbacks
    )
    found = protection.checkpoint(trainer)
    try:
        if saved:
            with pytest.raises(ZeroDivisionError):
                trainer.train(resume_from_checkpoint=found)
        else:
            trainer.train(resume_from_checkpoint=found)
    finally:
        trainer.accelerator.free_memory()
        protection.close()
    return model.inputs


def test_a_collator_that_draws_draws_the_same_after_a_restart(tmp_path: Path) -> None:
    """The batches that are fetched ahead, too; in the middle of an epoch, with accumulated gradients."""
    whole = train(tmp_path / "whole")
    train(tmp_path / "cut", SAVED)
    again = train(tmp_path / "cut")
    assert len(whole) == 2 * STEPS and again == whole[2 * SAVED :]


def test_a_stream_goes_on_within_its_first_pass(tmp_path: Path) -> None:
    """Cut twice; the Trainer skips what was trained on by itself."""
    whole = train(tmp_path / "whole", samples=stream(40))
    train(tmp_path / "cut", 2, stream(40))
    train(tmp_path / "cut", SAVED, stream(40))
    assert train(tmp_path / "cut", samples=stream(40)) == whole[2 * SAVED :]


@pytest.mark.parametrize("choice", ["error", "warn"])
def test_a_restart_in_a_later_pass_over_a_stream_is_an_error(
    tmp_path: Path, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Trainer reckons with a length that there is not, and would train on other batches; the pass itself is warned of when it begins."""
    said: list[str] = []
    monkeypatch.setattr(transformers_callback, "show", lambda level, line: said.append(line))
    train(tmp_path, SAVED, stream(12))
    assert len(said) == 1 and "pass 2 over a stream begins after step 3: a restart within it is an error." in said[0]
    if choice == "error":
        with pytest.raises(DataMismatch, match=r"step 4 is in pass 2 over the stream\. .* a data set with a length"):
            train(tmp_path, samples=stream(12))
    else:
        assert train(tmp_path, samples=stream(12), on_data_mismatch="warn")
        assert "step 4 is in pass 2 over the stream" in said[1]


def test_only_a_signed_checkpoint_becomes_one_of_the_trainers_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TTP_VERIFY_KEY; what was trained without a signature is not loaded by this way either."""
    train(tmp_path / "cut", SAVED)
    make_keys(tmp_path)
    monkeypatch.setenv("TTP_VERIFY_KEY", str(tmp_path / "job.pub.pem"))
    protection = TTPCallback(save_dirs=[tmp_path / "cut"], settings=OFF)
    trainer: Any = SimpleNamespace(args=SimpleNamespace(device=torch.device("cpu"), output_dir=str(tmp_path / "t")))
    assert protection.checkpoint(trainer) is None and not (tmp_path / "t").exists()


def test_callbacks_that_count_are_refused_in_place_by_their_name(tmp_path: Path) -> None:
    """A new process would count from 0, and the ranks would stop at different steps."""
    settings = TrainingArguments(output_dir=str(tmp_path), report_to=[], disable_tqdm=True, use_cpu=True)
    trainer: Any = Trainer(model=Model(), args=settings, callbacks=[Stop(1), EarlyStoppingCallback()])
    entered = EnteredTrainer(trainer)
    assert entered.why_not(None) == "transformers.Trainer with EarlyStoppingCallback, whose state no new process has"
    trainer.remove_callback(EarlyStoppingCallback)
    assert entered.why_not(None) == "", "the Trainer's own callbacks keep none"
