"""What backward computes again is what the configuration says, and compiled blocks train as others do."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.trainer.conftest import TrainAll
from tests.unit.trainer.layouts import Axes, Training, assert_same_curve
from ttp.trainer.config.schema import ModelConfig, TrainingConfig
from ttp.trainer.model.gpt import GPT, build_model, token_loss
from ttp.trainer.parallel.recompute import prepare_blocks

CPU = torch.device("cpu")
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count[func.name().removeprefix("aten::").partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def built(config: ModelConfig, way: Any) -> GPT:
    model = build_model(config, 7, CPU)
    prepare_blocks([model], config, TrainingConfig(recompute=way))
    return model


def passes(model: GPT) -> tuple[Counter[str], Counter[str], int]:
    """Return the operators of forward and of backward, and the bytes that forward left for it (but what `selective` keeps)."""
    tokens_BT = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(5))
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), Operators() as forward:
        loss = token_loss(model(tokens_BT), tokens_BT)
    with Operators() as backward:
        torch.autograd.backward(loss)
    return forward.count, backward.count, sum(kept)


def test_full_recomputation_runs_each_block_again_and_keeps_its_input_only(small_model: ModelConfig) -> None:
    """Matrix products, attention and activation functions come back in backward."""
    forward, plain, bytes_plain = passes(built(small_model, "none"))
    _, full, bytes_full = passes(built(small_model, "full"))
    layers = small_model.num_layers
    assert forward["silu"] == layers and plain["silu"] == 0 and full["silu"] == layers
    assert plain[ATTENTION] == 0 and full[ATTENTION] == layers
    assert full["mm"] > plain["mm"]
    assert bytes_full < bytes_plain / 2


def test_selective_recomputation_runs_the_cheap_operators_again(small_model: ModelConfig) -> None:
    """No matrix product and no attention; but attention that draws random numbers, for the sake of the dropout behind it."""
    _, plain, _ = passes(built(small_model, "none"))
    _, selective, _ = passes(built(small_model, "selective"))
    assert selective["silu"] == small_model.num_layers
    assert selective["mm"] == plain["mm"] and selective[ATTENTION] == 0
    dropping = replace(small_model, attention_dropout=0.1)
    drawn = [name for name in ("bernoulli_", "native_dropout") if passes(built(dropping, "none"))[0][name]]
    assert drawn and all(passes(built(dropping, "selective"))[1][name] for name in drawn)


@pytest.mark.parametrize("way", ["full", "selective"])
def test_recomputation_changes_no_bit_of_a_gradient(small_model: ModelConfig, way: str) -> None:
    """With dropout in attention and in the stream: the same numbers are drawn again."""
    config = replace(small_model, hidden_dropout=0.1, attention_dropout=0.1)
    gradients = []
    for recompute in ("none", way):
        model = built(config, recompute)
        torch.manual_seed(3)
        passes(model)
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient is not None and torch.equal(gradient, gradients[1][name]), name  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler for the CPU"
)
def test_compiled_blocks_train_as_others_do(train_all: TrainAll) -> None:
    """To round-off: alone, split over tensor ranks, in a pipeline, with experts, and recomputed."""
    layouts = [Axes(), Axes(tensor=2), Axes(tensor=2, sequence=True), Axes(pipeline=2), Axes(experts=4)]
    compiled = {"training_config.compile": "true"}
    done = train_all(
        *(Training(f"eager {axes}", axes) for axes in layouts),
        *(Training(f"compiled {axes}", axes, compiled) for axes in layouts),
        Training("recomputed", Axes(), {**compiled, "training_config.recompute": "full"}),
        Training("partly recomputed", Axes(), {**compiled, "training_config.recompute": "selective"}),
        deadline_s=1100.0,
    )
    for axes in layouts:
        assert_same_curve(done[f"compiled {axes}"], done[f"eager {axes}"], loss=1e-5, norm=1e-4)
    for name in ("recomputed", "partly recomputed"):
        assert_same_curve(done[name], done[f"eager {Axes()}"], loss=1e-5, norm=1e-4)
