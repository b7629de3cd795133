"""The trainer's model parallelism, as its module `parallel_state` (Megatron's name for it) reports it.

Owns every contact with that module: which part of the model this rank has, the names under which all ranks of the job know
its parameters, which of them other ranks have too, and the gradients that Megatron's layers leave to the optimizer to sum.
Never keeps a parameter.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ttp.errors import ConfigError
from ttp.exchange.json_collectives import exchange_json, world

_MODULES = ("parallel_state", "mpu")
"""Last part of the module's name: ascendspeed.core.parallel_state, megatron.core.parallel_state, megatron.mpu."""
_NEEDED = (
    "get_data_parallel_group",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "get_pipeline_model_parallel_rank",
    "get_pipeline_model_parallel_world_size",
)
_EXPERT_DATA_GROUPS = ("get_data_modulo_expert_parallel_group", "get_expert_data_parallel_group")
_TIED_WEIGHTS = ("shared_embedding_or_output_weight", "word_embeddings_weight")
_TIED_FLAGS = ("share_embeddings_and_output_weights", "share_word_embeddings")

NamedParam = tuple[str, torch.nn.Parameter]


@dataclass(frozen=True, slots=True)
class ModelParallel:
    """This rank's place on the axes that split the model."""

    tensor_rank: int = 0
    tensor_size: int = 1
    pipeline_rank: int = 0
    pipeline_size: int = 1
    expert_rank: int = 0
    expert_size: int = 1
    data_group: Any = None
    """None: all ranks."""
    expert_data_group: Any = None
    """The ranks with the same experts; None: those of `data_group`."""
    tensor_group: Any = None
    embedding_group: Any = None
    """The first and the last pipeline stage, on their ranks."""

    @property
    def splits_model(self) -> bool:
        return self.tensor_size * self.pipeline_size * self.expert_size > 1

    @property
    def part(self) -> str:
        """Name of the model part that this rank has, as Megatron names its directory: `mp_rank_01_000`."""
        expert = f"_{self.expert_rank:03d}" if self.expert_size > 1 else ""
        return f"mp_rank_{self.tensor_rank:02d}_{self.pipeline_rank:03d}{expert}"

    @property
    def data_ranks(self) -> list[int]:
        """The ranks that share the parameters of this rank's model part (experts: some of them)."""
        if self.data_group is None:
            return list(range(world()[1]))
        return list(dist.get_process_group_ranks(self.data_group))

    def part_name(self, group: Any) -> str:
        """Return, for people, what the ranks of a data-parallel group have of the model: `tp 1 pp 0 `; experts `ep 1 ` as well."""
        experts = self.expert_data_group is not None and group is self.expert_data_group
        axes = (
            ("tp", self.tensor_rank, self.tensor_size > 1),
            ("pp", self.pipeline_rank, self.pipeline_size > 1),
            ("ep", self.expert_rank, experts),
        )
        return "".join(f"{axis} {rank} " for axis, rank, named in axes if named)

    def process_group(self, param: torch.nn.Parameter) -> Any:
        """Return the data-parallel group of an expert's parameter; None: the usual one."""
        return self.expert_data_group if self._is_expert(param) else None

    def is_duplicate(self, param: torch.nn.Parameter) -> bool:
        """All tensor-parallel ranks have this parameter alike: a norm, a bias of a row-parallel layer."""
        return self.tensor_size > 1 and not getattr(param, "tensor_model_parallel", False)

    def name(self, name: str, param: torch.nn.Parameter) -> str:
        """Return the name of a parameter in the job: the same on exactly the ranks that have it alike."""
        parts = []
        if self.pipeline_size > 1:
            parts.append(f"pp{self.pipeline_rank}")
        if self.tensor_size > 1 and not self.is_duplicate(param):
            parts.append(f"tp{self.tensor_rank}")
        if self._is_expert(param):
            parts.append(f"ep{self.expert_rank}")
        return ".".join([*parts, name])

    def _is_expert(self, param: torch.nn.Parameter) -> bool:
        """Megatron marks the parameters of experts that are spread over the data-parallel ranks with allreduce=False."""
        return self.expert_size > 1 and not getattr(param, "allreduce", True)


@dataclass(frozen=True, slots=True)
class JobNames:
    """The parameters of this rank's model part, under the names by which the job knows them."""

    named: tuple[NamedParam, ...]
    """In the models' order."""
    own: Mapping[str, str]
    """The trainer's own name by the job's."""
    copies: tuple[str, ...]
    """Those that another rank of the model counts and saves."""
    tied: torch.nn.Parameter | None
    """The word embeddings' weight, where first and last stage both have it."""


def read_parallel_state(given: Any = None) -> ModelParallel | None:
    """Return what the trainer's `parallel_state` reports, or `given` in its place; None where there is none. Raises ConfigError."""
    states = [given] if given is not None else list(_initialized())
    found = [(getattr(state, "__name__", type(state).__name__), _read(state)) for state in states]
    if not found:
        return None
    first_name, first = found[0]
    for other_name, other in found[1:]:
        if (other.part, other.data_ranks) != (first.part, first.data_ranks):
            raise ConfigError(
                f"ambiguous model parallelism: got {first.part} in {first_name} and {other.part} in {other_name}, expected one"
                " initialized parallel_state. Pass the trainer's to ttp.mindio.modellink.set_parallel_state"
            )
    return first


def job_names(place: ModelParallel, models: Sequence[torch.nn.Module], named: Sequence[NamedParam]) -> JobNames:
    """Name the parameters for the job (a collective of the tensor-parallel ranks, and of the first and last stages).

    Raises ConfigError for a parameter without Megatron's mark that differs between tensor-parallel ranks.
    """
    _check_duplicates(place, named)
    names = {id(param): place.name(name, param) for name, param in named}
    copies = [names[id(param)] for _, param in named if place.tensor_rank and place.is_duplicate(param)]
    tied = _tied_weight(place, models)
    if place.embedding_group is not None and place.pipeline_size > 1:
        device = named[0][1].device
        gathered = exchange_json(None if tied is None else names.get(id(tied)), device, place.embedding_group)
        if tied is None or None in gathered:
            tied = None
        elif place.pipeline_rank:
            names[id(tied)] = gathered[0]
            copies.append(gathered[0])
    return JobNames(
        tuple((names[id(param)], param) for _, param in named),
        {names[id(param)]: name for name, param in named},
        tuple(dict.fromkeys(copies)),
        tied,
    )


def sum_shared_gradients(place: ModelParallel, names: JobNames, main_grad: bool) -> None:
    """Sum the gradients of which each of several ranks has a part: Megatron's optimizer does it in `reduce_model_grads`.

    They are those of the tied embeddings over the first and last stage, and of parameters of sequence-parallel regions (norms)
    over the tensor-parallel ranks. A collective of these ranks.
    """
    if place.tensor_size > 1:
        found = [_gradient(param, main_grad) for _, param in names.named if getattr(param, "sequence_parallel", False)]
        if grads := [grad for grad in found if grad is not None]:
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            dist.all_reduce(flat, group=place.tensor_group)
            for grad, summed in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
                grad.copy_(summed.view_as(grad))
    if names.tied is not None and (tied := _gradient(names.tied, main_grad)) is not None:
        dist.all_reduce(tied, group=place.embedding_group)


def _gradient(param: torch.nn.Parameter, main_grad: bool) -> torch.Tensor | None:
    grad: torch.Tensor | None = param.main_grad if main_grad else param.grad  # type: ignore[attr-defined]
    return grad


def _initialized() -> Iterator[Any]:
    for name, module in list(sys.modules.items()):
        if name.rpartition(".")[2] in _MODULES and all(hasattr(module, needed) for needed in _NEEDED):
            ready = getattr(module, "model_parallel_is_initialized", None)
            if ready is None or ready():
                yield module


def _read(state: Any) -> ModelParallel:
    if missing := [name for name in _NEEDED if not callable(getattr(state, name, None))]:
        raise ConfigError(
            f"invalid parallel_state: got {state!r} without {', '.join(missing)}, expected Megatron's module of that name"
        )
    data = state.get_data_parallel_group()
    expert_size = _asked(state, "get_expert_model_parallel_world_size", 1)
    groups = [getattr(state, name) for name in _EXPERT_DATA_GROUPS if hasattr(state, name)]
    if expert_size > 1 and not groups:
        raise ConfigError(
            f"invalid parallel_state: got {expert_size} expert-parallel ranks without {' or '.join(_EXPERT_DATA_GROUPS)},"
            " expected the group of the ranks with the same experts"
        )
    size = world()[1]
    return ModelParallel(
        tensor_rank=state.get_tensor_model_parallel_rank(),
        tensor_size=state.get_tensor_model_parallel_world_size(),
        pipeline_rank=state.get_pipeline_model_parallel_rank(),
        pipeline_size=state.get_pipeline_model_parallel_world_size(),
        expert_rank=_asked(state, "get_expert_model_parallel_rank", 0),
        expert_size=expert_size,
        data_group=None if data is None or dist.get_world_size(data) == size else data,
        expert_data_group=groups[0]() if expert_size > 1 else None,
        tensor_group=state.get_tensor_model_parallel_group(),
        embedding_group=_embedding_group(state),
    )


def _asked(state: Any, name: str, otherwise: int) -> int:
    return int(getattr(state, name)()) if hasattr(state, name) else otherwise


def _embedding_group(state: Any) -> Any:
    rank, stages = state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size()
    if stages == 1 or rank not in (0, stages - 1) or not hasattr(state, "get_embedding_group"):
        return None
    group = state.get_embedding_group()
    # Megatron gives a rank that is not in it a group all the same.
    return group if group is not None and world()[0] in dist.get_process_group_ranks(group) else None


def _check_duplicates(place: ModelParallel, named: Sequence[NamedParam]) -> None:
    """A parameter that is split but not marked would be saved from one rank alone: prove that those without the mark are alike."""
    if place.tensor_size == 1:
        return
    duplicates = [(name, param) for name, param in named if place.is_duplicate(param)]
    mine = {name: _digest(param) for name, param in duplicates}
    gathered = exchange_json(mine, named[0][1].device, place.tensor_group)
    for name in mine:
        if different := [rank for rank, other in enumerate(gathered) if other.get(name) != gathered[0].get(name)]:
            raise ConfigError(
                f"invalid parameter {name!r}: got other values on tensor-parallel ranks {different} than on 0, expected equal values"
                " without tensor_model_parallel=True. Set that attribute on parameters that are split"
            )


def _digest(param: torch.nn.Parameter) -> str:
    values = param.detach().reshape(-1).contiguous().cpu().view(torch.uint8).numpy().tobytes()
    return f"{tuple(param.shape)} {hashlib.sha256(values).hexdigest()[:16]}"


def _tied_weight(place: ModelParallel, models: Sequence[torch.nn.Module]) -> torch.nn.Parameter | None:
    """Return this rank's copy of the word embeddings, where the output layer of the last stage uses them too."""
    if place.pipeline_size == 1 or place.pipeline_rank not in (0, place.pipeline_size - 1):
        return None
    model: Any = models[-1 if place.pipeline_rank else 0]
    while not any(hasattr(model, name) for name in _TIED_FLAGS) and hasattr(model, "module"):
        model = model.module
    if not any(getattr(model, name, False) for name in _TIED_FLAGS):
        return None
    weight = next((getattr(model, name)() for name in _TIED_WEIGHTS if hasattr(model, name)), None)
    return weight if isinstance(weight, torch.nn.Parameter) else None
