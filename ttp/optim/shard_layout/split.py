"""Parameters that are split over ranks by DTensor (tensor parallel): their local parts, and where those lie in the whole.

Owns every contact of the optimizer with DTensor. An ordinary parameter is its own local part.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Partial
from torch.nn import Parameter

from ttp.errors import LayoutError


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, detached."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def gradient_of(param: Parameter) -> torch.Tensor:
    """Return this rank's part of a parameter's gradient. Where the gradient is placed otherwise than the parameter (a sum that
    its ranks still have to build, above all) it is brought there: a collective of the ranks that share the parameter."""
    grad: Any = param.grad
    assert grad is not None, "a post-accumulate hook ran without a gradient"
    if not isinstance(param, DTensor):
        return cast(torch.Tensor, grad.detach())
    return cast(torch.Tensor, grad.detach().redistribute(placements=param.placements).to_local())


def put_local(param: Parameter, memory: torch.Tensor) -> None:
    """Make `memory`, of the local part's shape, the memory of a parameter, which keeps its identity."""
    if not isinstance(param, DTensor):
        param.data = memory
        return
    like: Any = DTensor.from_local(
        memory, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
    torch.utils.swap_tensors(param, Parameter(like))  # type: ignore[no-untyped-call]


def block_of(param: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (shape, offsets) of this rank's part in the whole parameter. Raises LayoutError for one that is not a block."""
    if any(isinstance(placement, Partial) for placement in param.placements):
        raise LayoutError(
            f"a parameter of shape {tuple(param.shape)}: got placements {param.placements}, expected shards and copies"
        )
    (chunk,) = param.__create_chunk_list__()  # type: ignore[no-untyped-call]  # what torch's own checkpoints ask a DTensor
    return tuple(chunk.sizes), tuple(chunk.offsets)


def is_first_copy(param: DTensor) -> bool:
    """True on the one rank among those with equal parts that counts and saves them."""
    place = param.device_mesh.get_coordinate()
    assert place is not None, "a parameter's rank is in its mesh"
    return all(index == 0 for index, at in zip(place, param.placements, strict=True) if at.is_replicate())


def sharing_of(param: Parameter) -> str:
    """Return the axes of a parameter's mesh on which other ranks have the same part; empty: none has."""
    if not isinstance(param, DTensor):
        return ""
    mesh = param.device_mesh
    alike = [axis for axis, at in enumerate(param.placements) if at.is_replicate() and mesh.size(axis) > 1]
    return ",".join(map(str, alike))
