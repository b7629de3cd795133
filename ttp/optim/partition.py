"""The parameters that one process group shares: how they are cut, their memory, their wires, and the shards held here.

A model that is split over ranks by tensor or pipeline parallelism has one part on each rank: its share of the model. Experts
that are spread over the data-parallel ranks make a second one, whose group is smaller. Owns the putting together; the
optimizer orders what happens in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ttp.checkpoint.format.types import HeldTensor
from ttp.errors import CheckpointError, LayoutError
from ttp.exchange.agreed import agree
from ttp.exchange.json_collectives import exchange_json
from ttp.groups.polled_wait import wait_for
from ttp.optim.assembly import NamedParam, allocate, check_agreement, hosts_of, specs
from ttp.optim.buckets import Bucket
from ttp.optim.collectives import BucketMemory, Wires, make_wires
from ttp.optim.held_shards import HeldShards
from ttp.optim.shard_layout.layout import Layout
from ttp.proto.messages import ShardGroup


@dataclass(slots=True, eq=False)
class ParameterPart:
    """Ranks in it are those of `group`."""

    group: Any
    """None: this rank alone."""
    rank: int
    layout: Layout
    named: tuple[NamedParam, ...]
    places: tuple[int, ...]
    """Which of the optimizer's parameters these are, ascending."""
    memory: list[BucketMemory]
    wires: Wires
    shards: HeldShards

    def rewire(self, successor: Callable[[Any], Any]) -> None:
        """Use the process groups that have taken the place of these."""
        self.group = successor(self.group)
        self.wires.rewire(successor)

    def fill(self, replaced: Collection[int], device: torch.device) -> None:
        """Give the ranks in `replaced` (of the job), which hold nothing, what their replicas hold (a collective over `group`). Raises LayoutError,
        CheckpointError: no replica holds it."""
        if self.group is None:
            return
        check_agreement(self.layout, self.group, self.rank, device)
        ranks = [dist.get_global_rank(self.group, rank) for rank in range(self.group.size())]
        transfers: list[tuple[Any, torch.Tensor, int]] = []
        for shard in range(self.layout.shards):
            holders = self.layout.holders(shard)
            coming = [holder for holder in holders if ranks[holder] in replaced]
            staying = [holder for holder in holders if ranks[holder] not in replaced]
            if not coming:
                continue
            if not staying:
                raise CheckpointError(
                    f"no rank that stays holds shard {self.layout.label(shard)}: ranks {coming} are new"
                )
            if self.rank in coming:
                transfers += [(dist.irecv, tensor, ranks[staying[0]]) for tensor in self.shards.everything_of(shard)]
            elif self.rank == staying[0]:
                transfers += [
                    (dist.isend, tensor, ranks[holder])
                    for tensor in self.shards.everything_of(shard)
                    for holder in coming
                ]
        # In one batch for each device: by itself NCCL makes a communicator of its own for each pair, and two in one group cannot be aborted.
        batches: dict[str, list[dist.P2POp]] = {}
        for transfer, tensor, peer in transfers:
            batches.setdefault(tensor.device.type, []).append(dist.P2POp(transfer, tensor, peer, group=self.group))
        wait_for([work for batch in batches.values() for work in dist.batch_isend_irecv(batch)])

    def held(self, backup: bool) -> list[tuple[int, list[HeldTensor]]]:
        """Return (shard, tensors) of what this rank holds; without shards in which nothing is counted."""
        found = [(shard, self.shards.held_tensors(shard, backup)) for shard in self.layout.held(self.rank)]
        return [(shard, tensors) for shard, tensors in found if tensors]

    def shard_groups(self, name: Callable[[Any], str] | None) -> list[ShardGroup]:
        """Return what this rank holds, for its registration. name: what the ranks of `group` have of the model, for people."""
        part = name(self.group) if name is not None else ""
        return [
            ShardGroup(
                self.layout.group_id(shard),
                part + self.layout.label(shard),
                sum(tensor.values.nbytes for tensor in tensors),
            )
            for shard, tensors in self.held(backup=False)
        ]

    def buckets(self) -> list[tuple[int, Bucket]]:
        """Return the buckets, each with the place of the parameter that backward comes to last."""
        return [
            (
                self.places[spec.params[-1]],
                Bucket(
                    tuple((self.named[i].name, self.named[i].param) for i in spec.params),
                    spec.offsets,
                    memory,
                    self.wires,
                ),
            )
            for spec, memory in zip(self.layout.buckets, self.memory, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Cut:
    """How a part is to be cut."""

    replicas: int
    ring: bool
    bucket_bytes: int
    grad_dtype: torch.dtype | None
    local_copy: bool
    masters_apart: bool
    gradient_accumulation_shard: bool
    hosts: Sequence[str] | None
    timeout: timedelta | None


def by_process_group(named: Sequence[NamedParam], main: Any) -> list[tuple[Any, list[int]]]:
    """Return each process group with the places of its parameters; the optimizer's own group, `main`, comes first."""
    found: list[tuple[Any, list[int]]] = [(main, [])]
    for place, entry in enumerate(named):
        group = main if entry.process_group is None else entry.process_group
        members = next((places for known, places in found if known is group), None)
        if members is None:
            found.append((group, members := []))
        members.append(place)
    return [(group, places) for group, places in found if places]


def build_part(
    group: Any, named: Sequence[NamedParam], places: Sequence[int], cut: Cut, device: torch.device
) -> ParameterPart:
    """Cut the parameters for the ranks of `group` and lay them out in memory (a collective over it). Raises LayoutError."""
    world, rank = (group.size(), group.rank()) if group is not None else (1, 0)
    ring, replicas = (cut.ring, cut.replicas) if world > 1 else (False, 1)  # alone: no other rank to hold a copy
    hosts = hosts_of(group, world, device) if cut.hosts is None else cut.hosts
    mine = tuple(named[place] for place in places)
    element = max(torch.empty(0, dtype=cut.grad_dtype or entry.param.dtype).element_size() for entry in mine)
    bucket_numel = max(1, cut.bucket_bytes // element)
    layout = Layout.build(specs(mine), world, replicas, bucket_numel, ring=ring, hosts=hosts)
    check_agreement(layout, group, rank, device)
    memory = allocate(layout, rank, mine, cut.grad_dtype, group, cut.gradient_accumulation_shard)
    wires = make_wires(layout, group, rank, cut.timeout)
    shards = HeldShards(layout, rank, memory, cut.local_copy, cut.masters_apart)
    return ParameterPart(group, rank, layout, mine, tuple(places), memory, wires, shards)


class Gather:
    """The gather of all parts' parameters: begun in one moment, waited for in another. Between the two they are half new: nothing
    reads them."""

    def __init__(self, parts: Sequence[ParameterPart]) -> None:
        self._parts = parts
        self._works: list[Any] = []

    def start(self) -> None:
        """Round the masters into the parameters and begin to share them within the row, bucket by bucket."""
        for part in self._parts:
            for bucket, memory in enumerate(part.memory):
                part.shards.masters_to_params(bucket)
                self._works.extend(part.wires.gather(memory))

    def finish(self) -> None:
        """Wait until the parameters are whole; at once where nothing is under way."""
        while self._works:
            wait_for(self._works[:1])
            del self._works[0]

    def give_up(self) -> None:
        """What is under way belongs to groups that were left."""
        self._works.clear()


@dataclass(frozen=True, slots=True)
class JobParam:
    """A parameter of the model, on whichever rank it lies."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    group: int


def job_params(parts: Sequence[ParameterPart], span: Any, device: torch.device) -> tuple[JobParam, ...]:
    """Return all parameters of the model, in the order of their names' first rank (a collective over `span`, the ranks that
    share the model; None: this rank alone). Raises LayoutError when two ranks know a name with another shape or param group."""
    gathered = agree("parameters of the model", lambda: _gathered_params(parts, span, device), span)
    found: dict[str, JobParam] = {}
    for rank, params in enumerate(gathered):
        for name, shape, group in params:
            param = JobParam(name, tuple(shape), group)
            known = found.setdefault(name, param)
            if known != param:
                raise LayoutError(
                    f"parameter {name!r} has shape {param.shape} in param group {param.group} on rank {rank} of the model,"
                    f" and shape {known.shape} in group {known.group} on another: give every rank the same param groups"
                )
    return tuple(found.values())


def _gathered_params(parts: Sequence[ParameterPart], span: Any, device: torch.device) -> list[Any]:
    """Return name, shape and param group of each rank's parameters; nothing of those that know the same as one before."""
    mine: list[Any] = [[spec.name, list(spec.whole_shape), spec.group] for part in parts for spec in part.layout.params]
    gathered = [mine]
    if span is not None and dist.get_world_size(span) > 1:
        digests = exchange_json([part.layout.params_digest() for part in parts], device, span)
        first = digests.index(digests[span.rank()]) == span.rank()  # one rank speaks for all that know the same
        gathered = exchange_json(mine if first else [], device, span)
    return gathered


def expected_tensors(params: Sequence[JobParam], kinds: Sequence[Mapping[str, bool]]) -> dict[str, tuple[int, ...]]:
    """Return key and whole shape of every tensor of the job's state. `kinds[group]`: the base's state; True: a 0-d tensor."""
    shapes: dict[str, tuple[int, ...]] = {}
    for param in params:
        shapes[f"model.{param.name}"] = param.shape
        for key, scalar in kinds[param.group].items():
            shapes[f"optim.state.{param.name}.{key}"] = () if scalar else param.shape
    return shapes
