"""Models that are split over real ranks train as whole ones do, in short precisions too, and their state moves to other layouts.

One world of four ranks does all the trainings; every layout with every precision: test_layouts_in_full.py.
"""

from __future__ import annotations

import pytest

from tests.unit.trainer.conftest import run_trainings
from tests.unit.trainer.layouts import (
    LAST,
    SAVE,
    Axes,
    Result,
    Training,
    assert_same_bits,
    assert_same_curve,
    assert_state_of,
    assert_trains_in_precision,
    in_precision,
    loaded,
)

UNEVEN = {"model_config.vocab_size": 257, "model_config.num_query_groups": 4}
TIED = {**UNEVEN, "model_config.untie_embeddings_and_output_weights": "false"}
DROPOUT = {"model_config.hidden_dropout": 0.1, "model_config.attention_dropout": 0.1}

TENSOR, SEQUENCE = Axes(data=2, tensor=2), Axes(data=2, tensor=2, sequence=True)
PIPELINE, INTERLEAVED = Axes(data=2, pipeline=2), Axes(data=2, pipeline=2, virtual=2)

PRECISE = [
    in_precision("fp16 by autocast", Axes(data=2)),
    in_precision("fp16 by autocast", PIPELINE),
    in_precision("fp16 by autocast", TENSOR),
    in_precision("bf16", SEQUENCE),
]
RECOMPUTED = {
    (axes, way): Training(f"{way} {axes}", axes, {**DROPOUT, "training_config.recompute": way}, 8)
    for axes in (SEQUENCE, INTERLEAVED)
    for way in ("none", "full", "selective")
}


MOVES = [
    ("vocabulary of two", Axes(), UNEVEN),
    ("vocabulary of two", Axes(tensor=4), UNEVEN),
    ("data", TENSOR, {}),
    ("data", INTERLEAVED, {}),
    ("pipeline", Axes(), {}),
    ("pipeline", TENSOR, {}),
]
"""(source, layout that reads its checkpoint, keys)"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Return the results of all trainings of this file, by name."""
    folder = tmp_path_factory.mktemp("layouts")
    trainings = [
        Training("whole", Axes()),
        Training("data", Axes(data=4), SAVE, 8, 1),
        Training("pipeline", PIPELINE, SAVE, 8, 2),
        Training("vocabulary of one", Axes(), UNEVEN),
        Training("vocabulary of two", Axes(tensor=2), {**UNEVEN, **SAVE}),
        Training("vocabulary of four", Axes(tensor=4, sequence=True), UNEVEN),
        Training("tied", Axes(), TIED),
        Training("tied, split", Axes(tensor=2, pipeline=2), TIED),
        *PRECISE,
        *RECOMPUTED.values(),
        *(
            loaded(f"{source} under {axes}", Result(folder / source).checkpoint(LAST), axes, keys)
            for source, axes, keys in MOVES
        ),
    ]
    return run_trainings(folder, trainings)


def test_a_vocabulary_that_ranks_share_unevenly_trains_as_the_whole_one(done: dict[str, Result]) -> None:
    """257 token ids over two and four ranks, and in a matrix that both ends of a pipeline have."""
    for name in ("vocabulary of two", "vocabulary of four"):
        assert_same_curve(done[name], done["vocabulary of one"])
    assert_same_curve(done["tied, split"], done["tied"])


def test_short_precisions_train_alike_under_every_axis(done: dict[str, Result]) -> None:
    """And one rank's overflow is everybody's."""
    for training in PRECISE:
        assert_trains_in_precision(done[training.name], training, done["whole"])
    losses = [[line["loss"] for line in done[training.name].lines.values()] for training in PRECISE]
    assert losses[0] == losses[1], "a pipeline changed the bits of data parallel"


def test_recomputed_activations_change_no_bit(done: dict[str, Result]) -> None:
    """Under sequence parallelism and in a pipeline, with dropout everywhere."""
    for (axes, _), training in RECOMPUTED.items():
        assert_same_bits(done[training.name], done[RECOMPUTED[axes, "none"].name])


def test_weights_and_moments_move_to_other_layouts_bit_for_bit(done: dict[str, Result]) -> None:
    """What all ranks together hold after loading is what torch alone reads in the files; an uneven vocabulary too."""
    for source, axes, _ in MOVES:
        result = done[f"{source} under {axes}"]
        assert_state_of(result, done[source].checkpoint(LAST))
        assert result.weights == done[source].weights
    assert done["vocabulary of two under dp1tp4pp1"].state["model.embedding.weight"].shape == (257, 32)
