"""The state of a model and its torch optimizer where it lies: names, places in the whole, and who holds the same.

Owns every look into the user's model and optimizer. Reads their memory in place and never keeps a copy, buffers apart: a
forward pass changes those at any time, so those of the newest update and of the one in flight are kept beside them.

A tensor that is not a DTensor is whole on this rank. A DTensor is a block, known by its mesh and placements; ranks with equal
blocks are replicas of each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ttp.adopt.averages import Average, Averages
from ttp.checkpoint.format import tiling
from ttp.checkpoint.format.block import Block
from ttp.checkpoint.format.keys import model_key, optim_state_key
from ttp.checkpoint.format.types import HeldTensor
from ttp.errors import ConfigError, LayoutError
from ttp.exchange.agreed import agree
from ttp.exchange.json_collectives import exchange_json, world
from ttp.groups.polled_wait import wait_for
from ttp.optim.base_state import make_state
from ttp.optim.shard_layout.split import block_of, local_of
from ttp.optim.sums import mixed, sums_of
from ttp.proto.messages import ShardGroup

_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")
"""Parts of a name that torch's wrappers of a module add."""

_PARTITIONS = "ZeroRedundancyOptimizer"
_WHOLE = "whole"
PARTS = ("optimizer state of rank ", "shard ")
"""How places begin that an optimizer divides its state into."""


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor of the state: its key, and where its live memory is found."""

    key: str
    tensor: torch.Tensor
    owner: torch.Tensor
    """The parameter that it belongs to, or itself."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a tensor of the state lies in the whole."""

    place: str
    """How it is spread over ranks; empty: it is not counted here."""
    shape: tuple[int, ...]
    """Of the whole."""
    start: int = 0
    """The first element that is held, of the whole or of the block."""
    block: Block | None = None
    numel: int = 0
    """Elements that are held, when it was looked up."""


class AdoptedState:
    """What this rank has of the job's state."""

    def __init__(
        self, model: torch.nn.Module, optimizer: Optimizer, averages: Mapping[str, Average] | None = None
    ) -> None:
        """Give the optimizer its fresh state, so that it has the same keys at any step (a collective over WORLD: the ranks
        tell each other what they hold). Raises ConfigError for a model or optimizer that cannot be protected."""
        self._optimizer = optimizer
        self._updating = updating = updating_optimizer(optimizer)
        self.partitioned = updating is not optimizer
        """Each rank updates a part of the parameters, and sends them to the others within its step."""
        self._module = self._unwrapped(model)
        self._params = {clean_name(name): param for name, param in self._module.named_parameters()}
        self._names = self._find_names()
        """Of all that the optimizer updates, by id."""
        self._check_groups()
        _create(updating)
        self.device = computing_device(self._params.values())
        """Where this rank computes, and talks to other ranks: not where offloaded parameters are."""
        self._averages = Averages(averages or {}, self.device)
        self._known = [list(group["params"]) for group in optimizer.param_groups]
        """The parameters of each group, as they were registered."""
        self._buffer_names = self._persistent_buffers()
        """The module's own names of the buffers that are saved, by key."""
        self._kept = {key: _copy_of(self._module.get_buffer(name)) for key, name in self._buffer_names.items()}
        self._next = {key: _copy_of(buffer) for key, buffer in self._kept.items()}
        self._addresses: dict[str, Address] = {}
        """By key: looked up once, as DTensor computes its block anew each time, and ranks have agreed on them."""
        self._check_layout()
        self._tell_each_other()

    def _unwrapped(self, model: torch.nn.Module) -> torch.nn.Module:
        return unwrapped(model)

    def _find_names(self) -> dict[int, str]:
        return {id(param): name for name, param in self._params.items()}

    # --- what lies where ---

    def holdings(self) -> dict[str, list[HeldTensor]]:
        """Return views of everything that is counted here, by group id."""
        return {
            self._group_ids[place]: tensors for place, tensors in self._by_place().items() if place in self._group_ids
        }

    def targets(self) -> list[HeldTensor]:
        """Return views of all that a loader must fill."""
        return [self._held(entry) for entry in self._entries() if _local(entry.tensor).numel()]

    def shard_groups(self) -> tuple[ShardGroup, ...]:
        return tuple(
            ShardGroup(group, self._labels[group], tiling.nbytes_of(held)) for group, held in self.holdings().items()
        )

    def counts(self, param: torch.Tensor) -> bool:
        """Say whether this rank is the one, of those that hold the same of a parameter, that counts it."""
        return self._group_ids.get(_place(param)) in self._counted

    def bits(self) -> dict[str, int]:
        """Return a sum over the bits of each group: replicas have the same."""
        return {
            group: int(mixed(sums_of([tensor.values for tensor in held])))
            for group, held in self.holdings().items()
            if held
        }

    def check_unchanged(self) -> None:
        """Raise ConfigError when the optimizer has other parameters than at the start, or an average was changed by somebody else."""
        self._averages.check_untouched()
        groups = self._optimizer.param_groups
        name = type(self._optimizer).__name__
        if len(groups) != len(self._known):
            raise ConfigError(
                f"{name} has {len(groups)} param groups, it had {len(self._known)} when ttp.protect was called: add all groups"
                " before ttp.protect, with lr=0 or requires_grad=False as long as they are not trained (set by the step in every attempt)"
            )
        for index, (group, known) in enumerate(zip(groups, self._known, strict=True)):
            params = group["params"]
            if len(params) != len(known) or any(a is not b for a, b in zip(params, known, strict=True)):
                raise ConfigError(
                    f"param group {index} of {name} has {len(params)} parameters that are not the {len(known)} that it had when"
                    " ttp.protect was called: build the optimizer, and move the model to its device, before ttp.protect"
                )

    # --- a process in a lost one's place ---

    def memory(self) -> dict[str, torch.Tensor]:
        """Return all that belongs to a step on this rank, by key, flat: views of its live memory."""
        return {entry.key: _local(entry.tensor).detach().view(-1) for entry in self._entries()}

    # --- buffers ---

    def share_buffers(self) -> None:
        """Make rank 0's buffers everyone's: what DDP does before the next pass, done before the update (a collective).

        Raises ConfigError for a buffer that is no more what it was at the start."""
        live = self._live_buffers()
        _copy_all(self._next, live)
        if live and dist.is_initialized() and dist.get_world_size() > 1:
            flat = torch.cat([_bytes_of(buffer).to(self.device) for buffer in self._next.values()])
            wait_for([dist.broadcast(flat, src=0, async_op=True)])
            place = 0
            for buffer in self._next.values():
                size = buffer.numel() * buffer.element_size()
                _bytes_of(buffer).copy_(flat[place : place + size])
                place += size
            _copy_all(live, self._next)

    def updated(self, skipped: bool) -> None:
        """The update is done: the buffers that it saw are the state's, and its weights go into the averages (not after a step that
        was skipped)."""
        self._kept, self._next = self._next, self._kept
        if not skipped:
            self._averages.update(self._module)

    def loaded(self) -> None:
        """The kept buffers were filled: put them into the model."""
        self._averages.loaded()
        _copy_all(self._live_buffers(), self._kept)

    def step_back(self) -> None:
        """Give the model the buffers of the newest update again."""
        _copy_all(self._live_buffers(), self._kept)

    def _live_buffers(self) -> dict[str, torch.Tensor]:
        """Look the model's buffers up, at each use: a model may bind another tensor to a name."""
        return {key: self._live_buffer(name, self._kept[key]) for key, name in self._buffer_names.items()}

    def _live_buffer(self, name: str, kept: torch.Tensor) -> torch.Tensor:
        try:
            buffer = self._module.get_buffer(name)
        except AttributeError:
            buffer = None
        if buffer is None or (buffer.shape, buffer.dtype) != (kept.shape, kept.dtype):
            now = "is not there" if buffer is None else f"has shape {tuple(buffer.shape)} and {buffer.dtype}"
            raise ConfigError(
                f"buffer {name} {now}, expected shape {tuple(kept.shape)} and {kept.dtype}, as when ttp.protect was called; keep"
                " it as it is, or register it with persistent=False"
            )
        return _local(buffer)

    # --- inside ---

    def _check_groups(self) -> None:
        for index, group in enumerate(self._optimizer.param_groups):
            for param in group["params"]:
                if id(param) not in self._names:
                    raise ConfigError(
                        f"param group {index} of {type(self._optimizer).__name__} has a parameter of shape"
                        f" {tuple(param.shape)} that is not the model's, expected the model's parameters only; build the optimizer"
                        " after fully_shard and after the model is on its device"
                    )

    def _persistent_buffers(self) -> dict[str, str]:
        keys = {clean_name(key) for key in self._module.state_dict()}
        found = {clean_name(name): name for name, _ in self._module.named_buffers()}
        for name, buffer in self._module.named_buffers():
            if _place(buffer) != _WHOLE and clean_name(name) in keys:
                raise ConfigError(
                    f"buffer {name}: got one split over ranks ({_place(buffer)}), expected buffers that are whole on every rank;"
                    " register it with persistent=False, or make it a parameter"
                )
        return {key: name for key, name in found.items() if key in keys}

    def _entries(self) -> Iterator[Named]:
        for name, param in self._params.items():
            yield Named(model_key(name), param, param)
        for name, buffer in self._kept.items():
            yield Named(model_key(name), buffer, buffer)
        for key, tensor in self._averages.tensors().items():
            yield Named(key, tensor, tensor)
        for group in self._updating.param_groups:
            for param in group["params"]:
                for key, value in self._updating.state[param].items():
                    if value is not None:
                        yield Named(optim_state_key(self._names[id(param)], key), value, param)

    @torch.no_grad()
    def _by_place(self) -> dict[str, list[HeldTensor]]:
        """Group what is counted here."""
        places: dict[str, list[HeldTensor]] = {}
        for entry in self._entries():
            if place := self._address(entry).place:
                places.setdefault(place, []).append(self._held(entry))
        return places

    def _held(self, entry: Named) -> HeldTensor:
        address = self._address(entry)
        if _local(entry.tensor).numel() != address.numel:
            raise ConfigError(
                f"{entry.key}: got {_local(entry.tensor).numel()} elements, expected {address.numel}, as when ttp.protect was called: give parameters"
                " and optimizer state their layout before"
            )
        return HeldTensor(entry.key, address.shape, address.start, _local(entry.tensor).view(-1), address.block)

    def _address(self, entry: Named) -> Address:
        if entry.key not in self._addresses:
            found = self._find_address(entry)
            self._addresses[entry.key] = replace(found, numel=_local(entry.tensor).numel())
        return self._addresses[entry.key]

    def _find_address(self, entry: Named) -> Address:
        block = None
        if isinstance(entry.tensor, DTensor):
            sizes, offsets = block_of(entry.tensor)
            block = None if tuple(sizes) == tuple(entry.tensor.shape) else Block(offsets, sizes)
        return Address(self._counted_at(entry), tuple(entry.tensor.shape), block=block)

    def _counted_at(self, entry: Named) -> str:
        """Return the place that a tensor is counted at, empty for none: a number that belongs to a parameter goes with the block that has its
        first element."""
        if not _local(entry.owner).numel() and entry.owner.numel():
            return ""  # a block of nothing: fewer rows than ranks
        is_number = entry.tensor is not entry.owner and not isinstance(entry.tensor, DTensor)
        if is_number and isinstance(entry.owner, DTensor) and any(block_of(entry.owner)[1]):
            return ""
        own = self.partitioned and entry.tensor is not entry.owner
        return f"{PARTS[0]}{world()[0]}" if own else _place(entry.owner)

    def _check_layout(self) -> None:
        for entry in self._entries():
            if not torch.is_tensor(entry.tensor):
                raise ConfigError(
                    f"{entry.key}: got a {type(entry.tensor).__name__}, expected an optimizer whose state is tensors, as torch's are"
                )
            if not _local(entry.tensor).is_contiguous():
                raise ConfigError(
                    f"{entry.key} of shape {tuple(entry.tensor.shape)} does not lie in memory row by row (channels_last?):"
                    " expected contiguous parameters; call model.to(memory_format=torch.contiguous_format)"
                )
            if isinstance(entry.owner, DTensor) and entry.tensor.dim() and entry.tensor.shape != entry.owner.shape:
                raise LayoutError(
                    f"{entry.key} has shape {tuple(entry.tensor.shape)} and its parameter {tuple(entry.owner.shape)}: the state"
                    " of a parameter that is split over ranks must be split alike; use an element-wise optimizer (AdamW, SGD)"
                )

    def _tell_each_other(self) -> None:
        """Learn the whole job's tensors, and who holds the same as this rank (a collective over WORLD)."""
        held = self._by_place()
        self._group_ids = {place: tiling.address_hash(tensors) for place, tensors in held.items()}
        shapes = {entry.key: list(self._address(entry).shape) for entry in self._entries()}
        names = [[self._names[id(p)] for p in group["params"]] for group in self._optimizer.param_groups]
        mine = [sorted(self._group_ids.values()), shapes, names]
        gathered = agree("what ranks hold", lambda: exchange_json(mine, self.device))
        rank, size = world()
        held_by = [groups for groups, _, _ in gathered]
        self.twins = [[other for other in range(size) if held_by[other] == held_by[each]] for each in range(size)]
        """By rank: those that hold the same as it, itself too."""
        self._counted = {
            group
            for group in self._group_ids.values()
            if next(other for other, (groups, _, _) in enumerate(gathered) if group in groups) == rank
        }
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Key and whole shape of every tensor of the job's state."""
        self.group_names: list[list[str]] = [[] for _ in names]
        """The names of all parameters by param group."""
        for _, other_shapes, other_names in gathered:
            self.shapes |= {key: tuple(shape) for key, shape in other_shapes.items()}
            for known, others in zip(self.group_names, other_names, strict=True):
                known += [name for name in others if name not in known]
        self._labels = {self._group_ids[place]: _label(place, tensors) for place, tensors in held.items()}


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module within DDP, DataParallel and torch.compile. Raises ConfigError for FSDP1, whose parameters have lost their
    shapes."""
    while True:
        if isinstance(model, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), torch.nn.Module):
            model = inner
        else:
            break
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ConfigError(
            "the model, or a part of it, is wrapped in FullyShardedDataParallel, which flattens its parameters: use"
            " torch.distributed.fsdp.fully_shard, which keeps them"
        )
    return model


def computing_device(params: Iterable[torch.Tensor]) -> torch.device:
    """Return the device of forward passes: the accelerator of the first parameter that has one, else the CPU. An offloaded parameter of
    fully_shard is on the CPU, and its mesh on the accelerator."""
    for param in params:
        here = local_of(param).device
        kind = param.device_mesh.device_type if isinstance(param, DTensor) else here.type
        if kind != "cpu":
            return here if here.type == kind else torch.device(kind, torch.get_device_module(kind).current_device())
    return torch.device("cpu")


def clean_name(name: str) -> str:
    """Return a parameter's name as the unwrapped model has it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def parameters_of(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the model's parameters with their names, which no wrapper changes."""
    return [(clean_name(name).removeprefix("module."), param) for name, param in model.named_parameters()]


def _create(optimizer: Optimizer) -> None:
    """Create the state that parameters have not got yet, as the optimizer's first step would; all else stays what it is."""
    groups = optimizer.param_groups
    missing = [[param for param in group["params"] if _is_fresh(optimizer, param)] for group in groups]
    params = [param for lacking in missing for param in lacking]
    before = [param.grad for param in params]
    for param in params:
        param.grad = torch.zeros_like(param)
    # Copies of the groups: an optimizer that is not known makes a step on them, and may count it there.
    optimizer.param_groups = [
        {**group, "params": lacking} for group, lacking in zip(groups, missing, strict=True) if lacking
    ]
    try:
        if params:
            make_state(optimizer)
    finally:
        optimizer.param_groups = groups
        for param, grad in zip(params, before, strict=True):
            param.grad = grad


def _is_fresh(optimizer: Optimizer, param: torch.Tensor) -> bool:
    state = optimizer.state.get(param, {})
    return all(value is None for value in state.values())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_of(tensor)


def _place(tensor: torch.Tensor) -> str:
    """Say how a tensor is spread over ranks."""
    if not isinstance(tensor, DTensor) or all(at.is_replicate() for at in tensor.placements):
        return _WHOLE
    return f"{tensor.device_mesh.mesh_dim_names}{tuple(tensor.device_mesh.shape)} {tensor.placements}"


def _label(place: str, tensors: Sequence[HeldTensor]) -> str:
    """`all: embed.weight and 10 more` or `rows 0-127 of embed.weight and 10 more`, for people."""
    first = tensors[0]
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    if place.startswith(PARTS):
        return f"{place}: {first.key}{more}"
    if place == _WHOLE or first.block is None:
        return f"whole state: {first.key}{more}"
    at = ", ".join(f"{o}:{o + n}" for o, n in zip(first.block.offsets, first.block.sizes, strict=True))
    return f"shard [{at}]: {first.key}{more}"


def _copy_of(buffer: torch.Tensor) -> torch.Tensor:
    return _local(buffer).detach().clone(memory_format=torch.contiguous_format)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _copy_all(into: Mapping[str, torch.Tensor], source: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in into.items():
            tensor.copy_(source[name])


def updating_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that updates this rank's part of the parameters: within ZeroRedundancyOptimizer another one, else itself."""
    return optimizer.optim if type(optimizer).__name__ == _PARTITIONS else optimizer


def check_optimizer(optimizer: Any, split: bool, copied: bool = False) -> None:
    """Raise ConfigError for an optimizer whose update is not local maths on state that can be read in place. `copied`: the job has copies in
    memory, so that no rank has to finish another one's update."""
    name = type(optimizer).__name__
    if any(base.__name__ == "DeepSpeedOptimizer" for base in type(optimizer).__mro__):  # not a torch.optim.Optimizer
        raise ConfigError(
            f"{name} of DeepSpeed communicates within its step and keeps each part of the state on one rank only: use"
            " ttp.TTPReplicaOptimizer, which is ZeRO-1 with each part on two ranks, or torch's fully_shard with ttp.protect(copies='memory')"
        )
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"the optimizer: got a {name}, expected a torch.optim.Optimizer")
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise ConfigError(
            f"{name} wraps another optimizer and has no hooks of its own: give ttp.protect the optimizer within (accelerate's"
            " has it as .optimizer)"
        )
    if name in ("LBFGS", "SparseAdam"):
        raise ConfigError(
            f"{name} cannot be protected: its update is not local maths on dense gradients, which another thread could finish;"
            " use AdamW, SGD, Adafactor or another of torch's"
        )
    if name == _PARTITIONS and not (copied and hasattr(updating_optimizer(optimizer), "state")):
        raise ConfigError(
            f"{name} sends parameters within its step and keeps each part of the state on one rank only: give ttp.protect"
            " copies='memory' (without overlap_with_ddp), or use ttp.TTPReplicaOptimizer, which keeps it on two"
        )
    if split and name in ("Adafactor", "Muon"):
        raise ConfigError(
            f"{name} communicates while it updates parameters that are split over ranks, expected an update without collectives;"
            " use AdamW, SGD or another element-wise optimizer"
        )
