"""The validation loss is the mean over the held-out text, and nothing of the training depends on it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.trainer.test_train import Run, bits, final, own_process, run
from ttp.trainer.config.loader import load_config
from ttp.trainer.data.batches import open_sequences
from ttp.trainer.metrics import read_lines
from ttp.trainer.model.gpt import token_loss
from ttp.trainer.model.weights import model_of, open_trained
from ttp.trainer.parallel.micro_batches import Passes

__all__ = ["own_process", "run"]  # fixtures

EVALUATED = {
    "training_config.eval_interval": 2,
    "training_config.eval_sequences": 11,
    "dataset_config.validation_share": 0.01,
    "dataset_config.micro_batch_num": 2,
    "model_config.hidden_dropout": 0.1,
    "model_config.attention_dropout": 0.1,
}


def validation(output: Path) -> dict[int, str]:
    """Return the loss by step; every line of a step is the same."""
    found: dict[int, str] = {}
    for line in read_lines(output / "validation.jsonl"):
        assert found.setdefault(line["step"], line["loss"]) == line["loss"]
    return found


def test_the_number_is_the_mean_over_the_first_held_out_sequences(run: Run, small_keys: dict[str, Any]) -> None:
    """Of the whole model without dropout, at the step it stands beside: 11 in 3 batches of 2 x 2 sequences."""
    output = run("output", {**EVALUATED, "training_config.training_iters": 5, "training_config.save_interval": 1})
    assert sorted(validation(output)) == [2, 4, 5]
    config = load_config("gpt_tiny", [(key, str(value)) for key, value in {**small_keys, **EVALUATED}.items()])
    held_out = open_sequences(config).held_out
    assert held_out is not None
    for step, loss in validation(output).items():
        trained = open_trained(str(output / "checkpoints" / f"iter_{step:07d}"))
        model = model_of(trained.config, trained.checkpoint.weights(), torch.device("cpu"), "ours")
        tokens_BT, targets_BT = held_out.batch(0, 11)
        with torch.no_grad():
            expected = float(token_loss(model(tokens_BT), targets_BT))
        assert float.fromhex(loss) == pytest.approx(expected, rel=1e-6)
    assert "validation: step 5, loss" in (output / "log" / "rank_0" / "info.log").read_text()


def test_training_is_the_same_with_and_without_it(run: Run) -> None:
    """Bit for bit, dropout included."""
    evaluated, plain = run("evaluated", EVALUATED), run("plain", {**EVALUATED, "training_config.eval_interval": "null"})
    assert bits(evaluated) == bits(plain) and final(evaluated) == final(plain)
    assert not (plain / "validation.jsonl").exists()


def test_a_resumed_run_measures_the_same(run: Run) -> None:
    """Also the loss of the step that it resumes at, which the process before may not have come to."""
    parts = {**EVALUATED, "training_config.save_interval": 4, "training_config.training_iters": 4}
    output = run("parts", {**parts, "optimizer_config.learning_rate_scheduler_kwargs.decay_steps": 50})
    whole = run("whole", {**EVALUATED, "optimizer_config.learning_rate_scheduler_kwargs.decay_steps": 50})
    (output / "validation.jsonl").write_text("")
    output = run("parts", {**EVALUATED, "optimizer_config.learning_rate_scheduler_kwargs.decay_steps": 50})
    assert sorted(validation(output)) == [4, 6]
    assert validation(output).items() <= validation(whole).items() and bits(output) == bits(whole)


def test_the_sum_of_losses_is_shown_as_the_mean_too(run: Run) -> None:
    """With loss_reduction: sum, before the first update: the same number."""
    keys = {**EVALUATED, "training_config.training_iters": 1, "optimizer_config.learning_rate": 0,
            "optimizer_config.learning_rate_scheduler_kwargs": "null"}  # fmt: skip
    mean, total = run("mean", keys), run("sum", {**keys, "training_config.loss_reduction": "sum"})
    (a,), (b,) = validation(mean).values(), validation(total).values()
    assert float.fromhex(a) == pytest.approx(float.fromhex(b), rel=1e-6)


def test_the_sequences_are_the_same_whatever_a_batch_takes(run: Run, tmp_path: Path) -> None:
    """Batches that divide them, that do not, and one that is larger than all; and fewer where fewer are held out."""
    keys = {**EVALUATED, "training_config.training_iters": 1, "optimizer_config.learning_rate": 0,
            "optimizer_config.learning_rate_scheduler_kwargs": "null"}  # fmt: skip
    found = []
    for batch, micro in ((1, 1), (3, 2), (20, 1)):
        sizes = {"dataset_config.batch_size": batch, "dataset_config.micro_batch_num": micro}
        (line,) = read_lines(run(f"{batch}_{micro}", {**keys, **sizes}) / "validation.jsonl")
        assert line["sequences"] == 11
        found.append(line["loss_value"])
    assert found == pytest.approx([found[0]] * 3, rel=1e-6)
    (tmp_path / "text").write_text("to be or not to be " * 50)
    (line,) = read_lines(run("little", {**keys, "dataset_config.dataset_dir": tmp_path / "text"}) / "validation.jsonl")
    assert line["sequences"] == 1


def test_evaluating_on_nothing_is_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """The configuration says by itself that no text is held out."""
    run("none", {**EVALUATED, "dataset_config.validation_share": 0}, status=2)
    assert (
        "eval_interval is 2, and dataset_config.validation_share is 0: nothing is held out" in capsys.readouterr().err
    )


def test_an_evaluation_that_ends_by_an_exception_leaves_training_as_it_was() -> None:
    """A rank may die in it, and the others train on in their processes: with summed losses they would do so with other gradients than the new one."""
    chunk = torch.nn.Dropout()
    passes = SimpleNamespace(_reduction="mean", chunks=[chunk])
    with pytest.raises(RuntimeError, match="closed by peer"), Passes._as_for_evaluation(passes):  # type: ignore[arg-type]
        assert passes._reduction == "sum" and not chunk.training
        raise RuntimeError("Connection closed by peer")
    assert passes._reduction == "mean" and chunk.training
