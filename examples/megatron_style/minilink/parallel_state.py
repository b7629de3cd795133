"""The process groups of the axes: tensor innermost, then data, then pipeline, as Megatron orders ranks."""

from __future__ import annotations

from typing import Any

import torch

_DATA_PARALLEL_GROUP: Any = None
_DATA_PARALLEL_GLOBAL_RANKS: list[int] | None = None
_TENSOR_MODEL_PARALLEL_GROUP: Any = None
_PIPELINE_MODEL_PARALLEL_GROUP: Any = None
_PIPELINE_GLOBAL_RANKS: list[int] | None = None
_MODEL_PARALLEL_GROUP: Any = None
_EMBEDDING_GROUP: Any = None


def initialize_model_parallel(tensor_model_parallel_size: int = 1, pipeline_model_parallel_size: int = 1) -> None:
    global _DATA_PARALLEL_GROUP, _DATA_PARALLEL_GLOBAL_RANKS, _TENSOR_MODEL_PARALLEL_GROUP, _MODEL_PARALLEL_GROUP
    global _PIPELINE_MODEL_PARALLEL_GROUP, _PIPELINE_GLOBAL_RANKS, _EMBEDDING_GROUP
    from minilink import get_ttp_switch  # TTP

    enable_ttp = get_ttp_switch()  # TTP
    if enable_ttp:  # TTP
        from ttp.mindio.modellink import build_optimizer_replica_group
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    assert world_size % (tensor_model_parallel_size * pipeline_model_parallel_size) == 0, "ranks are left over"
    per_stage = world_size // pipeline_model_parallel_size
    data_parallel_ranks = []
    for i in range(pipeline_model_parallel_size):
        for j in range(tensor_model_parallel_size):
            ranks = range(i * per_stage + j, (i + 1) * per_stage, tensor_model_parallel_size)
            data_parallel_ranks.append(list(ranks))
            group = torch.distributed.new_group(ranks)
            if enable_ttp and len(ranks) % 2 == 0:  # TTP
                build_optimizer_replica_group(list(ranks))
            if rank in ranks:
                _DATA_PARALLEL_GROUP, _DATA_PARALLEL_GLOBAL_RANKS = group, list(ranks)
    for members in zip(*data_parallel_ranks, strict=True):
        group = torch.distributed.new_group(members)
        if rank in members:
            _MODEL_PARALLEL_GROUP = group
    for first in range(0, world_size, tensor_model_parallel_size):
        ranks = range(first, first + tensor_model_parallel_size)
        group = torch.distributed.new_group(ranks)
        if rank in ranks:
            _TENSOR_MODEL_PARALLEL_GROUP = group
    for first in range(per_stage):
        ranks = range(first, world_size, per_stage)
        group = torch.distributed.new_group(ranks)
        embedding = torch.distributed.new_group(sorted({ranks[0], ranks[-1]}))
        if rank in ranks:
            _PIPELINE_MODEL_PARALLEL_GROUP, _PIPELINE_GLOBAL_RANKS = group, list(ranks)
        if rank in (ranks[0], ranks[-1]):
            _EMBEDDING_GROUP = embedding


def get_data_parallel_group() -> Any:
    assert _DATA_PARALLEL_GROUP is not None, "Data parallel group is not initialized"
    return _DATA_PARALLEL_GROUP


def get_data_parallel_rank() -> int:
    return torch.distributed.get_rank(get_data_parallel_group())


def get_data_parallel_world_size() -> int:
    return torch.distributed.get_world_size(get_data_parallel_group())


def get_tensor_model_parallel_group() -> Any:
    return _TENSOR_MODEL_PARALLEL_GROUP


def get_tensor_model_parallel_rank() -> int:
    return torch.distributed.get_rank(_TENSOR_MODEL_PARALLEL_GROUP)


def get_tensor_model_parallel_world_size() -> int:
    return torch.distributed.get_world_size(_TENSOR_MODEL_PARALLEL_GROUP)


def get_pipeline_model_parallel_rank() -> int:
    return torch.distributed.get_rank(_PIPELINE_MODEL_PARALLEL_GROUP)


def get_pipeline_model_parallel_world_size() -> int:
    return torch.distributed.get_world_size(_PIPELINE_MODEL_PARALLEL_GROUP)


def get_pipeline_global_ranks() -> list[int]:
    assert _PIPELINE_GLOBAL_RANKS is not None, "Pipeline parallel group is not initialized"
    return _PIPELINE_GLOBAL_RANKS


def is_pipeline_first_stage() -> bool:
    return get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage() -> bool:
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


def get_model_parallel_group() -> Any:
    return _MODEL_PARALLEL_GROUP


def get_embedding_group() -> Any:
    return _EMBEDDING_GROUP


def model_parallel_is_initialized() -> bool:
    return _DATA_PARALLEL_GROUP is not None


def get_data_parallel_all_rank() -> list[int]:  # TTP
    assert _DATA_PARALLEL_GLOBAL_RANKS is not None, "Data parallel group is not initialized"
    return _DATA_PARALLEL_GLOBAL_RANKS
