"""Models that are split over real ranks train as whole ones do, in every precision, and their state moves to any layout."""

from __future__ import annotations

import pytest

from tests.unit.trainer.conftest import TrainAll
from tests.unit.trainer.layouts import Axes, Result, Training, read_by_torch


def assert_same_curve(ours: Result, theirs: Result, within: float) -> None:
    """The same losses and norms to round-off."""
    assert ours.lines.keys() == theirs.lines.keys() and ours.lines
    for step, line in ours.lines.items():
        for name in ("loss_value", "grad_norm_value"):
            assert line[name] == pytest.approx(theirs.lines[step][name], rel=within), (step, name)


def test_a_vocabulary_that_ranks_share_unevenly_trains_as_the_whole_one(train_all: TrainAll) -> None:
    """257 token ids over two and four ranks, and as rows of a matrix that is input and output at once."""
    keys = {"model_config.vocab_size": 257, "model_config.num_query_groups": 4}
    tied = {**keys, "model_config.untie_embeddings_and_output_weights": "false"}
    at_three = {"training_config.save_interval": 3}
    done = train_all(
        Training("one", Axes(), {**keys, **at_three}, keep_state=True),
        Training("two", Axes(tensor=2), {**keys, **at_three}, keep_state=True),
        Training("four", Axes(tensor=4, sequence=True), keys),
        Training("tied", Axes(), tied),
        Training("tied over two", Axes(tensor=2, pipeline=2), tied),
    )
    for name in ("two", "four"):
        assert_same_curve(done[name], done["one"], within=1e-5)
    assert_same_curve(done["tied over two"], done["tied"], within=1e-5)
    assert done["one"].state["model.embedding.weight"].shape == (257, 32)
