"""The process groups. This trainer knows data parallelism only; the loop is Megatron's."""

from __future__ import annotations

from typing import Any

import torch

_DATA_PARALLEL_GROUP: Any = None
_DATA_PARALLEL_GLOBAL_RANKS: list[int] | None = None


def initialize_model_parallel() -> None:
    global _DATA_PARALLEL_GROUP, _DATA_PARALLEL_GLOBAL_RANKS
    from minilink import get_ttp_switch  # TTP

    enable_ttp = get_ttp_switch()  # TTP
    if enable_ttp:  # TTP
        from ttp.mindio.modellink import build_optimizer_replica_group
    world_size = torch.distributed.get_world_size()
    model_parallel_size = 1
    for start in range(model_parallel_size):
        ranks = range(start, world_size, model_parallel_size)
        group = torch.distributed.new_group(ranks)
        if enable_ttp and len(ranks) % 2 == 0:  # TTP
            build_optimizer_replica_group(list(ranks))
        if torch.distributed.get_rank() in ranks:
            _DATA_PARALLEL_GROUP, _DATA_PARALLEL_GLOBAL_RANKS = group, list(ranks)


def get_data_parallel_group() -> Any:
    assert _DATA_PARALLEL_GROUP is not None, "Data parallel group is not initialized"
    return _DATA_PARALLEL_GROUP


def get_data_parallel_rank() -> int:
    return torch.distributed.get_rank(get_data_parallel_group())


def get_data_parallel_world_size() -> int:
    return torch.distributed.get_world_size(get_data_parallel_group())


def get_data_parallel_all_rank() -> list[int]:  # TTP
    assert _DATA_PARALLEL_GLOBAL_RANKS is not None, "Data parallel group is not initialized"
    return _DATA_PARALLEL_GLOBAL_RANKS
