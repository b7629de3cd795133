"""Comparing the replicas of all shards: a sum a shard from every rank, and more only when they differ.

Owns the two collectives. Every rank reads the same answer of the first, so all take part in the second or none does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ttp.checkpoint.format.types import HeldTensor
from ttp.exchange.json_collectives import exchange_json
from ttp.optim.comparison import Divergence, differing_shards, divergences
from ttp.optim.partition import ParameterPart
from ttp.optim.shard_layout.layout import Layout
from ttp.optim.sums import mixed, sums_of


def compare_parts(step: int, parts: Iterable[ParameterPart], device: torch.device) -> tuple[Divergence, ...]:
    """Return the tensors of which replicas differ, over all parts of an optimizer that have replicas (collectives)."""
    return tuple(
        divergence
        for part in parts
        if part.layout.replicas > 1
        for divergence in compare(step, dict(part.held(backup=False)), part.layout, part.group, device)
    )


def compare(
    step: int, held: Mapping[int, Sequence[HeldTensor]], layout: Layout, group: Any, device: torch.device
) -> tuple[Divergence, ...]:
    """Return the tensors of which replicas differ; every rank of `group` calls, and gets the same.

    held: this rank's tensors by shard. The ranks in the answer are the job's.
    """
    rank, world = group.rank(), group.size()
    sums = {shard: sums_of([tensor.values for tensor in tensors]) for shard, tensors in held.items()}
    mine = torch.zeros(len(layout.held(rank)), dtype=torch.int64, device=device)
    for place, shard in enumerate(layout.held(rank)):
        if shard in sums:  # else it is nothing but padding
            mine[place] = mixed(sums[shard])
    everyone = [torch.zeros_like(mine) for _ in range(world)]
    dist.all_gather(everyone, mine, group=group)
    differing = differing_shards([row.tolist() for row in everyone], layout)
    if not differing:
        return ()
    reported = {
        shard: [
            (tensor.key, tensor.start, tensor.values.numel(), value)
            for tensor, value in zip(held[shard], sums[shard].tolist(), strict=True)
        ]
        for shard in differing
        if shard in held
    }
    answers = exchange_json(reported, device, group)  # JSON makes text of the shards' numbers
    read = [{int(shard): [tuple(part) for part in parts] for shard, parts in answer.items()} for answer in answers]
    return tuple(_in_the_job(divergence, group) for divergence in divergences(step, differing, read, layout))


def _in_the_job(divergence: Divergence, group: Any) -> Divergence:
    """Number the ranks as the job does."""
    ranks = tuple(tuple(dist.get_global_rank(group, rank) for rank in side) for side in divergence.ranks)
    return replace(divergence, ranks=ranks)
