"""Megatron-Core's distributed optimizer: each data-parallel rank's shard of the main weights and of the optimizer's state.

Owns all that is known of megatron.core's classes. What is saved are the shards, in which its inner optimizer updates: runs of the parameters' elements. The
model's own weights are made of them, by Megatron's copy and all-gather. Never imports megatron.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ttp.adopt.adopted_state import PARTS, Address, AdoptedState, Named
from ttp.adopt.averages import Average
from ttp.checkpoint.format.keys import model_key, optim_state_key
from ttp.errors import ConfigError
from ttp.exchange.json_collectives import world

_WRAPPERS = ("DistributedDataParallel", "Float16Module")


@dataclass(frozen=True, slots=True)
class _Run:
    """The elements of a parameter that this rank updates."""

    name: str
    shape: tuple[int, ...]
    """Of the parameter."""
    start: int


def distributed_optimizer(optimizer: Any) -> Any:
    """Return Megatron-Core's distributed optimizer, where that is what a trainer has; None: it is another one. Raises ConfigError for several in a
    chain, and for Megatron's other optimizers."""
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    kinds = [{base.__name__ for base in type(each).__mro__} for each in chain]
    if not any("MegatronOptimizer" in kind for kind in kinds):
        return None
    if len(chain) != 1 or "DistributedOptimizer" not in kinds[0]:
        raise ConfigError(
            f"the optimizer: got {', '.join(type(each).__name__ for each in chain)} of Megatron-Core, expected one DistributedOptimizer: set"
            " use_distributed_optimizer=True, without expert parallelism"
        )
    return chain[0]


class MegatronState(AdoptedState):
    """What this rank has of the job's state under a distributed optimizer."""

    def __init__(self, model: torch.nn.Module, distributed: Any, averages: Mapping[str, Average] | None = None) -> None:
        """A collective over WORLD. Raises ConfigError for a layout that cannot be protected."""
        if averages:
            raise ConfigError(
                "averages: got some with Megatron-Core's distributed optimizer, expected none: the weights that they follow are made after its update"
            )
        groups = distributed.data_parallel_group.size() * distributed.ddp_config.num_distributed_optimizer_instances
        if groups != world()[1]:
            raise ConfigError(
                f"Megatron-Core's distributed optimizer: got {groups} data-parallel ranks of {world()[1]}, expected a job without tensor, pipeline and"
                " expert parallelism, whose ranks have other parameters under the same names"
            )
        if len(distributed.model_chunks) != 1:
            raise ConfigError(
                f"Megatron-Core's distributed optimizer: got {len(distributed.model_chunks)} model chunks, expected one"
            )
        self._distributed = distributed
        self._runs: dict[int, _Run] = {}
        """By the id of the shard."""
        group = distributed.data_parallel_group
        self._part = f"{PARTS[1]}{group.rank()} of {group.size()}"
        super().__init__(model, distributed.optimizer)

    def _unwrapped(self, model: torch.nn.Module) -> torch.nn.Module:
        while type(model).__name__ in _WRAPPERS:
            inner: Any = model.module
            model = inner
        return model

    def _find_names(self) -> dict[int, str]:
        names = {id(param): name for name, param in self._params.items()}
        which = self._distributed
        pairs = [
            (which.model_float16_groups, which.shard_fp32_from_float16_groups),
            (which.model_fp32_groups, which.shard_fp32_groups),
        ]
        for all_params, all_shards in pairs:
            for params, shards in zip(all_params, all_shards, strict=True):
                for param, shard in zip(params, shards, strict=True):
                    if shard is None:
                        raise ConfigError(
                            "Megatron-Core's distributed optimizer: got use_precision_aware_optimizer=True, expected main weights in FP32"
                        )
                    if id(param) not in names:
                        raise ConfigError(
                            "the model: got another one than Megatron-Core's distributed optimizer updates, expected that one"
                        )
                    buffer, dtype, bucket = which.model_param_gbuf_map[param]
                    run = which.gbuf_ranges[buffer][dtype][bucket]["param_map"][param]["param"]
                    self._runs[id(shard)] = _Run(names[id(param)], tuple(param.shape), run.start)
        return {shard: run.name for shard, run in self._runs.items()}

    def _entries(self) -> Iterator[Named]:
        for name, param in self._params.items():
            if not param.requires_grad:
                yield Named(model_key(name), param, param)
        for name, buffer in self._kept.items():
            yield Named(model_key(name), buffer, buffer)
        for group in self._updating.param_groups:
            for shard in group["params"]:
                name = self._names[id(shard)]
                yield Named(model_key(name), shard, shard)
                for key, value in self._updating.state[shard].items():
                    if value is not None:
                        yield Named(optim_state_key(name, key), value, shard)

    def _find_address(self, entry: Named) -> Address:
        run = self._runs.get(id(entry.owner))
        if run is None:
            return super()._find_address(entry)
        if entry.tensor.dim() == 0:  # one number for the whole parameter, which whoever has its first element counts
            return Address(self._part if run.start == 0 else "", ())
        return Address(self._part, run.shape, run.start)

    def counts(self, param: torch.Tensor) -> bool:
        return self._group_ids.get(self._part) in self._counted

    @torch.no_grad()
    def loaded(self) -> None:
        super().loaded()
        self._distributed._copy_main_params_to_model_params()
        for chunk in self._distributed.model_chunks:
            chunk.start_param_sync(force_sync=True)
