"""Models that are split over real ranks train as whole ones do, in every precision, and their state moves to any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.trainer.conftest import TrainAll
from tests.unit.trainer.layouts import Axes, Result, Training, read_by_torch

LAST = 6
SAVE: dict[str, Any] = {"training_config.save_interval": LAST}
STAY: dict[str, Any] = {"training_config.training_iters": LAST}
"""Resumed from its last step, a training has nothing to do."""


def assert_same_curve(ours: Result, theirs: Result, within: float) -> None:
    """The same losses and norms to round-off."""
    assert ours.lines.keys() == theirs.lines.keys() and ours.lines
    for step, line in ours.lines.items():
        for name in ("loss_value", "grad_norm_value"):
            assert line[name] == pytest.approx(theirs.lines[step][name], rel=within), (step, name)


def loaded(checkpoint: Path, axes: Axes, keys: dict[str, Any]) -> Training:
    """Return a training that loads a checkpoint of the last step under `axes` and does nothing more."""
    resume = {"training_config.resume": checkpoint}
    return Training(f"{checkpoint.parent.parent.name} under {axes}", axes, {**keys, **STAY, **resume}, keep_state=True)


def assert_state_of(result: Result, checkpoint: Path) -> None:
    """Masters and both moments of all ranks together have the bits that torch alone reads in the checkpoint."""
    wanted, found = read_by_torch(checkpoint), result.state
    assert found.keys() == wanted.keys() and any(key.endswith("exp_avg_sq") for key in found)
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key


def test_a_vocabulary_that_ranks_share_unevenly_trains_as_the_whole_one(tmp_path: Path, train_all: TrainAll) -> None:
    """257 token ids over two and four ranks, and as the matrix of both ends; a checkpoint goes from two to one to four ranks."""
    keys = {"model_config.vocab_size": 257, "model_config.num_query_groups": 4}
    tied = {**keys, "model_config.untie_embeddings_and_output_weights": "false"}
    two, one = (tmp_path / name / "checkpoints" / f"iter_{LAST:07d}" for name in ("two", "two under dp1tp1pp1"))
    under_one = loaded(two, Axes(), {**keys, **SAVE, "training_config.training_iters": LAST})
    done = train_all(
        Training("one", Axes(), keys),
        Training("two", Axes(tensor=2), {**keys, **SAVE}, keep_state=True),
        Training("four", Axes(tensor=4, sequence=True), keys),
        Training("tied", Axes(), tied),
        Training("tied over two", Axes(tensor=2, pipeline=2), tied),
        under_one,
        loaded(two, Axes(tensor=4), keys),
    )
    for name in ("two", "four"):
        assert_same_curve(done[name], done["one"], within=1e-5)
    assert_same_curve(done["tied over two"], done["tied"], within=1e-5)
    assert done["two"].state["model.embedding.weight"].shape == (257, 32)
    assert one != two
    for name in ("two", "two under dp1tp1pp1", "two under dp1tp4pp1"):
        assert_state_of(done[name], two)
        assert done[name].weights == done["two"].weights


def test_copies_of_a_parameter_keep_the_same_bits(train_all: TrainAll) -> None:
    """Norms of tensor-parallel ranks, and the embedding that the first and the last stage have: three data-parallel ranks may be
    summed in several orders, and `close` compares the copies."""
    keys = {"training_config.training_iters": 12, "model_config.untie_embeddings_and_output_weights": "false"}
    done = train_all(
        Training("tensor", Axes(data=3, tensor=2), keys),
        Training("pipeline", Axes(data=3, pipeline=2), keys),
    )
    assert all(len(result.lines) == 12 for result in done.values())


PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"model_config.params_dtype": "bfloat16", "model_config.compute_dtype": "bfloat16"},
    "bf16 by autocast": {"model_config.compute_dtype": "bfloat16"},
    "fp16": {
        "model_config.params_dtype": "float16", "model_config.compute_dtype": "float16",
        "training_config.loss_scale": 1024, "training_config.loss_scale_window": 3,
    },
    "fp16 by autocast": {
        "model_config.compute_dtype": "float16",
        "training_config.loss_scale": 1024, "training_config.loss_scale_window": 3,
    },
}  # fmt: skip
OVERFLOW = 3


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_trains_alike_under_every_axis(precision: str, train_all: TrainAll) -> None:
    """Against FP32, to the type's own precision; a pipeline changes no bit. With a loss scale one rank's overflow skips the step
    on all, whichever axis it is on, and halves the scale."""
    keys = PRECISIONS[precision]
    scaled = "training_config.loss_scale" in keys
    layouts = {
        "data": Axes(data=2),
        "pipeline": Axes(data=2, pipeline=2),
        "tensor": Axes(data=2, tensor=2),
        "sequence": Axes(data=2, tensor=2, sequence=True),
        "experts": Axes(data=2, experts=4, expert=2),
    }
    done = train_all(
        Training("FP32", Axes(data=2)),
        Training("FP32 experts", Axes(data=2, experts=4)),
        *(
            Training(name, axes, keys, overflow=(axes.ranks - 1, OVERFLOW) if scaled else None, keep_state=True)
            for name, axes in layouts.items()
        ),
    )
    assert done["pipeline"].bits == done["data"].bits and done["pipeline"].weights == done["data"].weights
    for name in layouts:
        lines, whole = done[name].lines, done["FP32 experts" if name == "experts" else "FP32"].lines
        assert [step for step, line in lines.items() if line["skipped"]] == ([OVERFLOW] if scaled else [])
        for step in range(1, OVERFLOW):
            assert lines[step]["loss_value"] == pytest.approx(whole[step]["loss_value"], rel=1e-2), (name, step)
            assert lines[step]["grad_norm_value"] == pytest.approx(whole[step]["grad_norm_value"], rel=5e-2)
        assert lines[LAST]["loss_value"] < lines[1]["loss_value"]
        if scaled:
            assert [lines[step]["loss_scale"] for step in sorted(lines)] == [1024, 1024, 1024, 512, 512, 512]
            assert lines[OVERFLOW]["grad_norm"] == "inf"
        assert all(value.dtype == torch.float32 for value in done[name].state.values())


def test_recomputed_activations_change_no_bit_under_any_axis(train_all: TrainAll) -> None:
    """Losses, norms and weights, with dropout everywhere, of blocks and of blocks with experts."""
    dropout = {"model_config.hidden_dropout": 0.1, "model_config.attention_dropout": 0.1}
    layouts = [
        Axes(data=2, tensor=2, sequence=True),
        Axes(data=2, tensor=2),
        Axes(data=2, pipeline=2, virtual=2),
        Axes(data=4, experts=4, expert=2),
    ]
    for keys in (dropout, {}):
        ways = ("none", "full", "selective")
        done = train_all(
            *(
                Training(f"{axes} {way} {len(keys)}", axes, {**keys, "training_config.recompute": way}, 8)
                for axes in layouts
                for way in ways
            )
        )
        for axes in layouts:
            plain, *others = (done[f"{axes} {way} {len(keys)}"] for way in ways)
            for other in others:
                assert other.bits == plain.bits and other.weights == plain.weights, (axes, keys)


GROUPS = (
    (Axes(data=4), Axes(data=2, tensor=2), Axes(data=2, pipeline=2), Axes(data=2, pipeline=2, virtual=2), Axes()),
    (Axes(data=4, experts=4, expert=2), Axes(data=2, tensor=2, experts=4), Axes(experts=4)),
)
"""Layouts of one model each: with one feed-forward a layer, and with experts."""


@pytest.mark.parametrize("layouts", GROUPS, ids=["dense", "experts"])
def test_weights_and_moments_move_to_any_other_layout_bit_for_bit(
    tmp_path: Path, train_all: TrainAll, layouts: tuple[Axes, ...]
) -> None:
    """From a checkpoint of each layout to each: what all ranks then hold is what torch alone reads in the files."""
    keys = {"training_config.save_interval": LAST}
    files = {axes: tmp_path / str(axes) / "checkpoints" / f"iter_{LAST:07d}" for axes in layouts}
    moves = {(a, b): loaded(files[a], b, {}) for a in layouts for b in layouts}
    done = train_all(*(Training(str(axes), axes, keys, 8) for axes in layouts), *moves.values())
    for (a, _), training in moves.items():
        assert_state_of(done[training.name], files[a])
