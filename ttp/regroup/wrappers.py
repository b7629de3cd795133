"""What holds process groups inside a model or an optimizer: DDP's reducer, FSDP2's mesh information, and attributes.

Owns the ways to give each of them the groups that have taken the place of theirs. What a program keeps elsewhere is renewed by its own
`on_regroup`. Private names of torch: `tests/unit/groups` fails where another version has others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from ttp.groups.process_groups import Successor

_COUNTED_ANEW: WeakSet[Module] = WeakSet()


def count_anew(model: Module) -> None:
    """Whatever counts this model's batches begins its count anew when training is entered again."""
    _COUNTED_ANEW.add(model)


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


def why_not_replaced(model: Module) -> str:
    """Return why a process that begins anew could not take part in this model's passes; empty: it could."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel) and (why := _why_not_ddp(module)):
            return f"DistributedDataParallel with {why}"
    if why := _why_not_fsdp(model):
        return why
    if model not in _COUNTED_ANEW and _accelerate_is_used():
        return "accelerate counts batches by itself, outside of train()"
    return ""


def _why_not_ddp(ddp: Any) -> str:
    cases = (
        (ddp.static_graph, "static_graph=True"),
        (ddp.mixed_precision is not None, "mixed_precision"),
        (bool(ddp._comm_hooks) or bool(ddp._get_ddp_logging_data().get("comm_hook")), "a communication hook"),
        (bool(ddp._delay_all_reduce_params), "delay_all_reduce_named_params"),
        (ddp._use_python_reducer, "torch.compile's Python reducer"),
        (any(ddp._build_params_for_reducer()[1]), "sparse gradients"),
        (not ddp.require_backward_grad_sync, "require_backward_grad_sync=False behind a step"),
    )
    return next((why for applies, why in cases if applies), "")


def _why_not_fsdp(model: Module) -> str:
    """Of FSDP2, and of parameters that anything else has split over ranks."""
    if any(_is_fsdp(module) and not hasattr(module, "reset_iter_state") for module in model.modules()):
        return "fully_shard: this torch cannot leave a pass, it has no reset_iter_state"
    groups = [group for module in model.modules() for group in _fsdp_groups(module)]
    if any(group._all_reduce_hook is not None for group in groups):
        return "fully_shard with a hook of its all-reduces"
    if not all(group.reduce_grads and group.all_reduce_grads for group in groups):
        return "fully_shard with gradients that are not reduced behind a step"
    comms = [comm for group in groups for comm in (group._all_gather_comm, group._reduce_scatter_comm)]
    if any(not type(comm).__name__.startswith("Default") for comm in comms):
        return "fully_shard with collectives of its own"
    split = {id(each.sharded_param): group for group in groups for each in group.fsdp_params}
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            group = split.get(id(param))
            if group is None or group.mesh_info.mesh.ndim != param.device_mesh.ndim:
                return f"{name} is split over ranks by other means than fully_shard"
    return ""


def switches(model: Module) -> list[tuple[Any, str, Any]]:
    """Return what a trainer switches on a model for longer than a pass, as (holder, attribute, value)."""
    found: list[tuple[Any, str, Any]] = []
    for module in model.modules():
        found.append((module, "training", module.training))
        found += [(group, "reshard_after_backward", group.reshard_after_backward) for group in _fsdp_groups(module)]
    return found


def wrapper_around(model: Module) -> Module | None:
    """Return the DistributedDataParallel whose forward pass calls this model, if it is within one."""
    wrapper = DistributedDataParallel._active_ddp_module
    return wrapper if wrapper is not None and any(each is model for each in wrapper.modules()) else None


def leave_pass(model: Module) -> None:
    """An exception has ended a forward or backward pass. Gradients are synchronized again, and buffers sent in the next pass, as in a new process: a pass
    within no_sync(), or without gradients, leaves both off. What FSDP2 keeps of the pass goes: torch leaves gradients that were not reduced yet, which
    the next pass would count twice, and waits for a gather that nothing answers."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            module.require_backward_grad_sync = module.require_forward_param_sync = True
        for group in _fsdp_groups(module):
            group.reduce_grads = group.all_reduce_grads = True
            group._all_gather_result = None
            for param in group.fsdp_params:
                param.unsharded_accumulated_grad = None
                if hasattr(param, "_unsharded_param"):
                    param._unsharded_param.grad = None
    for module in model.modules():
        if hasattr(module, "reset_iter_state") and module._get_fsdp_state()._is_root:  # type: ignore[operator]
            module.reset_iter_state()  # type: ignore[operator]


def _accelerate_is_used() -> bool:
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    return state is not None and bool(state._shared_state)


def buckets(model: Module) -> list[list[list[int]]]:
    """Return how each DistributedDataParallel of a model has its parameters in buckets: their numbers, in the buckets' order. It forms them anew after its
    first step; sums over three ranks or more are rounded as the buckets lie."""
    return [_buckets_of(module) for module in model.modules() if isinstance(module, DistributedDataParallel)]


def take_buckets(model: Module, layouts: Sequence[Sequence[Sequence[int]]]) -> None:
    """Have each DistributedDataParallel, which has made no step yet, use the buckets of a rank that has made some. Raises ValueError: it has other
    parameters."""
    wrapped = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    for ddp, layout in zip(wrapped, layouts, strict=True):
        if layout != _buckets_of(ddp):
            _build_reducer(ddp, layout)


def _buckets_of(ddp: Any) -> list[list[int]]:
    params, _ = ddp._build_params_for_reducer()
    places = {id(param): place for place, param in enumerate(params)}
    return [
        [places[id(param)] for param in bucket.parameters()] for bucket in ddp.reducer._get_zeros_like_grad_buckets()
    ]


def _build_reducer(ddp: Any, layout: Sequence[Sequence[int]]) -> None:
    """Build the reducer as torch does, with other buckets than it would begin with (it reverses those that it computes)."""
    params, sparse = ddp._build_params_for_reducer()
    if sorted(place for bucket in layout for place in bucket) != list(range(len(params))):
        raise ValueError(f"buckets {layout}: expected each of {len(params)} parameters in one of them")
    reversed_buckets = [list(bucket) for bucket in reversed(layout)]
    names = ddp._build_debug_param_to_name_mapping(params)
    ddp.reducer._remove_autograd_hooks()
    assigned = reversed_buckets, [ddp.bucket_bytes_cap] * len(reversed_buckets)
    torchs_own: Any = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
    dist._compute_bucket_assignment_by_size = lambda *arguments: assigned  # type: ignore[attr-defined]
    try:
        ddp._ddp_init_helper(params, sparse, names, static_graph=False)
    finally:
        dist._compute_bucket_assignment_by_size = torchs_own  # type: ignore[attr-defined]


def _is_fsdp(module: Module) -> bool:
    return hasattr(module, "_get_fsdp_state")


def _fsdp_groups(module: Module) -> Sequence[Any]:
    """Return FSDP2's groups of a module's own parameters."""
    return getattr(module._get_fsdp_state(), "_fsdp_param_groups", ()) if _is_fsdp(module) else ()  # type: ignore[operator]


def _mesh_infos(module: Module) -> Iterator[Any]:
    """Yield what FSDP2 knows of the groups that a module's parameters are sharded over."""
    for group in _fsdp_groups(module):
        yield group.mesh_info
        if group.post_forward_mesh_info is not None:
            yield group.post_forward_mesh_info
