"""What a run would need is printed without starting it, and agrees with what is built."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.unit.trainer.conftest import MakeConfig
from ttp.errors import ConfigError
from ttp.trainer.__main__ import main
from ttp.trainer.config.loader import load_config, presets
from ttp.trainer.config.schema import Config
from ttp.trainer.model.gpt import DTYPES, GPT, count_parameters, stages, token_loss
from ttp.trainer.plan.estimate import RunPlan, make_plan

LARGE = {
    "parallel_config.tensor_model_parallel_size": "2",
    "parallel_config.pipeline_model_parallel_size": "4",
    "dataset_config.micro_batch_num": "24",
    "training_config.recompute": "selective",
}
"""The usual large example: 32 devices, recomputation, and GPT-2's vocabulary, which tensor-parallel ranks share unevenly."""


def plan_of(preset: str, world_size: int, **changes: str) -> RunPlan:
    return make_plan(load_config(preset, list(changes.items())), world_size)


@pytest.mark.parametrize("preset", presets())
def test_every_preset_can_be_planned(preset: str) -> None:
    """On 64 devices; a rank has its share of the parameters and no more."""
    plan = plan_of(preset, 64)
    assert plan.parameters == count_parameters(load_config(preset).model_config)
    split = plan.axes["tensor"] * plan.axes["pipeline"] * plan.axes["expert"]
    assert plan.parameters / split <= plan.local_parameters < 1.6 * plan.parameters / split + 1e6
    assert plan.dump == 12 * plan.parameters and plan.memory > 0


def test_the_usual_large_example() -> None:
    """dp 4, tp 2, pp 4 on 32 devices with 24 micro-batches: a stage's parameters, halved, and all three kinds of traffic."""
    config = load_config("gpt2_13b", list(LARGE.items()))
    plan = make_plan(config, 32)
    assert plan.axes == {"data": 4, "tensor": 2, "pipeline": 4, "expert": 1}
    with torch.device("meta"):
        sizes = [
            sum(parameter.numel() for parameter in GPT(config.model_config, stage).parameters())
            for stage in stages(config.model_config.num_layers, 4)
        ]
    assert max(sizes) / 2 <= plan.local_parameters < 1.01 * max(sizes) / 2
    assert plan.weights == plan.gradients == 2 * plan.local_parameters
    assert plan.optimizer == plan.local_parameters * 16 * 2 // 4 and plan.copies == plan.optimizer // 2
    assert plan.data_parallel_wire and plan.tensor_wire and plan.pipeline_wire and not plan.expert_wire
    assert plan.apart and plan.nodes == 4
    more, less = (make_plan(replace_recompute(config, way), 32).activations for way in ("none", "full"))
    assert less < plan.activations < more


def replace_recompute(config: Config, way: Any) -> Config:
    return replace(config, training_config=replace(config.training_config, recompute=way))


@pytest.mark.parametrize(("world_size", "expected"), [(2, 1.0), (3, 1.0), (4, 1.0), (8, 1.0)])
def test_gradients_cost_what_theory_says(small_config: MakeConfig, world_size: int, expected: float) -> None:
    """With two replicas a rank sends each gradient once, whatever the size, and the parameters' shards once around."""
    plan = make_plan(small_config(), world_size)
    shards = world_size if world_size % 2 else world_size // 2
    nbytes = 4 * plan.local_parameters
    assert plan.data_parallel_wire == pytest.approx(nbytes * (expected + 1 - 1 / shards), abs=2)


def test_sequence_parallelism_saves_activations_and_replicas_cost_memory(small_config: MakeConfig) -> None:
    """And experts that are divided take less of each rank."""
    tensor = {"parallel_config.tensor_model_parallel_size": 2}
    plain = make_plan(small_config(tensor), 4)
    sequence = make_plan(small_config({**tensor, "parallel_config.sequence_parallel": True}), 4)
    assert sequence.activations < plain.activations and sequence.weights == plain.weights
    alone = make_plan(small_config({"parallel_config.optimizer_replicas": 1}), 4)
    assert alone.optimizer * 2 == make_plan(small_config(), 4).optimizer and alone.copies == 0 and not alone.apart
    experts = {"model_config.num_experts": 4}
    divided = make_plan(small_config({**experts, "parallel_config.expert_model_parallel_size": 2}), 4)
    assert divided.weights < make_plan(small_config(experts), 4).weights and divided.expert_wire


WIDE = {"model_config.hidden_size": 256, "model_config.seq_length": 64, "model_config.normalization": "LayerNorm"}
"""So that what a layer keeps counts; torch's RMSNorm keeps more on a CPU than the fused one of an accelerator."""


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"model_config.ffn_hidden_size": 512},
        {"model_config.num_query_groups": 1, "model_config.activation": "gelu", "model_config.use_bias": True},
        {"model_config.params_dtype": "bfloat16", "model_config.compute_dtype": "bfloat16"},
        {"model_config.compute_dtype": "bfloat16"},
        {"model_config.num_experts": 4, "model_config.num_experts_per_token": 3},
        {"model_config.num_experts": 2, "model_config.compute_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_activations_are_what_torch_keeps_for_backward(small_config: MakeConfig, keys: dict[str, Any]) -> None:
    """Whatever the shape, the experts and the types."""
    config = small_config({**WIDE, **keys})
    model = GPT(config.model_config).to(DTYPES[config.model_config.params_dtype])
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that no other gets its address
        return tensor

    tokens_BT = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(5))
    mixed = config.model_config.compute_dtype != config.model_config.params_dtype
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with autocast:
            logits_BTV = model(tokens_BT)
        token_loss(logits_BTV, tokens_BT)
    found = sum(storage.nbytes() for storage in kept.values())
    assert make_plan(config, 1).activations == pytest.approx(found, rel=0.08)


def test_an_interleaved_pipeline_keeps_more_micro_batches(small_config: MakeConfig) -> None:
    """Of two stages the first does three passes of half its layers before a backward where it did two of all; 1F1B two whole ones,
    however many there are."""
    keys = {"parallel_config.pipeline_model_parallel_size": 2, "model_config.num_layers": 4}
    virtual = "parallel_config.virtual_pipeline_model_parallel_size"
    two, eight = (small_config({**keys, "dataset_config.micro_batch_num": count}) for count in (2, 8))
    assert make_plan(two, 2).activations == make_plan(eight, 2).activations
    interleaved = small_config({**keys, virtual: 2, "dataset_config.micro_batch_num": 8})
    whole, more = make_plan(eight, 2).activations, make_plan(interleaved, 2).activations
    assert 1.1 * whole < more < 1.25 * whole


@pytest.mark.parametrize(("world_size", "shares", "masters"), [(1, 1, 0), (2, 2, 0), (3, 2, 1), (4, 2, 0)])
def test_parameters_in_fp32_need_no_masters_and_no_memory_for_reduced_gradients(
    small_config: MakeConfig, world_size: int, shares: int, masters: int
) -> None:
    """Moments alone, and in the ring the master of the second shard; a local copy has masters and moments; 16 bits need all."""
    plan = make_plan(small_config(), world_size)
    assert plan.optimizer == plan.local_parameters * (8 * shares + 4 * masters) // world_size
    assert plan.copies == plan.optimizer - plan.local_parameters * 8 // world_size
    copied = make_plan(small_config({"training_config.local_copy_os": True}), world_size)
    assert copied.optimizer == plan.local_parameters * (20 * shares + 4 * masters) // world_size
    types = {"model_config.params_dtype": "bfloat16", "model_config.compute_dtype": "bfloat16"}
    short = make_plan(small_config(types), world_size)
    assert short.optimizer == plan.local_parameters * 16 * shares // world_size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("world_size", "share", "row", "exchanged"), [(4, 2 / 4, 1 / 2, 1 / 2), (3, 2 / 3, 2 / 3, 1 / 3)]
)
def test_gradients_that_accumulate_in_shards_are_planned_beside_whole_ones(
    small_config: MakeConfig, dtype: str, world_size: int, share: float, row: float, exchanged: float
) -> None:
    """FP32 sums of the shards held, and one exchange of them a step: a row of ranks is summed for each of three micro-batches."""
    keys = {
        "model_config.params_dtype": dtype,
        "model_config.compute_dtype": dtype,
        "dataset_config.micro_batch_num": 3,
    }
    whole = make_plan(small_config(keys), world_size)
    shard = make_plan(small_config({**keys, "training_config.gradient_accumulation_shard": True}), world_size)
    size, count = DTYPES[dtype].itemsize, whole.local_parameters
    assert shard.data_parallel_wire == pytest.approx(count * (3 * row * size + exchanged * 4 + row * size), abs=2)
    accumulators = 4 * share * count if size == 4 else 0  # those of 16 bits are there anyway
    assert shard.gradients == pytest.approx(accumulators + count * size, abs=2), "a small model is one bucket"
    reported = (shard.gradients_otherwise, shard.data_parallel_wire_otherwise)
    assert reported == (whole.gradients, whole.data_parallel_wire)
    assert (whole.gradients_otherwise, whole.data_parallel_wire_otherwise) == (
        shard.gradients,
        shard.data_parallel_wire,
    )


def test_gradients_that_accumulate_in_shards_are_reported_in_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """With and without; where two ranks hold two replicas there is no second shard."""
    command = ["--config", "gpt2_13b", "--plan", "--training_config.gradient_accumulation_shard=true"]
    assert main([*command, "--dataset_config.micro_batch_num=4", "--world-size", "64"]) == 0
    output = capsys.readouterr().out
    assert len(re.findall(r"(gradients|data parallel) .*\(.*GiB without gradient_accumulation_shard\)", output)) == 2
    assert main([*command, "--world-size", "2"]) == 0
    assert capsys.readouterr().out.count("(gradient_accumulation_shard has no effect here)") == 2


def test_the_command_prints_it_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Every factor of the world, memory, wire, dump, and what is survived."""
    assert main(["--config", "gpt_70b", "--plan", "--world-size", "1024", "--disk-gb-per-s=2"]) == 0
    output = capsys.readouterr().out
    assert "1024: data 128 x tensor 8 x pipeline 1" in output and "68,976,648,192" in output
    assert re.search(r"dying gasp .* at 2 GB/s a rank", output)
    assert "any 1 of 1024 ranks, each of 128 nodes" in output


@pytest.mark.parametrize(
    ("limit", "expected"),
    [([], ": fits into 31GB"), (["--memory", "19GB"], ": does not fit into 19GB, 0.88 GiB too much")],
)
def test_the_documents_layout_is_explained(limit: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Data 4 x tensor 2 x pipeline 4 with 24 micro-batches: compared with a device's memory, and the pipeline's (4 - 1) / 24."""
    assert main(["--config", "gpt2_13b_mp2_pp4", "--plan", "--world-size", "32", *limit]) == 0
    output = capsys.readouterr().out
    assert "32: data 4 x tensor 2 x pipeline 4" in output and "every layer recomputed" in output
    assert f"memory a rank       19.88 GiB{expected}\n" in output and "pipeline bubble     12.5% of" in output


@pytest.mark.parametrize("keys", [{}, {"model_config.num_query_groups": 1}, {"model_config.num_experts": 4}], ids=str)
def test_operations_are_what_torch_counts(small_config: MakeConfig, keys: dict[str, Any]) -> None:
    """Of matrix products and attention, forward and backward, but for lookups in embeddings, which are counted as products."""
    config = small_config({**WIDE, **keys})
    model = GPT(config.model_config)
    tokens_BT = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(5))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        torch.autograd.backward(token_loss(model(tokens_BT), tokens_BT))
    plan = make_plan(config, 1)
    lookups = 6 * sum(p.numel() for name, p in model.named_parameters() if "embedding" in name) * tokens_BT.numel()
    assert plan.flops - lookups == pytest.approx(counter.get_total_flops(), rel=0.03)


@pytest.mark.parametrize(
    ("world_size", "expected"),
    [
        (
            8,
            "a death loses the steps since the last checkpoint (2 ranks hold each shard, but one rank alone holds those of an",
        ),
        (16, "any 1 of 16 ranks, each of 2 nodes (2 ranks hold each shard)"),
    ],
)
def test_experts_that_one_rank_has_alone_are_not_survived(
    world_size: int, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight experts over eight ranks: the others' replicas do not help."""
    assert main(["--config", "mixtral_8x7b", "--plan", "--world-size", str(world_size)]) == 0
    assert f"survived            {expected}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], "--world-size: missing, expected the number of ranks"),
        (["--world-size", "0"], "--world-size: got '0', expected an integer from 1"),
        (["--world-size", "ten"], "expected an integer from 1"),
        (["--world-size", "8", "--disk-gb-per-s", "nan"], "--disk-gb-per-s: got 'nan', expected a number from"),
        (["--world-size", "12"], "12 ranks are not tensor 8 x pipeline 1"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(args: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a size, with no number, and with a world that the axes do not make."""
    assert main(["--config", "gpt_70b", "--plan", *args]) == 2
    assert expected in capsys.readouterr().err


def test_one_world_is_refused_as_a_start_would(small_config: MakeConfig) -> None:
    """The same words as at a start."""
    with pytest.raises(ConfigError, match="expected a multiple of"):
        make_plan(small_config({"parallel_config.tensor_model_parallel_size": 8}), 8)
