"""The collectives of one bucket: reduce its gradients to the holders of each shard, gather its parameters back.

Owns the process groups of the two layouts and what goes over them. Works on the tensors it is given, in four steps that
the caller orders: `scatter`, `add_up` (only after the works of `scatter` are done), `exchange`, `settle` (only after the works
of `exchange`). Never decides when, never touches optimizer state. Replicas of a shard end up with the same bits because
each element is summed in one place, or in one order, before it is copied.

    even   reduce-scatter in the row, then the sum with the partners of the column: (1 - R/d) n + 2 (R - 1)/R * nR/d
           elements sent a rank; with R=2 that is n, a full reduce-scatter sends (1 - 1/d) n
    ring   reduce-scatter over all ranks, then each reduced shard is copied to the successor: (1 - 1/d) n + n/d = n
    back   all-gather of the low-precision shards in the row: (1 - 1/shards) n

16-bit gradients travel in 16 bits and are added to the partners' in FP32. Where gradients accumulate in shards, `scatter` and
`add_up` are done for each backward pass and the rest once a step, in FP32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ttp.optim.shard_layout.layout import Layout

Works = list[Any]
"""Handles of asynchronous collectives (torch.distributed.Work); empty when nothing is on the wire."""

# torch 2.13 renamed these two; the old names warn there, the new ones do not exist in 2.6.
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class BucketMemory:
    """One bucket's tensors on this rank, all 1-D and contiguous."""

    params: torch.Tensor
    """Low-precision parameters, whole bucket."""
    grads: torch.Tensor
    """Gradients in the wire's dtype, whole bucket. Used as scratch while they are reduced."""
    reduced: tuple[torch.Tensor, ...]
    """FP32, one of shard_numel for each held shard, in the order of Layout.held: the sum over all ranks. FP32 gradients are reduced
    where they lie: these are then the shards' slots of `grads`."""
    sharded: bool = False
    """`reduced[0]` accumulates one backward pass after the other, and `grads` has memory only from `hold` to `release`."""

    @property
    def in_place(self) -> bool:
        """True when `reduced` lies in `grads`."""
        return not self.sharded and self.grads.dtype == self.reduced[0].dtype

    @property
    def added_up(self) -> bool:
        """True when `add_up` leaves the row's sum in `reduced[0]`, in FP32."""
        return self.sharded or self.in_place

    def hold(self) -> None:
        """Make sure that `grads` has memory; what is new is zero."""
        storage = self.grads.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.grads.nbytes)
            self.grads.zero_()

    def release(self) -> None:
        """Give the memory of `grads` back, where it is not kept: nothing may look at it until `hold`."""
        if self.sharded:
            self.grads.untyped_storage().resize_(0)

    def clear(self) -> None:
        """Make all gradients zero, with what lies between them: a collective that was aborted may have left anything there."""
        if self.grads.untyped_storage().nbytes():
            self.grads.zero_()
        for row in self.reduced:
            row.zero_()


class Wires(Protocol):
    """The four steps of a reduction, and the gather."""

    def scatter(self, memory: BucketMemory) -> Works: ...

    def add_up(self, memory: BucketMemory, first: bool) -> None: ...

    def exchange(self, memory: BucketMemory) -> Works: ...

    def settle(self, memory: BucketMemory) -> None: ...

    def gather(self, memory: BucketMemory) -> Works: ...

    def rewire(self, successor: Callable[[Any], Any]) -> None:
        """Use the process groups that have taken the place of these; nothing is on the wire."""

    def give_up(self) -> None:
        """Forget what is on the wire: it belongs to groups that were left."""


class RankRow:
    """The ranks that reduce-scatter and all-gather together. A group of one is not a group."""

    def __init__(self, group: Any, members: Sequence[int], rank: int, timeout: timedelta | None) -> None:
        self.slot = list(members).index(rank)
        self.size = len(members)
        self._group = _subgroup(group, members, timeout)
        # A process group numbers its ranks in ascending order; the row's order of shards may differ (placement).
        ascending = sorted(members)
        self._slots = [list(members).index(member) for member in ascending]
        self._others = [(_global_rank(group, members[slot]), slot) for slot in self._slots if slot != self.slot]
        self._received: dict[int, tuple[list[torch.Tensor], torch.Tensor | None]] = {}
        """By the memory of a bucket, what each of the others sends of this rank's slot, in the group's order; and memory to keep."""
        self._spare: list[torch.Tensor] = []

    def rewire(self, successor: Callable[[Any], Any]) -> None:
        """Use the group that has taken the place of this row's; nothing is on the wire."""
        self._group = successor(self._group)

    def give_up(self) -> None:
        """Forget what the others send; memory for it is made anew."""
        self._received.clear()

    def own(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's slot of a bucket."""
        return flat.view(self.size, -1)[self.slot]

    def scatter(self, flat: torch.Tensor, released: bool) -> Works:
        """Sum `flat` over the row, this rank's slot in its place once `add_up` has followed; the other slots are used up.

        `released`: the memory of `flat` is given back after that, so the works have to be known to be done without a wait.
        """
        if self.size == 1:
            return []
        if flat.device.type != "cpu":
            return reduce_scatter(self._in_group_order(flat), self.own(flat), flat, self._group)
        # gloo's reduce-scatter is an all-reduce of a copy: twice the bytes of either.
        return self._all_to_all(flat) if released else self._exchange_slots(flat)

    def add_up(self, flat: torch.Tensor) -> None:
        """Add what the others sent to this rank's slot, once the works of `scatter` are done."""
        own = self.own(flat)
        parts, spare = self._received.pop(flat.data_ptr(), ([], None))
        for part in parts:
            own += part
        if spare is not None:
            self._spare.append(spare)

    def _all_to_all(self, flat: torch.Tensor) -> Works:
        """Send each of the others its slot, in one collective: that needs as much memory again, but is known to be done once it is."""
        slots = self._in_group_order(flat)
        given = flat if _lie_in_order(slots, flat) else torch.cat(slots)
        received = torch.empty_like(given)
        parts = zip(self._slots, received.view(self.size, -1), strict=True)
        self._received[flat.data_ptr()] = [part for slot, part in parts if slot != self.slot], None
        return [dist.all_to_all_single(received, given, group=self._group, async_op=True)]

    def _exchange_slots(self, flat: torch.Tensor) -> Works:
        """Send each of the others its slot, point to point."""
        own, slots = self.own(flat), flat.view(self.size, -1)
        received = self._room(own)
        parts = list(received.view(self.size - 1, -1))
        self._received[flat.data_ptr()] = parts, received
        pairs = [
            operation
            for (peer, slot), part in zip(self._others, parts, strict=True)
            for operation in (
                dist.P2POp(dist.isend, slots[slot], peer, group=self._group),
                dist.P2POp(dist.irecv, part, peer, group=self._group),
            )
        ]
        return list(dist.batch_isend_irecv(pairs))

    def _room(self, own: torch.Tensor) -> torch.Tensor:
        """Return memory for the others' parts of a slot; it is kept: what is made and freed each step costs page faults."""
        numel = (self.size - 1) * own.numel()
        for place, spare in enumerate(self._spare):
            if spare.numel() == numel and spare.dtype == own.dtype:
                return self._spare.pop(place)
        return own.new_empty(numel)

    def gather(self, flat: torch.Tensor) -> Works:
        """Fill every slot of `flat` from its rank."""
        if self.size == 1:
            return []
        return all_gather(self._in_group_order(flat), self.own(flat), flat, self._group)

    def _in_group_order(self, flat: torch.Tensor) -> list[torch.Tensor]:
        slots = flat.view(self.size, -1)
        return [slots[slot] for slot in self._slots]


def reduce_scatter(slots: Sequence[torch.Tensor], own: torch.Tensor, flat: torch.Tensor, group: Any) -> Works:
    """Sum `flat` over the group, `own` in its place; the other slots are used up. `slots`: those of `flat`, in the group's order."""
    if _lie_in_order(slots, flat):
        return [_reduce_scatter_single(own, flat, group=group, async_op=True)]
    return [dist.reduce_scatter(own, list(slots), group=group, async_op=True)]


def all_gather(slots: Sequence[torch.Tensor], own: torch.Tensor, flat: torch.Tensor, group: Any) -> Works:
    """Fill every slot of `flat` from its rank; this rank's is `own`.

    On a CPU by broadcasts in place: gloo's all-gather fills a copy that it makes on a thread of its own. Copies as large as a
    bucket, made and freed on many threads, had the C library's heaps grow by one a step, up to gigabytes.
    """
    if flat.device.type == "cpu":
        return [
            dist.broadcast(slot, src=_global_rank(group, rank), group=group, async_op=True)
            for rank, slot in enumerate(slots)
        ]
    if _lie_in_order(slots, flat):
        return [_all_gather_single(flat, own, group=group, async_op=True)]
    return [dist.all_gather(list(slots), own, group=group, async_op=True)]


def _lie_in_order(slots: Sequence[torch.Tensor], flat: torch.Tensor) -> bool:
    """Say whether the group's order is that of the memory; the collectives of one tensor suppose it."""
    size = flat.nbytes // len(slots)
    return all(slot.data_ptr() == flat.data_ptr() + rank * size for rank, slot in enumerate(slots))


class _RowWires:
    """What both layouts do within the row."""

    def __init__(self, layout: Layout, group: Any, rank: int, timeout: timedelta | None) -> None:
        self._row = RankRow(group, layout.row(rank), rank, timeout)

    def scatter(self, memory: BucketMemory) -> Works:
        return self._row.scatter(memory.grads, released=memory.sharded)

    def add_up(self, memory: BucketMemory, first: bool) -> None:
        """Complete the row's sum of this rank's slot; where shards accumulate, add it to those of the step's passes before, if any."""
        self._row.add_up(memory.grads)
        if memory.sharded and first:
            memory.reduced[0].copy_(self._row.own(memory.grads))
        elif memory.sharded:
            memory.reduced[0].add_(self._row.own(memory.grads))

    def gather(self, memory: BucketMemory) -> Works:
        return self._row.gather(memory.params)

    def rewire(self, successor: Callable[[Any], Any]) -> None:
        self._row.rewire(successor)

    def give_up(self) -> None:
        self._row.give_up()


class EvenWires(_RowWires):
    """R rows of d/R ranks; the ranks of a column hold the same shard."""

    def __init__(self, layout: Layout, group: Any, rank: int, timeout: timedelta | None) -> None:
        super().__init__(layout, group, rank, timeout)
        column = layout.holders(layout.held(rank)[0])
        self._replicas = len(column)
        self._column = _subgroup(group, column, timeout)
        self._received: dict[int, torch.Tensor] = {}

    def rewire(self, successor: Callable[[Any], Any]) -> None:
        super().rewire(successor)
        self._column = successor(self._column)

    def give_up(self) -> None:
        super().give_up()
        self._received.clear()

    def exchange(self, memory: BucketMemory) -> Works:
        if self._replicas == 1:
            return []
        if memory.added_up:
            return [dist.all_reduce(memory.reduced[0], group=self._column, async_op=True)]
        own = self._row.own(memory.grads)
        if self._replicas * own.element_size() <= memory.reduced[0].element_size():
            # Two 16-bit shards are just as large as the FP32 shard that their sum will fill: no memory of its own.
            received = memory.reduced[0].view(own.dtype)[: self._replicas * own.numel()]
        else:
            received = own.new_empty(self._replicas * own.numel())
        self._received[id(memory)] = received
        parts = received.view(self._replicas, -1)
        mine = parts[dist.get_rank(self._column)]
        mine.copy_(own)
        return all_gather(list(parts), mine, received, self._column)

    def settle(self, memory: BucketMemory) -> None:
        if memory.added_up:
            return
        if self._replicas == 1:
            memory.reduced[0].copy_(self._row.own(memory.grads))
            return
        parts = self._received.pop(id(memory)).view(self._replicas, -1)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        memory.reduced[0].copy_(total)


class RingWires(_RowWires):
    """One row of all ranks; shard j is copied from rank j to its successor."""

    def __init__(self, layout: Layout, group: Any, rank: int, timeout: timedelta | None) -> None:
        super().__init__(layout, group, rank, timeout)
        self._previous = layout.held(rank)[1]
        self._ring = _subgroup(group, range(layout.world), timeout)
        self._from = _global_rank(group, self._previous)
        self._to = _global_rank(group, layout.successor[rank])

    def rewire(self, successor: Callable[[Any], Any]) -> None:
        super().rewire(successor)
        self._ring = successor(self._ring)

    def exchange(self, memory: BucketMemory) -> Works:
        give, take = self._own_and_taken(memory)
        pair = [
            dist.P2POp(dist.isend, give, self._to, group=self._ring),
            dist.P2POp(dist.irecv, take, self._from, group=self._ring),
        ]
        return list(dist.batch_isend_irecv(pair))

    def settle(self, memory: BucketMemory) -> None:
        if not memory.added_up:
            for reduced, sum_ in zip(memory.reduced, self._own_and_taken(memory), strict=True):
                reduced.copy_(sum_)

    def _own_and_taken(self, memory: BucketMemory) -> tuple[torch.Tensor, torch.Tensor]:
        if memory.added_up:
            return memory.reduced[0], memory.reduced[1]
        # The other slots of the bucket hold this rank's own gradients, which the reduce-scatter has used up.
        return self._row.own(memory.grads), memory.grads.view(self._row.size, -1)[self._previous]


def make_wires(layout: Layout, group: Any, rank: int, timeout: timedelta | None) -> Wires:
    """Build the process groups (a collective: every rank of `group`, in the same order) and return the wires."""
    kind = RingWires if layout.ring else EvenWires
    return kind(layout, group, rank, timeout)


def _subgroup(group: Any, members: Sequence[int], timeout: timedelta | None) -> Any:
    """Make a process group of its own for `members` (ranks within `group`); None for a single rank.

    Of its own, because buckets are launched from hooks: on the caller's group their order relative to the caller's own
    collectives could differ from rank to rank. Only the members take part in making it.
    """
    if len(members) < 2:
        return None
    ranks = [_global_rank(group, member) for member in members]
    return dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)


def _global_rank(group: Any, rank: int) -> int:
    return int(dist.get_global_rank(group, rank))
