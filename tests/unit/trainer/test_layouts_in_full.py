"""Every layout in every precision, every way of recomputing, every move of state, and fifty steps of each layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.trainer.conftest import TrainAll
from tests.unit.trainer.layouts import (
    LAST,
    PRECISIONS,
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

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

DEADLINE_S = 1500.0
FIFTY = {"training_config.training_iters": 50}
REORDERED = (1, 3, 4, 6)
"""Micro-batches of one process, which has two otherwise: the same step, summed in another order."""


def test_a_vocabulary_that_ranks_share_unevenly_trains_as_the_whole_one(tmp_path: Path, train_all: TrainAll) -> None:
    """257 token ids over two and four ranks; a checkpoint of two goes to one and to four, and on from one to four."""
    keys = {"model_config.vocab_size": 257, "model_config.num_query_groups": 4}
    two, one = (Result(tmp_path / name).checkpoint(LAST) for name in ("two", "one"))
    done = train_all(
        Training("one", Axes(), {**keys, **SAVE}),
        Training("two", Axes(tensor=2), {**keys, **SAVE}),
        Training("four", Axes(tensor=4, sequence=True), keys),
        *(loaded(f"two under {axes}", two, axes, keys) for axes in (Axes(), Axes(tensor=4))),
        *(loaded(f"one under {axes}", one, axes, keys) for axes in (Axes(tensor=2), Axes(tensor=4))),
        deadline_s=DEADLINE_S,
    )
    for name in ("two", "four"):
        assert_same_curve(done[name], done["one"])
    for name, result in done.items():
        if " under " in name:
            assert_state_of(result, two if name.startswith("two") else one)


def test_sgd_with_momentum_trains_a_split_model_as_a_whole_one(tmp_path: Path, train_all: TrainAll) -> None:
    """Its state is one tensor a parameter; it moves to other layouts as moments do."""
    keys = {"optimizer_config.optimizer_type": "SGD", "optimizer_config.momentum": 0.9}
    checkpoint = Result(tmp_path / "split").checkpoint(LAST)
    done = train_all(
        Training("whole", Axes(), keys),
        Training("split", Axes(data=2, tensor=2), {**keys, **SAVE}),
        loaded("moved", checkpoint, Axes(data=3), keys),
        deadline_s=DEADLINE_S,
    )
    assert_same_curve(done["split"], done["whole"])
    assert_state_of(done["moved"], checkpoint)
    assert any(key.endswith("momentum_buffer") for key in done["moved"].state)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_trains_alike_under_every_axis(precision: str, train_all: TrainAll) -> None:
    """As FP32, to the type's own precision; a pipeline changes no bit of a loss."""
    layouts = [
        Axes(data=2),
        Axes(data=2, pipeline=2),
        Axes(data=2, tensor=2),
        Axes(data=2, tensor=2, sequence=True),
        Axes(data=2, tensor=2, pipeline=2),
        Axes(data=2, experts=4, expert=2),
    ]
    trainings = [in_precision(precision, axes) for axes in layouts]
    plain = (Training("FP32", Axes(data=2)), Training("FP32 with experts", Axes(data=2, experts=4)))
    done = train_all(*plain, *trainings, deadline_s=DEADLINE_S)
    for training in trainings:
        whole = done["FP32 with experts" if training.axes.experts else "FP32"]
        assert_trains_in_precision(done[training.name], training, whole)
    losses = [[line["loss"] for line in done[training.name].lines.values()] for training in trainings[:2]]
    assert losses[0] == losses[1] and done[trainings[0].name].weights == done[trainings[1].name].weights


@pytest.mark.parametrize("dropout", [0.1, 0.0])
def test_recomputed_activations_change_no_bit_under_any_axis(dropout: float, train_all: TrainAll) -> None:
    """Losses, norms and weights, of blocks and of blocks with experts on other ranks."""
    keys = {"model_config.hidden_dropout": dropout, "model_config.attention_dropout": dropout}
    layouts = [
        Axes(data=2, tensor=2, sequence=True),
        Axes(data=2, tensor=2),
        Axes(data=2, pipeline=2),
        Axes(data=2, pipeline=2, virtual=2),
        Axes(data=2, tensor=2, pipeline=2, sequence=True),
        Axes(data=4, experts=4, expert=2),
    ]
    ways = ("none", "full", "selective")
    done = train_all(
        *(
            Training(f"{way} {axes}", axes, {**keys, "training_config.recompute": way}, 8)
            for axes in layouts
            for way in ways
        ),
        deadline_s=DEADLINE_S,
    )
    for axes in layouts:
        for way in ("full", "selective"):
            assert_same_bits(done[f"{way} {axes}"], done[f"none {axes}"])


def test_copies_of_a_parameter_keep_the_same_bits(train_all: TrainAll) -> None:
    """Norms of tensor-parallel ranks, and the embedding that the first and the last stage have: three data-parallel ranks may be
    summed in several orders. Every training ends with a comparison of all copies."""
    keys = {"training_config.training_iters": 20, "model_config.untie_embeddings_and_output_weights": "false"}
    layouts = [Axes(data=3, tensor=2), Axes(data=3, pipeline=2), Axes(data=3, tensor=2, sequence=True)]
    done = train_all(*(Training(str(axes), axes, keys) for axes in layouts), deadline_s=DEADLINE_S)
    assert all(len(result.lines) == 20 for result in done.values())


GROUPS = (
    (
        Axes(data=4), Axes(data=2, tensor=2), Axes(data=2, pipeline=2), Axes(data=2, tensor=2, pipeline=2),
        Axes(data=2, pipeline=2, virtual=2), Axes(data=3, tensor=2), Axes(),
    ),
    (Axes(data=4, experts=4, expert=2), Axes(data=2, tensor=2, experts=4), Axes(experts=4)),
)  # fmt: skip
"""Layouts of one model each: with one feed-forward a layer, and with experts."""


@pytest.mark.parametrize("layouts", GROUPS, ids=["dense", "experts"])
def test_weights_and_moments_move_from_any_layout_to_any_other(
    tmp_path: Path, train_all: TrainAll, layouts: tuple[Axes, ...]
) -> None:
    """Bit for bit: what all ranks together then hold is what torch alone reads in the files."""
    files = {axes: Result(tmp_path / str(axes)).checkpoint(LAST) for axes in layouts}
    moves = {(a, b): loaded(f"{a} under {b}", files[a], b) for a in layouts for b in layouts}
    sources = [Training(str(axes), axes, SAVE, 24) for axes in layouts]
    done = train_all(*sources, *moves.values(), deadline_s=DEADLINE_S)
    for (a, _), training in moves.items():
        assert_state_of(done[training.name], files[a])


def test_every_layout_gives_the_curve_of_one_process_over_fifty_steps(train_all: TrainAll) -> None:
    """Losses and norms to FP32 round-off; in a step whose norm hangs on the last bits, as near as one process is to itself when it
    sums in another order."""
    layouts = [
        Axes(data=2),
        Axes(data=3),
        Axes(data=4),
        Axes(data=2, tensor=2),
        Axes(data=2, tensor=2, sequence=True),
        Axes(data=3, tensor=2),
        Axes(data=2, pipeline=2),
        Axes(data=2, pipeline=2, virtual=2),
        Axes(data=2, tensor=2, pipeline=2, sequence=True),
    ]
    done = train_all(
        *(Training(str(axes), axes, FIFTY) for axes in (Axes(), *layouts) if axes.data != 4),
        *(Training(str(axes), axes, FIFTY, micro_batches=1) for axes in layouts if axes.data == 4),
        *(Training(f"{count} micro-batches", Axes(), FIFTY, micro_batches=count) for count in REORDERED),
        deadline_s=DEADLINE_S,
    )
    reordered = [done[f"{count} micro-batches"] for count in REORDERED]
    for axes in layouts:
        assert_same_curve(done[str(axes)], done[str(Axes())], norm=1e-6, reordered=reordered)


def test_gradients_accumulate_in_shards_under_every_layout(train_all: TrainAll) -> None:
    """The curve of whole gradients to round-off, FP32 and short; three ranks are a ring, four hold two replicas of two shards."""
    shard: dict[str, Any] = {"training_config.gradient_accumulation_shard": "true"}
    alone = {**shard, "parallel_config.optimizer_replicas": 1}
    tied = {"model_config.untie_embeddings_and_output_weights": "false"}
    dense = [
        (Axes(data=4), shard, 3), (Axes(data=3), shard, 4), (Axes(data=2), alone, 6), (Axes(data=2, tensor=2), alone, 2),
        (Axes(data=2, tensor=2, sequence=True), alone, 3), (Axes(data=2, pipeline=2), alone, 6),
        (Axes(data=2, pipeline=2, virtual=2), alone, 6), (Axes(data=2, tensor=2, pipeline=2, sequence=True), alone, 3),
    ]  # fmt: skip
    experts = [(Axes(data=4, experts=4, expert=2), shard, 3), (Axes(data=4, experts=4, expert=2), alone, 3)]
    every_expert: dict[str, Any] = {"model_config.num_experts_per_token": 4, "model_config.router_aux_loss_coef": 0}
    done = train_all(
        Training("whole", Axes(), tied),
        Training("experts whole", Axes(experts=4), every_expert),
        *(Training(f"{axes}", axes, {**tied, **keys}, micro_batches=count) for axes, keys, count in dense),
        *(
            Training(f"{number} {axes}", axes, {**every_expert, **keys}, micro_batches=count)
            for number, (axes, keys, count) in enumerate(experts)
        ),
        Training("bf16", Axes(data=4), {**PRECISIONS["bf16"], **shard}, micro_batches=3),
        Training("bf16 whole", Axes(data=4), PRECISIONS["bf16"], micro_batches=3),
        Training("again", Axes(data=4), {**tied, **shard}, micro_batches=3),
        deadline_s=DEADLINE_S,
    )
    for axes, _, _ in dense:
        assert_same_curve(done[str(axes)], done["whole"])
    for number, (axes, _, _) in enumerate(experts):
        assert_same_curve(done[f"{number} {axes}"], done["experts whole"])
    assert_same_curve(done["bf16"], done["bf16 whole"], loss=1e-2, norm=5e-2)
    assert_same_bits(done["again"], done[str(Axes(data=4))])


def test_experts_give_the_curve_of_one_process_over_fifty_steps(train_all: TrainAll) -> None:
    """With the micro-batches of all ranks in one, so that the balance of each is the same. Where each token goes to all experts the
    curves differ by round-off; where a router chooses, until round-off sends the first token another way."""
    ways: dict[str, dict[str, Any]] = {"all": {"model_config.num_experts_per_token": 4}, "chosen": {}}
    done = train_all(
        *(
            training
            for way, keys in ways.items()
            for training in (
                Training(f"{way} whole", Axes(experts=4), {**FIFTY, **keys}, micro_batches=4),
                Training(f"{way} halved", Axes(data=2, experts=4), {**FIFTY, **keys}, micro_batches=2),
                Training(f"{way} divided", Axes(data=4, experts=4, expert=2), {**FIFTY, **keys}, micro_batches=1),
                Training(f"{way} sliced", Axes(data=2, tensor=2, experts=4), {**FIFTY, **keys}, micro_batches=2),
            )
        ),
        deadline_s=DEADLINE_S,
    )
    for name in ("divided", "sliced"):
        reordered = [done["all halved"]]  # neither experts nor tensors are split: other sums, and nothing else
        assert_same_curve(done[f"all {name}"], done["all whole"], norm=1e-6, reordered=reordered, until=30)
        assert_same_curve(done[f"all {name}"], done["all whole"], norm=1e-6, reordered=reordered, outliers=2)
        assert_same_curve(done[f"chosen {name}"], done["chosen whole"], until=10)
        assert_same_curve(done[f"chosen {name}"], done["chosen whole"], loss=1e-3, norm=1e-2)
