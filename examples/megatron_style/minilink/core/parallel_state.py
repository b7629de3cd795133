"""The process groups of the axes: tensor innermost, then data, then pipeline, as Megatron orders ranks. Experts are spread over the data axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

_DATA_PARALLEL_GROUP: Any = None
_DATA_PARALLEL_GLOBAL_RANKS: list[int] | None = None
_DATA_MODULO_EXPERT_PARALLEL_GROUP: Any = None
_EXPERT_MODEL_PARALLEL_GROUP: Any = None
_TENSOR_MODEL_PARALLEL_GROUP: Any = None
_PIPELINE_MODEL_PARALLEL_GROUP: Any = None
_PIPELINE_GLOBAL_RANKS: list[int] | None = None
_MODEL_PARALLEL_GROUP: Any = None
_EMBEDDING_GROUP: Any = None


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1, pipeline_model_parallel_size: int = 1, expert_model_parallel_size: int = 1
) -> None:
    global _DATA_PARALLEL_GROUP, _DATA_PARALLEL_GLOBAL_RANKS, _TENSOR_MODEL_PARALLEL_GROUP, _MODEL_PARALLEL_GROUP
    global _PIPELINE_MODEL_PARALLEL_GROUP, _PIPELINE_GLOBAL_RANKS, _EMBEDDING_GROUP
    global _DATA_MODULO_EXPERT_PARALLEL_GROUP, _EXPERT_MODEL_PARALLEL_GROUP
    from minilink import get_ttp_switch  # TTP

    enable_ttp = get_ttp_switch()  # TTP
    if enable_ttp:  # TTP
        from ttp.mindio.modellink import build_optimizer_replica_group
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    assert world_size % (tensor_model_parallel_size * pipeline_model_parallel_size) == 0, "some ranks have no group"
    per_stage = world_size // pipeline_model_parallel_size
    assert per_stage // tensor_model_parallel_size % expert_model_parallel_size == 0, (
        "some data-parallel ranks have no group"
    )
    data_parallel_ranks = []
    for i in range(pipeline_model_parallel_size):
        for j in range(tensor_model_parallel_size):
            ranks = range(i * per_stage + j, (i + 1) * per_stage, tensor_model_parallel_size)
            data_parallel_ranks.append(list(ranks))
            group = torch.distributed.new_group(ranks)
            if enable_ttp:  # TTP
                build_optimizer_replica_group(list(ranks))
            if rank in ranks:
                _DATA_PARALLEL_GROUP, _DATA_PARALLEL_GLOBAL_RANKS = group, list(ranks)
    size = expert_model_parallel_size
    if size > 1:
        _DATA_MODULO_EXPERT_PARALLEL_GROUP = _own_group(
            members[first::size] for members in data_parallel_ranks for first in range(size)
        )
        _EXPERT_MODEL_PARALLEL_GROUP = _own_group(
            members[first : first + size] for members in data_parallel_ranks for first in range(0, len(members), size)
        )
    _MODEL_PARALLEL_GROUP = _own_group(zip(*data_parallel_ranks, strict=True))
    width = tensor_model_parallel_size
    _TENSOR_MODEL_PARALLEL_GROUP = _own_group(range(first, first + width) for first in range(0, world_size, width))
    pipelines = [range(first, world_size, per_stage) for first in range(per_stage)]
    _PIPELINE_MODEL_PARALLEL_GROUP = _own_group(pipelines)
    _PIPELINE_GLOBAL_RANKS = next(list(members) for members in pipelines if rank in members)
    _EMBEDDING_GROUP = _own_group(sorted({members[0], members[-1]}) for members in pipelines)


def _own_group(groups: Iterable[Sequence[int]]) -> Any:
    """Make all of these groups (every rank calls); return the one that this rank is in, if any."""
    found, rank = None, torch.distributed.get_rank()
    for ranks in groups:
        group = torch.distributed.new_group(ranks)
        if rank in ranks:
            found = group
    return found


def get_data_parallel_group() -> Any:
    assert _DATA_PARALLEL_GROUP is not None, "Data parallel group is not initialized"
    return _DATA_PARALLEL_GROUP


def get_data_parallel_rank() -> int:
    return torch.distributed.get_rank(get_data_parallel_group())


def get_data_parallel_world_size() -> int:
    return torch.distributed.get_world_size(get_data_parallel_group())


def get_data_modulo_expert_parallel_group() -> Any:
    """The data-parallel ranks that have the same experts."""
    return _DATA_MODULO_EXPERT_PARALLEL_GROUP


def get_expert_model_parallel_group() -> Any:
    """The data-parallel ranks that have all experts together."""
    return _EXPERT_MODEL_PARALLEL_GROUP


def get_expert_model_parallel_rank() -> int:
    return get_data_parallel_rank() % get_expert_model_parallel_world_size()


def get_expert_model_parallel_world_size() -> int:
    group = _EXPERT_MODEL_PARALLEL_GROUP
    return 1 if group is None else torch.distributed.get_world_size(group)


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
