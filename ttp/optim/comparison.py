"""Do the replicas of a shard still have the same bits? What their sums say (PURE).

Owns the reading of what the ranks have exchanged, and its words. Replicas are bit-identical by construction, so a difference
is silent corruption: of memory, of a device, or of the wire. Which replica is right, two of them cannot tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ttp.optim.shard_layout.layout import Layout

_NAMED = 4

Part = tuple[str, int, int, int]
"""(key, start, number of elements, sum) of one tensor of a shard."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """A tensor of which replicas hold different bits, as seen after `step`."""

    step: int
    key: str
    """As in a checkpoint: `optim.state.layers.0.wq.exp_avg`."""
    start: int
    """First element that the replicas hold of it."""
    numel: int
    ranks: tuple[tuple[int, ...], ...]
    """The holders, those with equal bits together; of three or more the odd one out comes first."""

    @property
    def address(self) -> str:
        return f"{self.key}[{self.start}:{self.start + self.numel}]"


def not_known(found: Sequence[Divergence], known: Sequence[Divergence]) -> tuple[Divergence, ...]:
    """Return those of `found` whose tensor is not among `known`."""
    addresses = {(divergence.key, divergence.start) for divergence in known}
    return tuple(divergence for divergence in found if (divergence.key, divergence.start) not in addresses)


def differing_shards(sums: Sequence[Sequence[int]], layout: Layout) -> tuple[int, ...]:
    """Return the shards whose holders disagree. `sums[rank]`: one sum for each shard that the rank holds, in that order."""
    seen: dict[int, set[int]] = {}
    for rank, mine in enumerate(sums):
        for shard, value in zip(layout.held(rank), mine, strict=True):
            seen.setdefault(shard, set()).add(value)
    return tuple(sorted(shard for shard, values in seen.items() if len(values) > 1))


def divergences(
    step: int, shards: Sequence[int], reported: Sequence[Mapping[int, Sequence[Part]]], layout: Layout
) -> tuple[Divergence, ...]:
    """Return the tensors that differ. `reported[rank]`: by shard, what the rank reports of the differing ones that it holds."""
    found = []
    for shard in shards:
        holders = layout.holders(shard)
        for parts in zip(*(reported[rank][shard] for rank in holders), strict=True):
            alike: dict[int, list[int]] = {}
            for rank, (_, _, _, value) in zip(holders, parts, strict=True):
                alike.setdefault(value, []).append(rank)
            if len(alike) > 1:
                key, start, numel, _ = parts[0]
                sides = sorted((tuple(sorted(side)) for side in alike.values()), key=lambda side: (len(side), side))
                found.append(Divergence(step, key, start, numel, tuple(sides)))
    return tuple(found)


def differences(found: Sequence[Divergence]) -> str:
    """Say which tensors differ, and between whom."""
    first = found[0]
    sides = " against ".join(f"rank{'s' if len(side) > 1 else ''} {', '.join(map(str, side))}" for side in first.ranks)
    names = ", ".join(divergence.address for divergence in found[:_NAMED])
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"step {first.step}: replicas differ in {names}{more}: {sides}"
