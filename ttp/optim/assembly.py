"""Putting a replica optimizer together: check the parameters, lay their memory out in buckets, agree across ranks.

Owns what happens once, at construction. Never runs during a step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from ttp.config import host_name
from ttp.errors import ConfigError, LayoutError
from ttp.exchange.agreed import agree
from ttp.exchange.json_collectives import exchange_json
from ttp.groups.polled_wait import wait_for
from ttp.optim.collectives import BucketMemory
from ttp.optim.shard_layout.layout import Layout, ParamSpec
from ttp.optim.shard_layout.split import block_of, is_first_copy, local_of, put_local, sharing_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class NamedParam:
    name: str
    param: Parameter
    group: int
    process_group: Any = None
    """The data-parallel group of this parameter, where it is not the optimizer's."""
    counted: bool = True
    """False for a copy that another rank of the model counts and saves."""
    copied: bool = False
    """True on all ranks that have such a parameter, the one that counts it included."""


def mark_copied(
    named: Sequence[NamedParam], copies: Collection[str], model: Any, device: torch.device
) -> list[NamedParam]:
    """Return the parameters, those marked of which some rank of the model has a copy (a collective over `model`, the process group
    of the ranks that share it; None: this rank alone). Raises ConfigError for copies that no other rank can know."""
    if model is None:
        if copies:
            raise ConfigError(
                f"copies names {sorted(copies)} without a span, expected span=, the process group of all ranks that share the model"
            )
        return list(named)
    everywhere = set(agree("copied parameters", lambda: _all_of(exchange_json(sorted(copies), device, model)), model))
    return [replace(entry, copied=entry.name in everywhere) for entry in named]


def _all_of(gathered: Iterable[Iterable[str]]) -> list[str]:
    return sorted({name for names in gathered for name in names})


def named_groups(
    params: Iterable[tuple[str, Parameter]] | Iterable[dict[str, Any]], copies: Collection[str] = ()
) -> tuple[list[dict[str, Any]], list[NamedParam]]:
    """Return torch's param group dicts (parameters without names) and all parameters with names, in order.

    A dict's "process_group" is the data-parallel group of its parameters; it stays out of the param group. `copies`: names of
    parameters that another rank counts and saves. Raises ConfigError for what cannot be trained this way, naming the parameter.
    """
    given = list(params)
    if not given:
        raise ConfigError("the optimizer got no parameters; pass model.named_parameters()")
    raw: list[dict[str, Any]] = (
        [item for item in given if isinstance(item, dict)] if isinstance(given[0], dict) else [{"params": given}]
    )
    groups: list[dict[str, Any]] = []
    named: list[NamedParam] = []
    for index, group in enumerate(raw):
        members = [_pair(item) for item in group["params"]]
        settings = dict(group)
        process_group = settings.pop("process_group", None)
        named.extend(NamedParam(name, param, index, process_group, name not in copies) for name, param in members)
        groups.append({**settings, "params": [param for _, param in members]})
    if unknown := sorted(set(copies) - {entry.name for entry in named}):
        raise ConfigError(f"copies: got {unknown}, expected names of parameters of this optimizer")
    devices = {entry.param.device for entry in named}
    for entry in named:
        _check_param(entry)
    if len(devices) != 1:
        raise ConfigError(f"parameters: got devices {sorted(map(str, devices))}, expected one device")
    return groups, named


def specs(named: Sequence[NamedParam]) -> list[ParamSpec]:
    return [_spec(entry) for entry in named]


def _spec(entry: NamedParam) -> ParamSpec:
    dtype = str(entry.param.dtype).removeprefix("torch.")
    whole = tuple(entry.param.shape)
    shared = ("copies " if entry.copied else "") + sharing_of(entry.param)
    if not isinstance(entry.param, DTensor):
        return ParamSpec(entry.name, whole, entry.group, dtype, counted=entry.counted, shared=shared)
    shape, offsets = block_of(entry.param)
    counted = entry.counted and is_first_copy(entry.param)
    if shape == whole:
        return ParamSpec(entry.name, whole, entry.group, dtype, counted=counted, shared=shared)
    return ParamSpec(entry.name, shape, entry.group, dtype, whole, offsets, counted, shared)


def hosts_of(group: Any, world: int, device: torch.device) -> list[str] | None:
    """Return a name of each rank's machine, equal for ranks on the same one. Collective."""
    if group is None or world == 1:
        return None

    def gathered() -> list[str]:
        number = int(hashlib.sha256(host_name().encode()).hexdigest()[:15], 16)
        mine = torch.tensor([number], dtype=torch.int64, device=device)
        numbers = [torch.zeros_like(mine) for _ in range(world)]
        wait_for([dist.all_gather(numbers, mine, group=group, async_op=True)])
        return [f"{int(other.item()):015x}" for other in numbers]

    return list(agree("hosts", gathered, group))


def check_agreement(layout: Layout, group: Any, rank: int, device: torch.device) -> None:
    """Make sure that all ranks cut the same parameters the same way, before a mismatch can hang a collective.

    Collective. Raises LayoutError on every rank, naming the ranks that differ from rank 0.
    """
    if group is None or layout.world == 1:
        return
    mine = torch.tensor([int(layout.digest()[:15], 16)], dtype=torch.int64, device=device)
    digests = [torch.zeros_like(mine) for _ in range(layout.world)]
    wait_for([dist.all_gather(digests, mine, group=group, async_op=True)])
    different = [other for other, digest in enumerate(digests) if digest.item() != digests[0].item()]
    if different:
        raise LayoutError(
            f"rank {rank}: ranks {different} cut the optimizer state differently from rank 0; give every rank the same "
            f"parameters (names, shapes, dtypes, groups, order), replicas, bucket_bytes and hosts"
        )


@torch.no_grad()
def allocate(
    layout: Layout,
    rank: int,
    named: Sequence[NamedParam],
    grad_dtype: torch.dtype | None,
    group: Any,
    gradient_accumulation_shard: bool,
) -> list[BucketMemory]:
    """Move the parameters into contiguous buckets, with rank 0's values on every rank, and allocate the gradients.

    Collective. Parameters keep their identity and shape; their memory becomes a view of the bucket. With
    `gradient_accumulation_shard` gradients accumulate in shards, where there are several and no other rank of the model has copies of
    the parameters, which the caller has to sum whole.
    """
    held = layout.held(rank)
    memory = []
    for bucket in layout.buckets:
        dtype = getattr(torch, bucket.dtype)
        params = {index: named[index].param for index in bucket.params}
        device = params[bucket.params[0]].device
        flat = torch.zeros(bucket.numel, dtype=dtype, device=device)
        for index, offset in zip(bucket.params, bucket.offsets, strict=True):
            param = params[index]
            local = local_of(param)
            view = flat[offset : offset + local.numel()].view(local.shape)
            view.copy_(local)
            put_local(param, view)
        if group is not None and layout.world > 1:
            wait_for([dist.broadcast(flat, src=dist.get_global_rank(group, 0), group=group, async_op=True)])
        grads = torch.zeros(bucket.numel, dtype=grad_dtype or dtype, device=device)
        copied = any(named[index].copied for index in bucket.params)
        sharded = gradient_accumulation_shard and layout.shards > 1 and not copied
        apart = (len(held), bucket.shard_numel)
        slots = grads.view(layout.shards, -1)
        in_place = grads.dtype == torch.float32 and not sharded
        rows = [slots[shard] for shard in held] if in_place else torch.zeros(apart, device=device)
        memory.append(BucketMemory(flat, grads, tuple(rows), sharded))
    return memory


def _pair(item: object) -> tuple[str, Parameter]:
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], Parameter):
        return item[0], item[1]
    raise ConfigError(
        f"params: got a {type(item).__name__}, expected (name, parameter) pairs as of model.named_parameters(): the names "
        f"are the addresses of the state"
    )


def _check_param(entry: NamedParam) -> None:
    param = entry.param
    if not param.requires_grad or not param.is_leaf:
        raise ConfigError(f"parameter {entry.name!r} takes no gradient (frozen, or not a leaf); leave it out")
    if param.dtype not in _DTYPES:
        raise ConfigError(f"parameter {entry.name!r}: got {param.dtype}, expected float32, bfloat16 or float16")
