"""Turns `optimizer_config` into ttp's replica optimizer over a model's parameters.

Owns which parameters decay, and which class fits the world. Never steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import ttp

from ..config.schema import Config, OptimizerConfig
from ..model.gpt import Transformer
from .mesh import Mesh

BASES: dict[str, type[torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "mint.AdamW": torch.optim.AdamW,
    "SpeedAdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "SGD": torch.optim.SGD,
}
"""By `optimizer_config.optimizer_type`."""


def base_arguments(settings: OptimizerConfig) -> dict[str, Any]:
    """Return what the base optimizer takes beside the learning rate and the weight decay."""
    if settings.optimizer_type == "SGD":
        return {"momentum": settings.momentum, "nesterov": settings.nesterov}
    return {"betas": settings.betas, "eps": settings.eps}


def state_tensors(settings: OptimizerConfig) -> int:
    """Return how many FP32 tensors of a parameter's shape the optimizer keeps for it, its master not counted."""
    if settings.optimizer_type == "SGD":
        return 1 if settings.momentum else 0
    return 2


def build_optimizer(
    config: Config, chunks: Sequence[Transformer], mesh: Mesh, replicas: int
) -> ttp.TTPReplicaOptimizer:
    """Return the replica optimizer over the parameters of this rank's parts of the model: norms and biases without decay."""
    training, settings = config.training_config, config.optimizer_config
    groups = param_groups([pair for chunk in chunks for pair in chunk.named_parameters()], config, mesh)
    clip: ttp.ClipNorm | ttp.ClipValue | None = None
    if training.grad_clip_kwargs is not None:
        by_norm = training.grad_clip_kwargs.grad_clip_type == "ClipGlobalNorm"
        clip = (ttp.ClipNorm if by_norm else ttp.ClipValue)(training.grad_clip_kwargs.clip_value)
    loss_scale = None
    if training.loss_scale is not None:
        window = training.loss_scale_window
        loss_scale = ttp.LossScale(training.loss_scale, dynamic=window > 0, growth_interval=max(1, window))
    dp_size = mesh.data.size
    odd = dp_size % replicas or mesh.expert_data.size % replicas
    family = ttp.TTPOddReplicaOptimizer if odd else ttp.TTPReplicaOptimizer
    optimizer = family(
        groups,
        group=mesh.data.group,
        span=dist.group.WORLD if mesh.splits_model else None,
        bucket_bytes=bucket_bytes(config, chunks),
        copies=["embedding.weight"] if any(chunk.has_tied_copy for chunk in chunks) else (),
        base=BASES[settings.optimizer_type],
        replicas=replicas,
        clip=clip,
        loss_scale=loss_scale,
        local_copy=training.local_copy_os,
        gradient_accumulation_shard=training.gradient_accumulation_shard,
        compare_every=config.parallel_config.compare_replicas_every,
        on_divergence=config.parallel_config.on_divergence,
        lr=settings.learning_rate,
        **base_arguments(settings),
    )
    mean = training.loss_reduction == "mean"
    optimizer.gradient_divisor = dp_size * config.dataset_config.micro_batch_num if mean else 1
    return optimizer


def bucket_bytes(config: Config, chunks: Sequence[Transformer]) -> int:
    """Return the size of the buckets that gradients are sent in."""
    count = config.parallel_config.gradient_buckets
    if count is None:
        return 25 * 2**20
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    here = [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in parameters]
    return -(-sum(local.numel() * local.element_size() for local in here) // count)


def param_groups(named: Sequence[tuple[str, torch.nn.Parameter]], config: Config, mesh: Mesh) -> list[dict[str, Any]]:
    """Return the param groups, the same number whatever the layout: with weight decay and without, and both again for experts,
    which are held by the ranks that have the same ones."""
    decay = config.optimizer_config.weight_decay
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": decay}, {"params": [], "weight_decay": 0.0}]
    if config.model_config.num_experts is not None:
        own = {"process_group": mesh.expert_data.group} if mesh.expert.size > 1 else {}
        groups += [{"params": [], "weight_decay": decay, **own}, {"params": [], "weight_decay": 0.0, **own}]
    for name, parameter in named:
        spared = "norm" in name or name.endswith("bias")
        groups[2 * (".experts." in name) + spared]["params"].append((name, parameter))
    return groups
