"""The validation loss under every axis, and through kills; and what a kill under a split model leaves, in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.chaos.conftest import arguments
from tests.chaos.test_axes import STEPS, overrides, run
from tests.chaos.test_kills import assert_equal, published_steps
from tests.unit.trainer.layouts import Axes
from ttp.chaos.observed.training_job import TrainingJob, read_jsonl
from ttp.trainer.convert import main as convert
from ttp.trainer.model.weights import model_of, open_trained

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

EVALUATED = (
    "--training_config.eval_interval=3",
    "--training_config.eval_sequences=7",
    "--dataset_config.validation_share=0.1",
)


def validation(job: TrainingJob) -> dict[int, str]:
    """Return the loss by step; every line of a step has the same bits."""
    found: dict[int, str] = {}
    for line in read_jsonl(job.output_dir / "validation.jsonl"):
        assert found.setdefault(line["step"], line["loss"]) == line["loss"], line
    return found


@pytest.mark.parametrize(
    "axes",
    [
        Axes(data=2, tensor=2, sequence=True),
        Axes(data=2, pipeline=2),
        Axes(data=2, pipeline=2, virtual=2),
        Axes(data=4, experts=4, expert=2),
    ],
    ids=str,
)
def test_the_number_is_the_same_under_every_layout_and_after_a_kill(tmp_path: Path, axes: Axes) -> None:
    """To round-off between layouts; bit for bit after a kill in the step that follows an evaluation."""
    whole = run(tmp_path / "whole", axes, *EVALUATED)
    plain = run(tmp_path / "plain", Axes(data=axes.data, experts=axes.experts), *EVALUATED)
    ours, theirs = validation(whole), validation(plain)
    assert sorted(ours) == sorted({*range(3, STEPS + 1, 3), STEPS})
    for step, loss in ours.items():
        assert float.fromhex(loss) == pytest.approx(float.fromhex(theirs[step]), rel=2e-4), step
    faulted = run(
        tmp_path / "faulted", axes, *EVALUATED, faults=f"kill:rank={axes.ranks - 1},step=7,point=backward,round=0"
    )
    assert published_steps(faulted)[0] == 6
    assert_equal(faulted, whole)
    assert validation(faulted) == ours


LONG = (
    "--training_config.eval_interval=4",
    "--training_config.eval_sequences=1500",
    "--dataset_config.validation_share=0.4",
    "--training_config.training_iters=10",
)
"""An evaluation that takes seconds, where a step takes milliseconds."""


def wait_for_checkpoints(job: TrainingJob, count: int) -> None:
    job.wait_for(lambda: len(published_steps(job)) >= count, f"{count} checkpoints", 60)


@pytest.mark.parametrize("axes", [Axes(data=2), Axes(data=2, pipeline=2)], ids=str)
def test_a_rank_killed_while_it_evaluates_costs_no_step_and_no_number(tmp_path: Path, axes: Axes) -> None:
    """The step before is saved, and the next attempt evaluates it again: the same bits. Rank 0, which notes the loss, and the last."""
    whole = run(tmp_path / "whole", axes, *LONG)
    with TrainingJob(tmp_path / "faulted", ranks=axes.ranks, overrides=arguments(*overrides(axes), *LONG)) as faulted:
        for start, (step, rank) in enumerate([(4, 0), (8, axes.ranks - 1)]):
            faulted.wait_for_step(step)
            assert step not in validation(faulted), "the evaluation was over: it is too short"
            faulted.kill(rank)
            wait_for_checkpoints(faulted, start + 1)
        status = faulted.wait(280)
    assert status == 0, faulted.console_tail(80)
    assert published_steps(faulted)[:2] == [4, 8]
    assert_equal(faulted, whole)
    assert validation(faulted) == validation(whole)


def test_what_a_killed_rank_of_a_split_model_leaves_generates_in_transformers(tmp_path: Path) -> None:
    """dp 2 x tp 2: the dying gasp alone, exported, has our logits there, and goes on from a prompt."""
    faulted = run(tmp_path / "faulted", Axes(data=2, tensor=2), faults="kill:rank=3,step=5,point=updating,round=0")
    step = published_steps(faulted)[0]
    gasp = faulted.output_dir / "checkpoints" / f"iter_{step:07d}"
    assert convert(["to-hf", str(gasp), str(tmp_path / "hf")]) == 0
    trained = open_trained(str(gasp))
    assert trained.checkpoint.cause not in ("periodic", "requested")
    model = model_of(trained.config, trained.checkpoint.weights(), torch.device("cpu"), "ours")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    tokens_BT = torch.randint(256, (2, trained.config.seq_length), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = model(tokens_BT)
        torch.testing.assert_close(theirs(tokens_BT).logits, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
    made = theirs.generate(tokens_BT[:1, :4], max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert made.shape == (1, 12)
