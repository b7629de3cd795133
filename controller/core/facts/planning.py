"""Who writes which part of which shard group (PURE).

Owns the balance of bytes over writers. Every group is cut into as many parts as it has able holders, so that replicas
share the work, and each part goes to the holder with the least to write so far.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

from ttp.proto.messages import Part

from .coverage import Group

SMALLEST_PART_BYTES = 4096
"""A group is not cut finer than this: a file of its own would cost more than it saves."""

Plan = dict[int, tuple[Part, ...]]
"""Parts to write, by rank, in the order of the groups' ids; ranks with nothing to write are absent."""


def share_out(groups: Iterable[Group], able: Iterable[int]) -> tuple[Plan, float]:
    """Give every part of every group to one able holder; the caller has checked that each group has one. Returns the bytes of the largest share, too."""
    writers = frozenset(able)
    loads = dict.fromkeys(writers, 0.0)
    given: dict[int, list[Part]] = {}
    # Groups with few able holders first: they leave no choice, and the others even out around them.
    choices = []
    for group in groups:
        holders = group.holders
        if not writers.issuperset(holders):
            holders = tuple(rank for rank in holders if rank in writers)
        choices.append((len(holders), -group.nbytes, group.group_id, holders))
    choices.sort()
    for _, minus_bytes, group_id, holders in choices:
        count = max(1, min(len(holders), -(minus_bytes // SMALLEST_PART_BYTES)))
        part_bytes = -minus_bytes / count
        for index, rank in enumerate(_least_loaded(holders, loads, count, part_bytes)):
            loads[rank] += part_bytes
            part = Part(group_id, index, count)
            if rank in given:
                given[rank].append(part)
            else:
                given[rank] = [part]
    plan: Plan = {}
    for rank in sorted(given):
        parts = given[rank]
        if len(parts) > 1:
            parts.sort(key=_order)
        plan[rank] = tuple(parts)
    return plan, max(loads.values(), default=0.0)


def _least_loaded(holders: tuple[int, ...], loads: Mapping[int, float], count: int, part_bytes: float) -> Iterable[int]:
    """Return who gets each of `count` parts, one after another, if each goes to the holder with the least so far, the lowest rank among equals."""
    if len(set(map(loads.__getitem__, holders))) == 1:  # as at first; there are no more parts than holders
        return holders[:count]
    heap = [(loads[rank], rank) for rank in holders]
    heapq.heapify(heap)
    ranks = []
    for _ in range(count):
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + part_bytes, rank))
        ranks.append(rank)
    return ranks


def hand_over(parts: Iterable[Part], holders: Mapping[str, tuple[int, ...]], loads: Mapping[int, int]) -> Plan | None:
    """Give parts that lost their writer to others; None when a part has no holder left.

    holders: by group id, the ranks that may still write it. loads: bytes or parts that a rank has outstanding already.
    """
    taken = dict(loads)
    given: dict[int, list[Part]] = {}
    for part in sorted(parts, key=_order):
        ranks = holders[part.group_id]
        if not ranks:
            return None
        rank = min(ranks, key=lambda candidate: (taken.get(candidate, 0), candidate))
        taken[rank] = taken.get(rank, 0) + 1
        given.setdefault(rank, []).append(part)
    return {rank: tuple(given[rank]) for rank in sorted(given)}


def _order(part: Part) -> tuple[str, int]:
    return part.group_id, part.index
