"""How a model is divided: stages, slices, and what cannot be divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import loss_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.trainer.conftest import MakeConfig
from ttp.errors import ConfigError
from ttp.trainer.config.schema import ModelConfig, ParallelConfig
from ttp.trainer.model.gpt import build_model, stages, token_loss
from ttp.trainer.parallel.mesh import Axis, Mesh, build_mesh
from ttp.trainer.parallel.pipeline_stages import build_chunks, hash_weights
from ttp.trainer.parallel.tensor import check_divides, whole_loss
from ttp.trainer.plan.estimate import make_plan
from ttp.trainer.train import run
from ttp.trainer.world import World

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("layers", "count", "sizes"), [(4, 1, [4]), (4, 2, [2, 2]), (7, 3, [3, 2, 2]), (8, 3, [3, 3, 2]), (5, 5, [1] * 5)]
)
def test_layers_are_divided_evenly_and_in_order(layers: int, count: int, sizes: list[int]) -> None:
    """The first stages get the remainder; only the first takes tokens, only the last gives logits."""
    cut = stages(layers, count)
    assert [stage.stop_layer - stage.first_layer for stage in cut] == sizes
    assert [layer for stage in cut for layer in range(stage.first_layer, stage.stop_layer)] == list(range(layers))
    assert [stage.begins for stage in cut] == [True] + [False] * (count - 1)
    assert [stage.ends for stage in cut] == [False] * (count - 1) + [True]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_stages_one_after_the_other_are_the_model(small_model: ModelConfig, tied: bool, count: int) -> None:
    """The same names, the same initial weights, and the same logits, bit for bit."""
    config = replace(small_model, num_layers=3, untie_embeddings_and_output_weights=not tied)
    whole = build_model(config, 7, CPU).eval()
    parts = [build_model(config, 7, CPU, stage).eval() for stage in stages(3, count)]
    tokens_BT = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(5))
    x = tokens_BT
    for part in parts:
        x = part(x)
    assert torch.equal(x, whole(tokens_BT))
    of_parts = {name: param for part in parts for name, param in part.named_parameters()}
    assert of_parts.keys() == dict(whole.named_parameters()).keys()
    assert all(torch.equal(param, of_parts[name]) for name, param in whole.named_parameters())
    assert [part.has_tied_copy for part in parts] == [False] * (count - 1) + [tied]


@pytest.mark.parametrize(
    ("changes", "ranks", "expected"),
    [
        ({"num_attention_heads": 4, "num_query_groups": 1}, 2, "num_query_groups: got 1"),
        ({"num_attention_heads": 4, "num_query_groups": 4}, 8, "num_attention_heads: got 4"),
        ({"ffn_hidden_size": 63}, 2, "ffn_hidden_size: got 63"),
    ],
)
def test_what_tensor_parallel_ranks_cannot_share_is_refused_by_name(
    small_config: MakeConfig, changes: dict[str, Any], ranks: int, expected: str
) -> None:
    """With the size that it would have to be a multiple of."""
    keys = {f"model_config.{name}": value for name, value in changes.items()}
    config = small_config({**keys, "parallel_config.tensor_model_parallel_size": ranks})
    with pytest.raises(
        ConfigError, match=rf"model_config.{expected}, expected a multiple of .*tensor_model.*, {ranks}"
    ):
        check_divides(config)


def test_compiled_experts_that_tensor_ranks_share_are_refused(small_config: MakeConfig) -> None:
    """torch ends in an assertion there, or in wrong gradients; each alone is compiled."""
    keys = {"model_config.num_experts": 4, "training_config.compile": "true"}
    heads = {"model_config.num_attention_heads": 2, "model_config.num_query_groups": 2}
    shared = {**heads, "parallel_config.tensor_model_parallel_size": 2}
    with pytest.raises(
        ConfigError, match=r"compile is true with model_config.num_experts 4 and .*_size 2: .* expected compile: false"
    ):
        check_divides(small_config({**keys, **shared}))
    check_divides(small_config(keys))
    check_divides(small_config({**shared, "training_config.compile": "true"}))


def test_a_vocabulary_need_not_divide_but_every_rank_must_have_rows(small_config: MakeConfig) -> None:
    """GPT-2's 50,257 over 2 and 4 ranks; 257 over 32 are rows of 9, of which 29 ranks take all."""
    heads = {"model_config.num_attention_heads": 32, "model_config.num_query_groups": 32}
    sizes = {**heads, "model_config.hidden_size": 64}
    ranks = "parallel_config.tensor_model_parallel_size"
    for count in (2, 4):
        check_divides(small_config({**sizes, "model_config.vocab_size": 50257, ranks: count}))
    config = small_config({**sizes, "model_config.vocab_size": 257, ranks: 32})
    with pytest.raises(ConfigError, match=r"vocab_size is 257: 32 tensor-parallel ranks cut it into rows of 9"):
        check_divides(config)


@pytest.mark.parametrize(
    ("keys", "ranks", "expected"),
    [
        ({"model_config.num_layers": 2}, 4, "num_layers: got 2, expected at least one layer for each of 4 x 1"),
        ({}, 2, "micro_batch_num: got 1, expected at least one micro-batch for each of the pipeline's 2 stages"),
        ({"parallel_config.virtual_pipeline_model_parallel_size": 2}, 1, "without a pipeline"),
        (
            {
                "parallel_config.virtual_pipeline_model_parallel_size": 2,
                "model_config.num_layers": 4,
                "dataset_config.micro_batch_num": 3,
            },
            2,
            "micro_batch_num: got 3, expected a multiple of the pipeline's 2 ranks",
        ),
        ({"parallel_config.expert_model_parallel_size": 2}, 1, "num_experts: got None, expected a multiple of .*, 2"),
        (
            {"parallel_config.expert_model_parallel_size": 2, "model_config.num_experts": 5},
            1,
            "num_experts: got 5, expected a multiple of .*, 2",
        ),
    ],
)
def test_what_a_pipeline_or_experts_ranks_cannot_share_is_refused_at_once_and_by_a_plan(
    small_config: MakeConfig, keys: dict[str, Any], ranks: int, expected: str
) -> None:
    """Too few layers or micro-batches, virtual stages without stages, an interleaved schedule that is not filled, experts that are not
    there: before any process group is made."""
    config = small_config({**keys, "parallel_config.pipeline_model_parallel_size": ranks})
    with pytest.raises(ConfigError, match=expected):
        make_plan(config, 2 * ranks)
    with pytest.raises(ConfigError, match=expected):
        run(config, World(0, 2 * ranks, 0, launched=True))


def test_a_world_without_split_models_makes_no_groups() -> None:
    """Data parallel alone runs on the world's own group."""
    mesh = build_mesh(ParallelConfig(), 8, 3, "cpu")
    data = Axis(8, 3)
    assert mesh == Mesh(data=data, expert_data=data) and not mesh.splits_model


def test_the_hash_of_the_weights_does_not_depend_on_how_they_are_divided(small_config: MakeConfig) -> None:
    """Of one rank's chunks together it is that of the whole model."""
    config = small_config({"model_config.num_layers": 4})
    (whole,) = build_chunks(config, Mesh(), CPU)
    seed = config.training_config.seed
    parts = [build_model(config.model_config, seed, CPU, stage) for stage in stages(4, 2)]
    assert hash_weights(parts, Mesh()) == hash_weights([whole], Mesh())
    with torch.no_grad():
        next(parts[1].parameters()).view(-1)[0] += 1e-6
    assert hash_weights(parts, Mesh()) != hash_weights([whole], Mesh())


class Widths(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the last dimension of what this rank has of every tensor that an operator makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            local = getattr(tensor, "_local_tensor", tensor)
            if isinstance(local, torch.Tensor) and local.dim():
                self.seen.add(local.shape[-1])
        return made


def test_no_rank_ever_has_all_logits_unless_they_are_gathered(small_config: MakeConfig) -> None:
    """The cross entropy of a split vocabulary takes a rank's own columns, forward and backward: 131 of 261, by the first of two.
    CrossEntropyLoss takes all of them."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        keys = {"model_config.vocab_size": 261, "parallel_config.tensor_model_parallel_size": 2}
        config = small_config(keys)
        mesh = build_mesh(config.parallel_config, 2, 0, "cpu")
        (chunk,) = build_chunks(config, mesh, CPU)
        tokens_BT = torch.randint(131, (2, 16), generator=torch.Generator().manual_seed(5))
        with Widths() as widths, loss_parallel():
            torch.autograd.backward(whole_loss(token_loss(chunk(tokens_BT), tokens_BT)))
        assert 131 in widths.seen and 261 not in widths.seen
        gathered = {
            **keys,
            "training_config.loss_func_kwargs.loss_func_type": "CrossEntropyLoss",
        }
        (chunk,) = build_chunks(small_config(gathered), mesh, CPU)
        with Widths() as widths:
            torch.autograd.backward(token_loss(chunk(tokens_BT), tokens_BT))
        assert 261 in widths.seen
    finally:
        dist.destroy_process_group()
