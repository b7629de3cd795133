"""The encoder-decoder: its masks, its parts in a pipeline, and that it trains as a whole one however it is split over real ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.unit.trainer.conftest import MakeConfig, run_trainings
from tests.unit.trainer.layouts import (
    LAST,
    SAVE,
    Axes,
    Result,
    Training,
    assert_same_bits,
    assert_same_curve,
    assert_state_of,
)
from tests.unit.trainer.pairs import ENCODER, Pairs, with_encoder_decoder
from tests.unit.trainer.test_tensor_wire import Collectives
from ttp.errors import ConfigError
from ttp.trainer.config.encoder_decoder_config import EncoderDecoderConfig
from ttp.trainer.config.schema import Config
from ttp.trainer.model.encoder_decoder import BEGIN, PAD, EncoderDecoder, count_parameters
from ttp.trainer.model.gpt import UNCOUNTED, token_loss
from ttp.trainer.parallel.mesh import Axis, Mesh, build_mesh
from ttp.trainer.parallel.optimizer import build_optimizer
from ttp.trainer.parallel.pipeline_stages import build_chunks, check_stages, cut_of, embedding_ranks

CPU = torch.device("cpu")
TIED: dict[str, Any] = {"untie_embeddings_and_output_weights": False, "vocab_emb_dp": False}
EMBEDDINGS_APART: dict[str, Any] = {"layer_stages": (1, 1, 2, 2)}
"""Embeddings alone in the first of three stages, as the document's pipeline_func has them."""
MEMORY_PASSED_ON: dict[str, Any] = {"layer_stages": (1, 1, 2, 3)}
"""The same in four stages, of which the third decodes and gives the memory to the fourth."""
DROPOUT: dict[str, Any] = {
    "model_config.hidden_dropout": 0.1,
    "model_config.attention_dropout": 0.1,
    "training_config.training_iters": 2,
}
IN_SHARDS: dict[str, Any] = {
    "training_config.gradient_accumulation_shard": "true",
    "parallel_config.optimizer_replicas": 1,
}
TENSOR, PIPELINE = Axes(data=2, tensor=2), Axes(data=2, pipeline=2)


@pytest.fixture
def small(small_config: MakeConfig) -> Config:
    """Return a configuration of an encoder-decoder of 2 + 2 layers."""
    return with_encoder_decoder(small_config({"model_config.num_layers": 4}), {})[0]


def changed(config: Config, **keys: Any) -> Config:
    return dataclasses.replace(config, model_config=dataclasses.replace(config.model_config, **keys))


def loss_of(chunks: list[EncoderDecoder], source_BS: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """Run stages one after the other."""
    stream: Any = (source_BS,)
    for chunk in chunks:
        stream = chunk(*stream, **chunk.beside(source_BS, targets_BT))
        if not chunk.stage.ends:
            stream = stream if isinstance(stream, tuple) else (stream,)
            assert [tuple(x.shape) for x in stream] == chunk.passed_on(chunk.stage.stop_layer, len(source_BS))
    assert isinstance(stream, torch.Tensor)
    return token_loss(stream, targets_BT, "sum")


def build(config: Config) -> list[EncoderDecoder]:
    """Return all stages."""
    found = []
    for rank in range(config.parallel_config.pipeline_model_parallel_size):
        axis = Axis(config.parallel_config.pipeline_model_parallel_size, rank)
        (chunk,) = build_chunks(config, Mesh(pipeline=axis), CPU)
        assert isinstance(chunk, EncoderDecoder)
        found.append(chunk)
    return found


def in_stages(config: Config, count: int, **keys: Any) -> Config:
    parallel = dataclasses.replace(config.parallel_config, pipeline_model_parallel_size=count)
    data = dataclasses.replace(config.dataset_config, micro_batch_num=count)
    return changed(dataclasses.replace(config, parallel_config=parallel, dataset_config=data), **keys)


def test_padding_changes_nothing(small: Config) -> None:
    """More of it behind source and target gives the same loss and gradients; targets that are padding are not counted."""
    (model,) = build(small)
    source_BS, targets_BT = Pairs(small).batch(0, 4)
    ours, longer = [], changed(small, source_length=9, seq_length=20)
    for config in (small, longer):
        (model,) = build(config)
        more_source = torch.full((4, config.model_config.source_length - source_BS.shape[1]), PAD)  # type: ignore[attr-defined]
        more_target = torch.full((4, config.model_config.seq_length - targets_BT.shape[1]), UNCOUNTED)
        loss = loss_of([model], torch.cat((source_BS, more_source), 1), torch.cat((targets_BT, more_target), 1))
        torch.autograd.backward(loss)
        wq = model.blocks()[0].attention.wq.weight.grad
        assert wq is not None and float(wq.abs().max()) > 0
        ours.append((loss.detach(), wq))
    torch.testing.assert_close(ours[0], ours[1], rtol=1e-5, atol=1e-6)


def test_the_decoder_sees_no_later_target_and_all_of_the_source(small: Config) -> None:
    """Logits of a place change with every source token and with earlier targets, and with no later one."""
    (model,) = build(small)
    source_BS = torch.arange(3, 9)[None]
    targets_BT = torch.arange(20, 20 + small.model_config.seq_length)[None]

    def logits(source: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        given: torch.Tensor = model(source, **model.beside(source, targets))
        return given[0].detach()

    whole = logits(source_BS, targets_BT)
    other = targets_BT.clone()
    other[0, 5] += 1  # what is said at place 5 goes in at place 6
    same = (logits(source_BS, other) == whole).all(-1)
    assert same[:6].all() and not same[6:].any()
    for place in range(source_BS.shape[1]):
        other = source_BS.clone()
        other[0, place] += 50
        assert not (logits(other, targets_BT) == whole).all(-1).any(), place


def test_the_encoder_sees_the_source_both_ways(small: Config) -> None:
    """What it makes of any place changes with every token."""
    encoder = build(in_stages(small, 2))[0]
    source_BS, targets_BT = torch.arange(3, 9)[None], Pairs(small).batch(0, 1)[1]
    whole = encoder(source_BS, **encoder.beside(source_BS, targets_BT))
    for place in range(source_BS.shape[1]):
        other = source_BS.clone()
        other[0, place] += 50
        assert not (encoder(other, **encoder.beside(other, targets_BT)) == whole).all(-1).any(), place


def test_the_decoder_begins_with_begin_and_goes_on_with_what_is_to_be_said(small: Config) -> None:
    (model,) = build(small)
    beside = model.beside(torch.tensor([[7, 8, PAD]]), torch.tensor([[5, 6, UNCOUNTED, UNCOUNTED]]))
    assert beside["target_BT"].tolist() == [[BEGIN, 5, 6, PAD]]
    assert beside["present_BS"].tolist() == [[True, True, False]]


@pytest.mark.parametrize("keys", [{}, EMBEDDINGS_APART, TIED, {"layer_stages": (0, 0, 0, 1)}], ids=str)
def test_the_stages_of_a_pipeline_are_the_whole_model(small: Config, keys: dict[str, Any]) -> None:
    """The same loss and gradients, each parameter in one stage; tied embeddings in all that need them."""
    source_BS, targets_BT = Pairs(small).batch(0, 4)
    (whole,) = build(changed(small, **{name: value for name, value in keys.items() if name != "layer_stages"}))
    parts = build(in_stages(small, 3, **keys))
    losses = [loss_of(model, source_BS, targets_BT) for model in ([whole], parts)]
    for loss in losses:
        torch.autograd.backward(loss)
    assert torch.equal(*losses)
    gradients: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            assert parameter.grad is not None, name
            assert name not in gradients or name == "embedding.weight"
            gradients[name] = gradients[name] + parameter.grad if name in gradients else parameter.grad
    assert gradients.keys() == dict(whole.named_parameters()).keys()
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-6)
    model = whole.config
    assert count_parameters(model) == sum(parameter.numel() for parameter in whole.parameters())
    having = [place for place, part in enumerate(parts) if part.embedding is not None]
    assert having == (embedding_ranks(in_stages(small, 3, **keys)) if keys is TIED else [0])


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((0, 0, 2), "layer_stages"),
        ((0, 1, 0, 2), "pipeline stage of layer 2: got 0, expected at least 1"),
        ((0, 1, 2, 3), "pipeline stage of layer 3: got 3, expected 0 to 2"),
        ((0, 0, 2, 2), "pipeline stage 1: got no layer"),
    ],
)
def test_stages_that_cannot_be_are_refused(small: Config, stages: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_stages(in_stages(small, 3, layer_stages=stages))


def test_layers_are_divided_evenly_where_no_stage_is_given(small: Config) -> None:
    assert [stage.stop_layer for stage in cut_of(in_stages(small, 2))] == [ENCODER, 2 * ENCODER]
    assert isinstance(small.model_config, EncoderDecoderConfig) and small.model_config.layer_stages is None


def test_backward_computes_the_marked_layers_again_and_no_others(small: Config) -> None:
    (model,) = build(changed(small, recomputed_layers=(1, 2)))
    runs = [0, 0, 0, 0]

    def counted(number: int) -> Any:
        def count(*_: Any) -> None:
            runs[number] += 1

        return count

    for number, block in enumerate(model.blocks()):
        block.attention.register_forward_hook(counted(number))
    torch.autograd.backward(loss_of([model], *Pairs(small).batch(0, 2)))
    assert runs == [1, 2, 2, 1]


def training(name: str, axes: Axes, own: Mapping[str, Any] | None = None, **keys: Any) -> Training:
    return Training(name, axes, keys, encoder_decoder=own or {}, sequences=24, micro_batches=3)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Return the results of all trainings of this file, by name."""
    folder = tmp_path_factory.mktemp("encoder_decoder")
    loads: dict[str, Any] = {
        "training_config.resume": Result(folder / "pipeline").checkpoint(LAST),
        "training_config.training_iters": LAST,
    }
    trainings = [
        training("whole", Axes()),
        training("tied, whole", Axes(), TIED),
        training("tensor", TENSOR),
        training("pipeline", PIPELINE, **SAVE),
        training("tied", Axes(tensor=2, pipeline=2), TIED),
        dataclasses.replace(training("four stages", Axes(pipeline=4), MEMORY_PASSED_ON), micro_batches=4),
        training("in shards", PIPELINE, **IN_SHARDS),
        training("dropout", TENSOR, {"embedding_dropout": 0.1}, **DROPOUT),
        training("recomputed", TENSOR, {"embedding_dropout": 0.1, "recomputed_layers": (1, 2)}, **DROPOUT),
        dataclasses.replace(training("pipeline under tensor", Axes(tensor=2), **loads), keep_state=True),
    ]
    return run_trainings(folder, trainings)


@pytest.mark.long
@pytest.mark.parametrize("name", ["tensor", "pipeline", "four stages", "in shards"])
def test_a_split_encoder_decoder_trains_as_the_whole_one(done: dict[str, Result], name: str) -> None:
    """Losses and norms, of batches whose ranks and micro-batches have different numbers of tokens."""
    assert_same_curve(done[name], done["whole"])


@pytest.mark.long
def test_a_matrix_that_source_target_and_output_share_trains_alike(done: dict[str, Result]) -> None:
    """Two stages have it, each divided over two ranks."""
    assert_same_curve(done["tied"], done["tied, whole"])


@pytest.mark.long
def test_layers_that_are_recomputed_change_no_bit(done: dict[str, Result]) -> None:
    assert_same_bits(done["recomputed"], done["dropout"])


@pytest.mark.long
def test_its_state_moves_to_another_layout_bit_for_bit(done: dict[str, Result]) -> None:
    assert_state_of(done["pipeline under tensor"], done["pipeline"].checkpoint(LAST))
    assert done["pipeline under tensor"].weights == done["pipeline"].weights


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """The first of two ranks, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def over_two_ranks(small: Config, **keys: Any) -> tuple[Config, EncoderDecoder]:
    """Return the model of the first of two tensor-parallel ranks, with two groups of keys and values."""
    parallel = dataclasses.replace(small.parallel_config, tensor_model_parallel_size=2)
    config = changed(dataclasses.replace(small, parallel_config=parallel), **keys)
    (model,) = build_chunks(config, build_mesh(config.parallel_config, 2, 0, "cpu"), CPU)
    assert isinstance(model, EncoderDecoder)
    return config, model


@pytest.mark.parametrize("whole", [True, False])
def test_embeddings_are_whole_or_divided(small: Config, two_ranks: None, whole: bool) -> None:
    """With `vocab_emb_dp` a rank has all rows and sends nothing for them; without, half of them. All that is sent is the least: one
    reduction into and out of each attention and feed-forward, and one of the memory's gradient, whatever the layers that use it."""
    config, model = over_two_ranks(small, vocab_emb_dp=whole)
    for embedding in (model.embedding, model.target_embedding):
        assert embedding is not None and isinstance(embedding.weight, DTensor)
        assert embedding.weight.to_local().shape[0] == config.model_config.vocab_size // (1 if whole else 2)
    source_BS, targets_BT = Pairs(config).batch(0, 2)
    with loss_parallel(), Collectives() as sent:
        torch.autograd.backward(loss_of([model], source_BS, targets_BT))
    encoder, decoder, ends = 2 * 2 * 2 + 1, 2 * 3 * 2 + 1, 0 if whole else 1
    tokens = source_BS.numel() * (encoder + ends) + targets_BT.numel() * (decoder + ends)
    assert sent.nbytes["all_reduce"] == pytest.approx(tokens * 32 * 4, abs=targets_BT.numel() * 32)
    assert not sent.nbytes["all_gather_into_tensor"] and not sent.nbytes["reduce_scatter_tensor"]


def test_gradients_go_in_about_so_many_messages(small: Config, two_ranks: None) -> None:
    """Buckets of equal size, in the place of one for all of this small model."""
    counts = []
    for buckets in (None, 4):
        parallel = dataclasses.replace(small.parallel_config, gradient_buckets=buckets, optimizer_replicas=2)
        config = dataclasses.replace(small, parallel_config=parallel)
        mesh = build_mesh(parallel, 2, 0, "cpu")
        optimizer = build_optimizer(config, build_chunks(config, mesh, CPU), mesh, 2)
        counts.append(len(optimizer.layout.buckets))
    assert counts[0] <= 2 < counts[1] <= 7
