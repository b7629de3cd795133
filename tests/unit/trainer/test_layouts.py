"""Models that are split over real ranks train as whole ones do, in short precisions too, and their state moves to other layouts.

One world of four ranks does all the trainings; every layout with every precision: test_layouts_in_full.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.trainer.conftest import run_trainings
from tests.unit.trainer.layouts import (
    LAST,
    PRECISIONS,
    SAVE,
    Axes,
    Result,
    Training,
    assert_same_curve,
    assert_state_of,
    assert_trains_in_precision,
    in_precision,
    loaded,
)
from ttp.trainer.metrics import read_lines

UNEVEN = {
    "model_config.vocab_size": 257,
    "model_config.num_query_groups": 4,
    "model_config.untie_embeddings_and_output_weights": "false",
}
DROPOUT = {"model_config.hidden_dropout": 0.1, "model_config.attention_dropout": 0.1}

TENSOR, SEQUENCE = Axes(data=2, tensor=2), Axes(data=2, tensor=2, sequence=True)
PIPELINE, INTERLEAVED = Axes(data=2, pipeline=2), Axes(data=2, pipeline=2, virtual=2)

IN_SHARDS = {"training_config.gradient_accumulation_shard": "true", "parallel_config.optimizer_replicas": 1}
"""With one replica, so that two data-parallel ranks hold two shards."""

PRECISE = [in_precision("fp16 by autocast", TENSOR), in_precision("bf16 by autocast", PIPELINE)]
IN_FP16 = {
    **PRECISIONS["fp16 by autocast"],
    "model_config.fp16_lm_cross_entropy": "true",
    "training_config.training_iters": 2,
}
GATHERED = {"training_config.loss_func_kwargs.loss_func_type": "CrossEntropyLoss"}
EVALUATED = [
    Training(f"evaluated {axes}", axes, {
        "dataset_config.validation_share": 0.01, "training_config.eval_interval": 1, "training_config.eval_sequences": 7,
        "training_config.training_iters": 1, "optimizer_config.learning_rate": 0,
        "optimizer_config.learning_rate_scheduler_kwargs": None,
    }, sequences)
    for axes, sequences in ((TENSOR, 12), (INTERLEAVED, 8))
]  # fmt: skip
"""Batches of other sizes; nothing is learned, so that all have the same weights."""
MOVES: list[tuple[str, Axes, dict[str, Any]]] = [
    ("uneven", Axes(), UNEVEN),
    ("uneven", Axes(tensor=4), UNEVEN),
    ("data", TENSOR, {}),
    ("pipeline", Axes(data=3), {}),
]
"""(source, layout that reads its checkpoint, keys)"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Return the results of all trainings of this file, by name."""
    folder = tmp_path_factory.mktemp("layouts")
    trainings = [
        Training("whole", Axes()),
        Training("data", Axes(data=4), SAVE, 8, 1, keep_positions=True),
        Training("data, on three ranks", Axes(data=3), {
            "training_config.resume": Result(folder / "data").checkpoint(LAST), "training_config.training_iters": LAST + 2,
        }, 6, 1, keep_positions=True),
        Training("pipeline", PIPELINE, SAVE),
        Training("uneven, whole", Axes(), UNEVEN),
        Training("uneven", Axes(tensor=2, pipeline=2), {**UNEVEN, **SAVE}),
        Training("uneven, in shards", Axes(data=2, pipeline=2, virtual=2), {**UNEVEN, **IN_SHARDS}),
        Training("gathered", SEQUENCE, GATHERED),
        Training("loss in fp16", TENSOR, IN_FP16),
        *PRECISE,
        *EVALUATED,
        *(
            loaded(f"{source} under {axes}", Result(folder / source).checkpoint(LAST), axes, keys)
            for source, axes, keys in MOVES
        ),
    ]  # fmt: skip
    return run_trainings(folder, trainings)


def test_a_split_model_trains_as_the_whole_one(done: dict[str, Result]) -> None:
    """A pipeline; and 257 token ids over two tensor-parallel ranks, in a matrix that both ends of a pipeline have."""
    assert_same_curve(done["pipeline"], done["whole"])
    assert_same_curve(done["uneven"], done["uneven, whole"])


def test_gradients_that_accumulate_in_shards_train_alike(done: dict[str, Result]) -> None:
    """In an interleaved pipeline, whose ends have the same embedding: it alone accumulates whole."""
    assert_same_curve(done["uneven, in shards"], done["uneven, whole"])


def test_a_loss_of_gathered_logits_is_that_of_divided_ones(done: dict[str, Result]) -> None:
    """CrossEntropyLoss, with sequence parallelism as well; to round-off."""
    assert_same_curve(done["gathered"], done["whole"])


def test_losses_in_float16_are_those_of_float32_to_their_precision(done: dict[str, Result]) -> None:
    """Of logits that are divided over tensor-parallel ranks; not the same number, so it was another computation."""
    ours, theirs = (done[name].lines[1]["loss_value"] for name in ("loss in fp16", "whole"))
    assert ours == pytest.approx(theirs, rel=1e-2) and ours != theirs


def test_short_precisions_train_alike_when_the_model_is_split(done: dict[str, Result]) -> None:
    """And one rank's overflow is everybody's."""
    for training in PRECISE:
        assert_trains_in_precision(done[training.name], training, done["whole"])


def test_the_validation_loss_is_of_the_same_sequences_under_every_layout(done: dict[str, Result]) -> None:
    """Seven of them, which no batch divides, whatever the ranks that share it."""
    lines = [read_lines(done[training.name].folder / "validation.jsonl") for training in EVALUATED]
    assert [[line["sequences"] for line in each] for each in lines] == [[7]] * len(EVALUATED)
    losses = [each[0]["loss_value"] for each in lines]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-6)


def test_weights_and_moments_move_to_other_layouts_bit_for_bit(done: dict[str, Result]) -> None:
    """What all ranks together hold after loading is what torch alone reads in the files; an uneven vocabulary too."""
    for source, axes, _ in MOVES:
        result = done[f"{source} under {axes}"]
        assert_state_of(result, done[source].checkpoint(LAST))
        assert result.weights == done[source].weights
    assert done["uneven under dp1tp4pp1"].state["model.embedding.weight"].shape == (257, 32)


def test_a_job_resumed_on_another_number_of_ranks_goes_on_in_the_data_where_it_was(done: dict[str, Result]) -> None:
    """Four ranks took eight sequences a step, three ranks take six: step and steps' size no longer give the position. No sequence is
    taken twice or left out."""
    before, after = done["data"], done["data, on three ranks"]
    assert before.positions == {step: list(range(8 * (step - 1), 8 * step)) for step in range(1, LAST + 1)}
    taken = 8 * LAST
    assert after.positions == {LAST + 1: list(range(taken, taken + 6)), LAST + 2: list(range(taken + 6, taken + 12))}
    assert [line["consumed_samples"] for line in after.lines.values()] == [taken + 6, taken + 12]
