"""The simulated job's arithmetic: who holds what, what every step's record is, and what the state must be after it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from math import inf

from ttp.proto.messages import CommitRecord

_MODULUS = (1 << 61) - 1


@dataclass(frozen=True)
class Layout:
    """Which ranks hold each shard group, and on which host each rank is."""

    name: str
    holders: tuple[tuple[int, ...], ...]
    hosts: tuple[int, ...]

    @property
    def world_size(self) -> int:
        return len(self.hosts)


def even(size: int, on_one_host: int = 2) -> Layout:
    """Two halves: rank i and i + size/2 are partners."""
    half = size // 2
    holders = tuple((shard, shard + half) for shard in range(half))
    name = f"even {size}" if on_one_host < size else f"even {size} on one host"
    return Layout(name, holders, tuple(rank // on_one_host for rank in range(size)))


def ring(size: int, replicas: int = 2) -> Layout:
    """Any size: shard i is held by ranks i, i+1, ... around the ring."""
    holders = tuple(tuple(sorted((i + k) % size for k in range(replicas))) for i in range(size))
    return Layout(f"ring {size}", holders, tuple(range(size)))


def pipeline(size: int, stages: int) -> Layout:
    """Each stage of the model has its own even layout over its own ranks; rank r is in stage r % stages."""
    per_stage = even(size // stages).holders
    holders = tuple(tuple(rank * stages + stage for rank in group) for stage in range(stages) for group in per_stage)
    return Layout(f"pipeline {size}/{stages}", holders, tuple(rank // 2 for rank in range(size)))


LAYOUTS = (
    even(2), even(4), even(8), ring(3), ring(5), ring(4, replicas=3), pipeline(8, 2), even(4, on_one_host=4),
)  # fmt: skip


@dataclass(frozen=True)
class Training:
    """What a fault-free run computes. `local_copy`: records do not span the ranks; each keeps the state of one step ago."""

    layout: Layout
    steps: int
    local_copy: bool

    @cached_property
    def groups(self) -> tuple[str, ...]:
        return tuple(f"g{index}" for index in range(len(self.layout.holders)))

    def groups_of(self, rank: int) -> tuple[str, ...]:
        return self._groups_of[rank]

    @cached_property
    def _groups_of(self) -> tuple[tuple[str, ...], ...]:
        holders = self.layout.holders
        return tuple(
            tuple(group for group, ranks in zip(self.groups, holders, strict=True) if rank in ranks)
            for rank in range(self.layout.world_size)
        )

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {group: index for index, group in enumerate(self.groups)}

    def start(self, group: str) -> int:
        return int(group[1:]) + 1

    def record(self, step: int) -> CommitRecord:
        """Return the record that the spanning collective of `step` makes; every fourth step overflows."""
        return _record(step)

    def apply(self, group: str, value: int, record: CommitRecord, whole_gradients: bool) -> int:
        """Return a shard's state after an update."""
        if record.skipped:
            return value
        gradient = hash((record.step, self._numbers[group], 0 if whole_gradients else 999))
        scaled = gradient * int(record.clip_factor * 1e9) + int(record.learning_rates[0] * 1e9)
        return (value * 1_000_003 + scaled) % _MODULUS

    def expected(self, group: str, step: int) -> int:
        """Return the state of a fault-free run."""
        value = self.start(group)
        for done in range(1, step + 1):
            value = self.apply(group, value, self.record(done), True)
        return value

    def next_host_state(self, before: int, step: int) -> int:
        """Return what the trainer remembers after `step` (data position, random numbers), from what it remembered before."""
        return (before * 31 + 7 * step + 1) % _MODULUS

    def host_state(self, step: int) -> int:
        """Return the host state of a fault-free run."""
        state = 0
        for done in range(1, step + 1):
            state = self.next_host_state(state, done)
        return state

    def collectives(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that share this rank's gradient-norm collective."""
        return self._collectives[rank % 2]

    @cached_property
    def _collectives(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        size = self.layout.world_size
        if not self.local_copy:
            return tuple(range(size)), tuple(range(size))
        return tuple(range(0, size, 2)), tuple(range(1, size, 2))


@cache
def _record(step: int) -> CommitRecord:
    skipped = step % 4 == 3
    return CommitRecord(step, inf if skipped else 1.0 + step / 8, 0.5 / step, skipped, 2.0, (0.1 / step,), (1.0,))
