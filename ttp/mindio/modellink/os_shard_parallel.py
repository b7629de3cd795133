"""The process groups of the replicas, as `mindio_ttp.modellink.os_shard_parallel` names them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ttp.errors import ConfigError
from ttp.mindio.job import ReplicaGroups, current_job, make_groups
from ttp.mindio.optimizer import TTPOddReplicaOptimizer


def build_optimizer_replica_group(ranks: Sequence[int]) -> None:
    """Declare one data-parallel group (every rank calls, for every group in the same order: a collective). Odd sizes may too;
    MindIO's patch for them does not, and with `TTPOddReplicaOptimizer` the group is then all ranks."""
    groups = make_groups(ranks)
    if groups is not None:
        current_job().declare(groups)


def set_parallel_state(parallel_state: Any) -> None:
    """Name the module (or object) with Megatron's `get_tensor_model_parallel_rank()` and so on, before the optimizer is built: only
    where the trainer's is not a module named `parallel_state` or `mpu`."""
    current_job().parallel_state = parallel_state


def get_dp_rank_list() -> list[int]:
    """Return the ranks of this rank's data-parallel group. Raises ConfigError before it was declared."""
    return list(_groups().dp_ranks)


def get_os_shard_group() -> Any:
    """Return the process group over which a sum counts every shard of the gradient once: half of the data-parallel
    ranks. The optimizer clips by itself; this is for sums of the trainer's own. Raises ConfigError before it was declared."""
    return _groups().shard_group


def _groups() -> ReplicaGroups:
    job = current_job()
    if (groups := job.groups) is not None:
        return groups
    if not isinstance(job.optimizer, TTPOddReplicaOptimizer):
        raise ConfigError(
            "no data-parallel group is known: call build_optimizer_replica_group(ranks) after new_group(ranks)"
        )
    place = job.optimizer.place
    return ReplicaGroups(tuple(place.data_ranks), dist.group.WORLD if place.data_group is None else place.data_group)
