"""The parts of the model that a rank has: its pipeline stages, split over the tensor axis.

Owns which layers go where, and the hash of all weights, wherever they lie.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ttp.errors import ConfigError

from ..config.encoder_decoder_config import EncoderDecoderConfig, check_encoder_decoder
from ..config.schema import Config
from ..model.encoder_decoder import EncoderDecoder
from ..model.experts import Experts
from ..model.gpt import GPT, PipelineStage, Transformer, built, stages, stages_that_stop_at
from .mesh import Axis, Mesh
from .recompute import prepare_blocks
from .tensor import divides_logits, split_over_tensor_ranks


def build_chunks(config: Config, mesh: Mesh, device: torch.device) -> list[Transformer]:
    """Return this rank's parts of the model, in the order of their layers. With virtual stages a rank has several: part i of
    rank r is stage i x ranks + r (Narayanan et al., Efficient Large-Scale Language Model Training, 2021, section 2.2).
    """
    parallel, model = config.parallel_config, config.model_config
    ranks, chunks = mesh.pipeline.size, parallel.virtual_pipeline_model_parallel_size or 1
    split = partial(
        _split, mesh=mesh, sequence_parallel=parallel.sequence_parallel, parallel_output=divides_logits(config)
    )
    cut = cut_of(config)
    here = experts_of(model.num_experts or 0, mesh.expert) if model.num_experts else None

    def make(stage: PipelineStage) -> Transformer:
        if isinstance(model, EncoderDecoderConfig):
            return EncoderDecoder(model, stage)
        return GPT(model, stage, here)

    own = [cut[chunk * ranks + mesh.pipeline.rank] for chunk in range(chunks)]
    built_chunks = [built(partial(make, stage), config.training_config.seed, device, split) for stage in own]
    prepare_blocks(built_chunks, model, config.training_config)
    return built_chunks


def cut_of(config: Config) -> tuple[PipelineStage, ...]:
    """Return the stages that the model is cut into."""
    model, parallel = config.model_config, config.parallel_config
    count = parallel.pipeline_model_parallel_size * (parallel.virtual_pipeline_model_parallel_size or 1)
    given = _given_stages(config)
    if count == 1 or given is None:
        return stages(model.num_layers, count)
    return stages_that_stop_at([sum(stage <= number for stage in given) for number in range(count)])


def _given_stages(config: Config) -> tuple[int, ...] | None:
    """Return the stage of each layer, where the user gave them."""
    model = config.model_config
    return model.layer_stages if isinstance(model, EncoderDecoderConfig) else None


def embedding_ranks(config: Config) -> list[int]:
    """Return the places on the pipeline's axis that have a tied embedding matrix."""
    model, cut, ranks = config.model_config, cut_of(config), config.parallel_config.pipeline_model_parallel_size
    found = {0, len(cut) - 1}
    if isinstance(model, EncoderDecoderConfig):
        found |= {i for i, stage in enumerate(cut) if stage.first_layer <= model.encoder_layers < stage.stop_layer}
    return sorted({number % ranks for number in found})


def experts_of(count: int, axis: Axis) -> range:
    """Return the numbers of the experts that a place on the experts' axis has."""
    each = count // axis.size
    return range(axis.rank * each, (axis.rank + 1) * each)


def _split(model: Transformer, mesh: Mesh, sequence_parallel: bool, parallel_output: bool) -> None:
    if mesh.expert.size > 1:
        for module in model.modules():
            if isinstance(module, Experts):
                module.group = mesh.expert.group
    if mesh.tensor_mesh is not None:
        split_over_tensor_ranks(model, mesh.tensor_mesh, sequence_parallel, parallel_output)


def check_stages(config: Config) -> None:
    """Raise ConfigError for experts, layers or micro-batches that the ranks of their axes cannot share."""
    ranks = config.parallel_config.pipeline_model_parallel_size
    chunks = config.parallel_config.virtual_pipeline_model_parallel_size or 1
    layers, micro_batches = config.model_config.num_layers, config.dataset_config.micro_batch_num
    experts, divided = config.model_config.num_experts, config.parallel_config.expert_model_parallel_size
    if divided > 1 and (experts is None or experts % divided):
        raise ConfigError(
            f"model_config.num_experts: got {experts}, expected a multiple of parallel_config.expert_model_parallel_size, {divided}"
        )
    if chunks > 1 and ranks == 1:
        raise ConfigError(
            f"parallel_config.virtual_pipeline_model_parallel_size: got {chunks} without a pipeline, expected null, or"
            " pipeline_model_parallel_size of 2 or more"
        )
    check_encoder_decoder(config)
    if layers < ranks * chunks and _given_stages(config) is None:
        raise ConfigError(
            f"model_config.num_layers: got {layers}, expected at least one layer for each of {ranks} x {chunks} pipeline stages"
        )
    if micro_batches < ranks:
        raise ConfigError(
            f"dataset_config.micro_batch_num: got {micro_batches}, expected at least one micro-batch for each of the pipeline's"
            f" {ranks} stages"
        )
    if ranks > 1 and chunks > 1 and micro_batches % ranks:
        raise ConfigError(
            f"dataset_config.micro_batch_num: got {micro_batches}, expected a multiple of the pipeline's {ranks} ranks, for an"
            " interleaved schedule"
        )


@torch.no_grad()
def hash_weights(chunks: Sequence[Transformer], mesh: Mesh) -> str:
    """Return a sha256 over the names, shapes and bits of all parameters, in name order, however they are split (all ranks of
    the job call where the model is split)."""
    mine = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            digest = hashlib.sha256(f"{name} {whole.dtype} {tuple(whole.shape)}\n".encode())
            digest.update(whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            mine[name] = digest.hexdigest()
    if mesh.splits_model:
        speaks = mesh.expert_data.is_first and mesh.tensor.is_first
        everyone: list[dict[str, str]] = [{}] * dist.get_world_size()
        dist.all_gather_object(everyone, mine if speaks else {})
        for theirs in everyone:
            mine |= theirs
    return hashlib.sha256("\n".join(f"{name} {mine[name]}" for name in sorted(mine)).encode()).hexdigest()
