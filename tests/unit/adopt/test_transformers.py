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


class Counts(EarlyStoppingCallback):  # type: ignore[misc]
    """One that the Trainer keeps under another name."""


def stops_early(folder: Path, restores: bool, saved: int = 0, named: str = "train") -> list[tuple[str, int, int]]:
    """Train with evaluations behind each step, none of which is better than the first; return the kind, patience and count of each that counts."""
    settings = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=0.0,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        metric_for_best_model="loss",
        greater_is_better=False,
        label_names=["x"],
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        restore_callback_states_from_checkpoint=restores,
    )
    samples = list(torch.ones(20, 3))
    protection = TTPCallback(save_dirs=[folder], settings=OFF, save_interval=saved)
    counting = [Counts(50), EarlyStoppingCallback(4), EarlyStoppingCallback(60)]
    trainer: Any = Trainer(
        model=Model(),
        args=settings,
        train_dataset=samples,
        eval_dataset=samples[:2],
        data_collator=lambda each: {"x": torch.stack(each)},
        callbacks=[protection, *([Stop(saved)] if saved else [])],
    )
    trainer.callback_handler.callbacks.extend(counting)
    try:
        if named == "train":
            protection.train(trainer)
        elif named == "neither":
            trainer.train()
        else:
            trainer.train(resume_from_checkpoint=protection.checkpoint(trainer))
    except ZeroDivisionError:
        pass
    finally:
        trainer.accelerator.free_memory()
        protection.close()
    return [
        (type(each).__name__, each.early_stopping_patience, each.early_stopping_patience_counter)
        for each in trainer.callback_handler.callbacks
        if isinstance(each, EarlyStoppingCallback)
    ]


@pytest.mark.parametrize(("named", "restores"), [("train", True), ("checkpoint", True), ("train", False)])
def test_callbacks_that_count_go_on_after_a_restart_where_the_trainer_restores_them(
    tmp_path: Path, named: str, restores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of evaluations 1 to 7 two get lost, each behind a saved step. Where it does not restore them, each attempt warns of it."""
    said: list[str] = []
    monkeypatch.setattr(transformers_callback, "show", lambda level, line: said.append(line))
    stops_early(tmp_path, restores, 3, named)
    stops_early(tmp_path, restores, 5, named)
    counted = {each[:2]: each[2] for each in stops_early(tmp_path, restores, named=named)}
    counts = 4 if restores else 2
    assert counted == {
        ("Counts", 50): counts,
        ("EarlyStoppingCallback", 4): counts,
        ("EarlyStoppingCallback", 60): counts,
    }
    line = (
        "Counts, EarlyStoppingCallback, EarlyStoppingCallback: each restart begins its counts anew, as"
        " restore_callback_states_from_checkpoint is False; give"
    )
    assert [each.startswith(line) for each in said] == ([] if restores else [True] * 3)


def test_a_trainer_that_the_callback_was_not_given_is_trained_as_before(tmp_path: Path) -> None:
    """Neither `train` nor `checkpoint` of the callback was called: its callbacks cannot be seen."""
    assert stops_early(tmp_path, False, named="neither")[1] == ("EarlyStoppingCallback", 4, 4)


def test_the_trainers_control_is_kept_as_it_is_and_only_rank_0_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(transformers_callback, "show", lambda level, line: said.append(line))
    settings = TrainingArguments(output_dir=str(tmp_path), report_to=[], disable_tqdm=True, use_cpu=True)
    trainer: Any = Trainer(model=Model(), args=settings, callbacks=[EarlyStoppingCallback()])
    trainer.control.should_epoch_stop = True
    kept = transformers_callback._Progress(trainer.state, streams=False, trainer=trainer).state_dict()
    assert kept["stateful_callbacks"]["TrainerControl"]["args"]["should_epoch_stop"]
    protection = TTPCallback(save_dirs=[tmp_path])
    protection._trainer = trainer
    for rank in (0, 1):
        protection.guard = SimpleNamespace(session=SimpleNamespace(rank=rank))  # type: ignore[assignment]
        protection._say_what_begins_anew(settings)
        assert len(said) == 1
