"""Who writes which part of which shard group (PURE).

Owns the balance of bytes over writers. Every group is cut into as many parts as it has able holders, so that replicas
share the work, and each part goes to the holder with the least to write so far.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from operator import itemgetter

from ttp.proto.messages import Part

from .coverage import Group

SMALLEST_PART_BYTES = 4096
"""A group is not cut finer than this: a file of its own would cost more than it saves."""

Plan = dict[int, tuple[Part, ...]]
"""Parts to write, by rank, in the order of the groups' ids; ranks with nothing to write are absent."""


def share_out(groups: Iterable[Group], able: Iterable[int]) -> tuple[Plan, float]:
    """Give every part of every group to one able holder; the caller has checked that each group has one. Returns the bytes of the largest share, too."""
    writers = set(able)
    loads = dict.fromkeys(sorted(writers), 0.0)
    given: dict[int, list[Part]] = {}
    # Groups with few able holders first: they leave no choice, and the others even out around them.
    choices = [
        (len(holders), -group.nbytes, group.group_id, group, holders)
        for group in groups
        for holders in ([rank for rank in group.holders if rank in writers],)
    ]
    choices.sort(key=itemgetter(0, 1, 2))
    for _, _, _, group, holders in choices:
        count = max(1, min(len(holders), -(-group.nbytes // SMALLEST_PART_BYTES)))
        part_bytes = group.nbytes / count
        heap = [(loads[rank], rank) for rank in holders]
        heapq.heapify(heap)
        for index in range(count):
            load, rank = heap[0]
            loads[rank] = load = load + part_bytes
            if index + 1 < count:
                heapq.heapreplace(heap, (load, rank))
            part = Part(group.group_id, index, count)
            if rank in given:
                given[rank].append(part)
            else:
                given[rank] = [part]
    plan = {
        rank: tuple(sorted(parts, key=_order)) if len(parts) > 1 else tuple(parts)
        for rank, parts in sorted(given.items())
    }
    return plan, max(loads.values(), default=0.0)


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
