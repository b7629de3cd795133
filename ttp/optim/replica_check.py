"""Comparing the replicas of all shards: a sum a shard from every rank, and more only when they differ.

Owns what an optimizer has found so, and the two collectives. Every rank reads the same answer of the first, so all take part in the second or none does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ttp.checkpoint.format.types import HeldTensor
from ttp.exchange.json_collectives import exchange_json, world
from ttp.groups.polled_wait import wait_for
from ttp.optim.comparison import Divergence, Part, differences, differing_shards, divergences, not_known
from ttp.optim.on_divergence import Disputes, Majority, OnDivergence, majority
from ttp.optim.partition import ParameterPart
from ttp.optim.shard_layout.layout import Layout
from ttp.optim.step_state import StepState
from ttp.optim.sums import mixed, sums_of
from ttp.proto.messages import Digest

log = logging.getLogger("ttp")

Dispute = Callable[[Sequence[Digest]], None]
"""Called with what this rank has read again of the shards that differ, before any rank learns who has read what."""


class ReplicaCheck:
    """The comparisons of one optimizer. All methods: the training thread."""

    def __init__(self, parts: Sequence[ParameterPart], steps: StepState, device: torch.device, choice: str) -> None:
        """Raises ConfigError for a `choice` that there is not."""
        self._parts, self._steps, self._device = parts, steps, device
        self.on_divergence = OnDivergence(choice)
        self.divergences: tuple[Divergence, ...] = ()

    @torch.no_grad()
    def compare(self) -> tuple[Divergence, ...]:
        """Compare the bits of this step's state with the other holders' and return what differs (a collective)."""
        with self._steps.in_collective():
            found, _ = compare_parts(self._steps.step, self._parts, self._device)
        self._note(found)
        return found

    @torch.no_grad()
    def check(self) -> tuple[Divergence, ...]:
        """Compare, and do what `on_divergence` says about a difference (a collective); return it where that is to report it. Raises ReplicasDiffer,
        WrongReplica, WrongPeer."""
        if not self.on_divergence.acts:
            found = self.compare()
            if not found:
                self.on_divergence.equal_after = self._steps.step
            return found
        step, disputes = self._steps.step, Disputes(self._steps.step, self._steps.tracker)
        with self._steps.in_collective():
            found, shards = compare_parts(step, self._parts, self._device, disputes.add, self.on_divergence.filled)
        self._note(found)
        if found:
            self.on_divergence.settle(step, differences(found), shards, world()[0])
        disputes.withdraw(self._parts[0].rank)
        self.on_divergence.equal_after = step
        return ()

    def _note(self, found: tuple[Divergence, ...]) -> None:
        """Keep what is new, and have the group's first rank report it."""
        new = not_known(found, self.divergences)
        self.divergences += new
        if new and self._parts[0].rank == 0:
            log.warning("%s", self.on_divergence.reported(differences(new)))


def compare_parts(
    step: int,
    parts: Iterable[ParameterPart],
    device: torch.device,
    dispute: Dispute | None = None,
    filled: Collection[int] = (),
) -> tuple[tuple[Divergence, ...], tuple[Majority, ...]]:
    """Return the tensors of which replicas differ, over all parts of an optimizer that have replicas, and what is said of each shard that does
    (collectives)."""
    found: list[Divergence] = []
    shards: list[Majority] = []
    for part in parts:
        if part.layout.replicas > 1:
            tensors, judged = compare(
                step, dict(part.held(backup=False)), part.layout, part.group, device, dispute, filled
            )
            found += tensors
            shards += judged
    return tuple(found), tuple(shards)


def compare(
    step: int,
    held: Mapping[int, Sequence[HeldTensor]],
    layout: Layout,
    group: Any,
    device: torch.device,
    dispute: Dispute | None = None,
    filled: Collection[int] = (),
) -> tuple[tuple[Divergence, ...], tuple[Majority, ...]]:
    """Return the tensors of which replicas differ, and what is said of each shard; every rank of `group` calls, and gets the same.

    held: this rank's tensors by shard. dispute: where it is given, all holders of shards that differ read them a second time, and call it with what
    they read. filled: the job's ranks that prove nothing. The ranks in the answer are the job's.
    """
    rank, size = group.rank(), group.size()
    sums = {shard: sums_of([tensor.values for tensor in tensors]) for shard, tensors in held.items()}
    mine = torch.zeros(len(layout.held(rank)), dtype=torch.int64, device=device)
    for place, shard in enumerate(layout.held(rank)):
        if shard in sums:  # else it is nothing but padding
            mine[place] = mixed(sums[shard])
    everyone = [torch.zeros_like(mine) for _ in range(size)]
    wait_for([dist.all_gather(everyone, mine, group=group, async_op=True)])
    differing = differing_shards([row.tolist() for row in everyone], layout)
    if not differing:
        return (), ()
    if dispute is not None:
        again = [shard for shard in differing if shard in held]
        sums |= {shard: sums_of([tensor.values for tensor in held[shard]]) for shard in again}
        dispute(
            [Digest(layout.group_id(shard), int(mixed(sums[shard])), len(layout.holders(shard))) for shard in again]
        )
    reported = {
        shard: [
            (tensor.key, tensor.start, tensor.values.numel(), value)
            for tensor, value in zip(held[shard], sums[shard].tolist(), strict=True)
        ]
        for shard in differing
        if shard in held
    }
    answers = exchange_json(reported, device, group)  # JSON makes text of the shards' numbers
    read: list[dict[int, list[Part]]] = [
        {int(shard): [tuple(part) for part in parts] for shard, parts in answer.items()} for answer in answers
    ]
    found = tuple(_in_the_job(divergence, group) for divergence in divergences(step, differing, read, layout))
    shards = [majority(_by_rank(read, shard, layout, group), filled) for shard in differing]
    return found, tuple(shard for shard in shards if shard.wrong)


def _by_rank(read: Sequence[Mapping[int, Sequence[Part]]], shard: int, layout: Layout, group: Any) -> dict[int, object]:
    """Return what each holder has read of a shard, by the job's ranks."""
    return {dist.get_global_rank(group, rank): tuple(read[rank][shard]) for rank in layout.holders(shard)}


def _in_the_job(divergence: Divergence, group: Any) -> Divergence:
    """Number the ranks as the job does."""
    ranks = tuple(tuple(dist.get_global_rank(group, rank) for rank in side) for side in divergence.ranks)
    return replace(divergence, ranks=ranks)
