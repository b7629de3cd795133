"""What holds process groups inside a model or an optimizer: DDP's reducer, FSDP2's mesh information, and attributes.

Owns the ways to give each of them the groups that have taken the place of theirs. What a program keeps elsewhere is renewed by its own
`on_regroup`. Private names of torch: `tests/unit/groups` fails where another version has others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from ttp.groups.process_groups import Successor


def renew_model(model: Module, successor: Successor) -> None:
    """Have every module use the process groups in the place of those that it holds. No collective is under way."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            module._update_process_group(successor(module.process_group))  # type: ignore[no-untyped-call]
        for holder in (module, *_mesh_infos(module)):
            renew_attributes(holder, successor)


def renew_attributes(holder: object, successor: Successor) -> None:
    """Do so with the attributes of one object, such as an optimizer that divides its work over a group (ZeroRedundancyOptimizer)."""
    for name, value in list(vars(holder).items()):
        if isinstance(value, dist.ProcessGroup):
            setattr(holder, name, successor(value))


def _mesh_infos(module: Module) -> Iterator[Any]:
    """Yield what FSDP2 knows of the groups that a module's parameters are sharded over."""
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    for group in getattr(state, "_fsdp_param_groups", ()):
        yield group.mesh_info
        if group.post_forward_mesh_info is not None:
            yield group.post_forward_mesh_info
