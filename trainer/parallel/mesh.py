"""Where each rank stands on the axes of parallelism: pipeline stages, data-parallel replicas, experts, tensor-parallel slices.

Owns the order of ranks (tensor innermost, then pipeline, then data, with the experts' axis as its inner part) and the process
groups of the axes. Data is outermost, so that the replicas of a shard are as far apart as can be: a node that is lost takes one of
them. Frozen: the one object that says who shares what with whom.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..config.schema import ParallelConfig


@dataclass(frozen=True, slots=True)
class Axis:
    """The ranks that differ from this one on a single axis."""

    size: int = 1
    rank: int = 0
    group: Any = None
    """None: the whole world, or this rank alone."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def renewed(self, successor: Callable[[Any], Any]) -> Axis:
        """Return the same axis over the process group that has taken the place of its own."""
        return replace(self, group=successor(self.group))


@dataclass(frozen=True, slots=True)
class Mesh:
    data: Axis = field(default_factory=Axis)
    tensor: Axis = field(default_factory=Axis)
    pipeline: Axis = field(default_factory=Axis)
    expert: Axis = field(default_factory=Axis)
    """Neighbours on the data axis that have the experts among them."""
    expert_data: Axis = field(default_factory=Axis)
    """The ranks that have the same experts: `data`, where experts are not divided."""
    tensor_mesh: DeviceMesh | None = None
    """Of the ranks of `tensor`; None for one."""

    def renewed(self, successor: Callable[[Any], Any]) -> Mesh:
        """Return the same place with each axis over the process group that has taken the place of its own."""
        axes = {
            name: getattr(self, name).renewed(successor)
            for name in ("data", "tensor", "pipeline", "expert", "expert_data")
        }
        return replace(self, **axes)

    @property
    def splits_model(self) -> bool:
        """True when no rank has the whole model."""
        return self.tensor.size * self.pipeline.size * self.expert.size > 1

    @property
    def sizes(self) -> dict[str, int]:
        """The axes' sizes by the names of the configuration."""
        return {
            "data_parallel_size": self.data.size,
            "tensor_model_parallel_size": self.tensor.size,
            "pipeline_model_parallel_size": self.pipeline.size,
            "expert_model_parallel_size": self.expert.size,
        }


def build_mesh(parallel: ParallelConfig, world_size: int, rank: int, device_type: str) -> Mesh:
    """Return this rank's place (a collective of all ranks where the model is split). Raises ConfigError when the world is not
    the product of the axes."""
    dp = parallel.data_parallel_size(world_size)
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    ep = parallel.expert_model_parallel_size
    if tp * pp * ep == 1:
        data = Axis(dp, rank)
        return Mesh(data=data, expert_data=data)
    mesh = init_device_mesh(device_type, (dp, pp, tp), mesh_dim_names=("data", "pipeline", "tensor"))
    tensor_mesh = mesh["tensor"] if tp > 1 else None
    data, tensor, pipeline = _axis(mesh, "data"), _axis(mesh, "tensor"), _axis(mesh, "pipeline")
    if ep == 1:
        return Mesh(data, tensor, pipeline, expert_data=data, tensor_mesh=tensor_mesh)
    names = ("expert_data", "expert", "pipeline", "tensor")
    experts = init_device_mesh(device_type, (dp // ep, ep, pp, tp), mesh_dim_names=names)
    return Mesh(data, tensor, pipeline, _axis(experts, "expert"), _axis(experts, "expert_data"), tensor_mesh)


def _axis(mesh: DeviceMesh, name: str) -> Axis:
    own = mesh[name]
    return Axis(own.size(), own.get_local_rank(), own.get_group())
