"""The shards that this rank holds: FP32 masters, base state, reduced gradients, and the local copy of the step before.

Owns the memory that a checkpoint is written from. Updates it by local maths alone: no collective, no lock, nothing
that can wait for another rank, so that any thread that has the gate may call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from ttp.checkpoint.format.types import HeldTensor
from ttp.optim.base_state import create_state
from ttp.optim.collectives import BucketMemory
from ttp.optim.shard_layout.layout import Layout, ParamSpec, Segment

_CHUNK = 65_536
"""Elements converted to FP64 at a time when squares are summed on a CPU."""


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A segment as the base optimizer sees it: a 1-D FP32 parameter that ends on ALIGN (the rest is zeros)."""

    segment: Segment
    spec: ParamSpec
    place: int
    """Row of `masters` and `reduced`: index into Layout.held(rank)."""
    param: torch.nn.Parameter

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_first(self) -> bool:
        """True when the whole parameter's first element is here."""
        return self.segment.start == 0 and not any(self.spec.offsets)


@dataclass(frozen=True, slots=True, eq=False)
class _Update:
    """One bucket's base optimizer; `groups[i]` is the optimizer's param group behind base.param_groups[i]."""

    base: Optimizer
    reduced: tuple[torch.Tensor, ...]
    groups: tuple[int, ...]


class HeldShards:
    """Masters and state of `layout.held(rank)`."""

    def __init__(
        self, layout: Layout, rank: int, memory: Sequence[BucketMemory], local_copy: bool, masters_apart: bool
    ) -> None:
        """masters_apart: masters of FP32 parameters have memory of their own, as those of shorter ones always have."""
        self._layout, self._rank = layout, rank
        self._held = layout.held(rank)
        self._memory = memory
        self._in_params = [not masters_apart and m.params.dtype == torch.float32 for m in memory]
        self._masters = [self._masters_of(m, in_params) for m, in_params in zip(memory, self._in_params, strict=True)]
        self._local_copy = local_copy
        self._updates: list[_Update] = []
        self._pieces: list[_Piece] = []
        self.updated = 0
        """Buckets updated so far: it grows while an update progresses."""
        self._copies: dict[int, torch.Tensor] = {}
        self._pairs: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self.masters_from_params()

    def create_base(
        self, base: Callable[..., Optimizer], kwargs: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Build one base optimizer per bucket over this rank's pieces, with their fresh state. Called once."""
        by_bucket: dict[int, list[_Piece]] = {}
        for place, shard in enumerate(self._held):
            for segment in self._layout.shard_segments(shard):
                run = slice(segment.offset, segment.offset + segment.padded)
                param = torch.nn.Parameter(self._masters[segment.bucket][place][run])
                param.grad = self._memory[segment.bucket].reduced[place][run]
                piece = _Piece(segment, self._layout.params[segment.param], place, param)
                self._pieces.append(piece)
                by_bucket.setdefault(segment.bucket, []).append(piece)
        for bucket, pieces in sorted(by_bucket.items()):
            used = tuple(sorted({piece.segment.group for piece in pieces}))
            cut = [{**groups[group], "params": [p.param for p in pieces if p.segment.group == group]} for group in used]
            update = _Update(base(cut, **kwargs), self._memory[bucket].reduced, used)
            create_state(update.base)
            self._updates.append(update)
        self._state = self._find_state()
        if self._local_copy:
            live = [row for rows in self._masters for row in rows]
            live += [value for state in self._state for value in state.values()]
            copies = [value.clone() for value in live]
            self._pairs = (live, copies)
            self._copies = {id(value): copy for value, copy in zip(live, copies, strict=True)}

    @torch.no_grad()
    def warm_up(
        self,
        base: Callable[..., Optimizer],
        kwargs: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]],
        clamped: bool,
    ) -> None:
        """Do each bucket's update once on memory that is given back: the device then has its kernels loaded and the current stream has the
        memory for temporary values, so that a roll forward asks for neither. Not only the largest bucket's: a smaller one may need kernels of
        another group's settings, or more memory for temporary values where it is cut into more tensors."""
        if self._local_copy:
            self.copy_now()
        for update in self._updates:
            cut = [
                {**groups[number], "params": [torch.nn.Parameter(torch.zeros_like(param)) for param in group["params"]]}
                for group, number in zip(update.base.param_groups, update.groups, strict=True)
            ]
            for group in cut:
                for param in group["params"]:
                    param.grad = torch.zeros_like(param).mul_(1.0)
                    if clamped:
                        param.grad.clamp_(0.0, 0.0)
            base(cut, **kwargs).step()

    def masters_from_params(self) -> None:
        """Take the parameters as they are for masters."""
        for rows, memory in zip(self._masters, self._memory, strict=True):
            slots = memory.params.view(self._layout.shards, -1)
            for row, shard in zip(rows, self._held, strict=True):
                if row.data_ptr() != slots[shard].data_ptr():
                    row.copy_(slots[shard])

    def masters_to_params(self, bucket: int) -> None:
        """Round this rank's own shard of `bucket` into the parameters, ready to be gathered, where it does not lie there anyway."""
        if self._in_params[bucket]:
            return
        slots = self._memory[bucket].params.view(self._layout.shards, -1)
        slots[self._held[0]].copy_(self._masters[bucket][0])

    def square_sum(self) -> torch.Tensor:
        """Return the FP64 0-d sum of squares of the reduced gradients that this rank counts: a shard's holders count a run each.

        Finite FP32 values cannot overflow it: it is finite exactly when every element is.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._masters[0][0].device)
        for bucket, memory in zip(self._layout.buckets, self._memory, strict=True):
            if bucket.counted:
                for shard, row in zip(self._held, memory.reduced, strict=True):
                    start, stop = self._layout.counted_run(bucket, shard, self._rank)
                    total += _squares(row[start:stop])
        return total

    def copy_now(self) -> None:
        """Keep masters and state as they are for `held_tensors(backup=True)`."""
        if self._local_copy:
            torch._foreach_copy_(self._pairs[1], self._pairs[0])

    def update(
        self,
        factor: float,
        clamp: float | None,
        groups: Sequence[Mapping[str, Any]],
        learning_rates: Sequence[float],
        midway: Callable[[], None],
    ) -> None:
        """Unscale (and clamp) the reduced gradients in place and run the base optimizers on them."""
        for index, update in enumerate(self._updates):
            for row in update.reduced:
                if factor != 1.0:
                    row.mul_(factor)
                if clamp is not None:
                    row.clamp_(-clamp, clamp)
            if index == len(self._updates) // 2:
                midway()
            for group, number in zip(update.base.param_groups, update.groups, strict=True):
                group.update(groups[number])
                group["lr"] = learning_rates[number]
            update.base.step()
            self.updated += 1
        if not self._updates:  # a small model leaves this rank nothing but padding
            midway()

    def held_tensors(self, shard: int, backup: bool) -> list[HeldTensor]:
        """Return views of everything in `shard` that is counted here, under the checkpoint's keys.

        A 0-d state tensor (`step`) belongs to the whole parameter and comes with the piece that has its first element.
        """
        place = self._held.index(shard)
        return [
            tensor
            for number, piece in enumerate(self._pieces)
            if piece.place == place and piece.spec.counted
            for tensor in self._of_piece(number, backup, with_scalars=piece.is_first)
        ]

    def everything_of(self, shard: int) -> list[torch.Tensor]:
        """Return all memory of a shard that an update changes, padding included: masters and state, in the same order on each of its holders."""
        place = self._held.index(shard)
        pieces = zip(self._pieces, self._state, strict=True)
        state = [value for piece, values in pieces if piece.place == place for value in values.values()]
        return [rows[place] for rows in self._masters] + state

    def targets(self) -> list[HeldTensor]:
        """Return views of all that a loader must fill; each (key, start) once."""
        seen: set[str] = set()
        found: list[HeldTensor] = []
        for number, piece in enumerate(self._pieces):
            found.extend(self._of_piece(number, backup=False, with_scalars=piece.name not in seen))
            seen.add(piece.name)
        return found

    def spread_scalars(self) -> None:
        """After a load, give every piece of a parameter the 0-d state that its first piece got."""
        first: dict[str, dict[str, torch.Tensor]] = {}
        for piece, state in zip(self._pieces, self._state, strict=True):
            source = first.setdefault(piece.name, state)
            for key, value in state.items():
                if value.dim() == 0 and source is not state:
                    value.copy_(source[key])

    def bytes_held(self) -> int:
        """Count state, local copies, and the masters and reduced gradients that have memory of their own, padding included."""
        tensors = [value for state in self._state for value in state.values()]
        tensors += [
            row for rows, in_params in zip(self._masters, self._in_params, strict=True) for row in rows[in_params:]
        ]
        tensors += [row for memory in self._memory if not memory.in_place for row in memory.reduced]
        tensors += self._pairs[1]
        return sum(t.numel() * t.element_size() for t in tensors)

    def _masters_of(self, memory: BucketMemory, in_params: bool) -> tuple[torch.Tensor, ...]:
        """Return the memory of the masters of one bucket: with `in_params` the shard that this rank gathers for the others (the first)
        is the parameters' own. The ring's second one is not: the gather writes there, and would hide what differs."""
        first = memory.params.view(self._layout.shards, -1)[self._held[0]]
        rows = [torch.zeros_like(row) for row in memory.reduced[in_params:]]
        return (first, *rows) if in_params else tuple(rows)

    def _find_state(self) -> list[dict[str, torch.Tensor]]:
        bases = {id(p): update.base for update in self._updates for g in update.base.param_groups for p in g["params"]}
        return [
            {key: value for key, value in bases[id(piece.param)].state[piece.param].items() if torch.is_tensor(value)}
            for piece in self._pieces
        ]

    def _of_piece(self, number: int, backup: bool, with_scalars: bool) -> Iterator[HeldTensor]:
        piece, segment = self._pieces[number], self._pieces[number].segment
        spec = self._layout.params[segment.param]
        shape, block = spec.whole_shape, spec.block
        master = self._masters[segment.bucket][piece.place]
        row = self._copies[id(master)] if backup else master
        yield HeldTensor(f"model.{spec.name}", shape, segment.start, row[segment.offset :][: segment.numel], block)
        for key, live in self._state[number].items():
            value = self._copies[id(live)] if backup else live
            name = f"optim.state.{spec.name}.{key}"
            if value.dim():
                yield HeldTensor(name, shape, segment.start, value[: segment.numel], block)
            elif with_scalars:
                yield HeldTensor(name, (), 0, value.view(1))


def _squares(values: torch.Tensor) -> torch.Tensor:
    if values.device.type != "cpu":
        norm: torch.Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
        return norm.square()
    total = torch.zeros((), dtype=torch.float64)
    for chunk in torch.split(values, _CHUNK):  # a tenth of the time of vector_norm with an FP64 result, and no big copy
        wide = chunk.double()
        total += wide.dot(wide)
    return total
