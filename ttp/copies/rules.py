"""When a copy may be overwritten, which step is saved of copies, and how often ranks copy (PURE).

The argument is in the proof (docs/proof.md, L13): a rank is READY for the step behind which it copies next only when its last copy is where it
must be. So when any rank overwrites a copy of step c, every rank's next one is safe, and there is always a step whose copies are all whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SLOTS = 2
MOST_STEPS = 1000
"""Between two copies."""


def slot_of(sequence: int) -> int:
    """Return the slot of a rank's n-th copy: never the one before's."""
    return sequence % SLOTS


def waits_before(step: int, next_step: int) -> bool:
    """Say whether a rank must have its last copy safe before it is READY for `step`. `next_step`: behind which it copies next."""
    return step >= next_step


def most_lost(every: int) -> int:
    """Return how many committed steps a fault can cost at most: those since the last copy but one, whose successor is not whole yet."""
    return 2 * every - 1


def interval(copy_s: float, step_s: float, budget: float) -> int:
    """Return after how many steps a rank copies, so that copies take at most `budget` of the time. `copy_s`: what one stops training for."""
    if step_s <= 0 or copy_s <= 0:
        return 1
    return max(1, min(MOST_STEPS, math.ceil(copy_s / (budget * step_s) - 1e-9)))


@dataclass(frozen=True, slots=True)
class Offer:
    """One copy that a node has: of a rank of its own, or of another node's."""

    node: int
    rank: int
    attempt: int
    step: int
    slot: int
    groups: frozenset[str]
    received: bool = False
    """It came from another node."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What is saved: one step, each shard group from one copy."""

    step: int
    attempt: int
    sources: Mapping[Offer, frozenset[str]]


def choose(offers: Sequence[Offer], groups: frozenset[str], newer_than: int) -> Choice | None:
    """Return the newest step of which copies hold every shard group; None: there is none, or it is not newer than what is saved.

    Copies of earlier attempts do not count: what was saved since is newer, and their steps were trained anew.
    """
    attempt = max((offer.attempt for offer in offers), default=-1)
    current = [offer for offer in offers if offer.attempt == attempt]
    for step in sorted({offer.step for offer in current if offer.step > newer_than}, reverse=True):
        at = sorted(
            (offer for offer in current if offer.step == step), key=lambda one: (one.received, one.node, one.rank)
        )
        if groups and groups <= frozenset().union(*(offer.groups for offer in at)):
            return Choice(step, attempt, _sources(at, groups))
    return None


def _sources(offers: Sequence[Offer], groups: frozenset[str]) -> dict[Offer, frozenset[str]]:
    """Give each group to one of the copies that have it, the one that has got the fewest so far."""
    having: dict[str, list[Offer]] = {}
    for offer in offers:
        for group in offer.groups:
            having.setdefault(group, []).append(offer)
    given: dict[Offer, set[str]] = {}
    for group in sorted(groups):
        least = min(having[group], key=lambda offer: len(given.get(offer, ())))
        given.setdefault(least, set()).add(group)
    return {offer: frozenset(taken) for offer, taken in given.items()}
