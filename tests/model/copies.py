"""Every order of what a few ranks, their keepers and one lost node can do around copies in memory, over the shipped rules.

Owns the situations and their judgement: after any of them, what remains is offered to `rules.choose`, which must find the newest step that is whole,
and not more than `rules.most_lost` steps behind the newest that was committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ttp.copies import rules
from ttp.copies.rules import Choice, Offer

ATTEMPT = 1


@dataclass(frozen=True)
class Protocol:
    """The rules that are searched; a mutant has others."""

    slot_of: Callable[[int], int] = rules.slot_of
    waits_before: Callable[[int, int], bool] = rules.waits_before
    choose: Callable[[Sequence[Offer], frozenset[str], int], Choice | None] = rules.choose
    most_lost: Callable[[int], int] = rules.most_lost
    safe_when_sent: bool = True
    """False: a copy counts as safe as soon as its rank has taken it."""


@dataclass(frozen=True)
class Shape:
    """A job of two nodes at most."""

    nodes: tuple[int, ...]
    """Of each rank."""
    groups: tuple[str, ...]
    """Of each rank, one letter a shard group."""
    every: int
    steps: int = 8
    left_over: tuple[Offer, ...] = ()
    """What a node that took no part in this attempt has of an earlier one."""

    def sends(self, rank: int) -> bool:
        """As `StepCopies` has it: some group of this rank's is on no other node."""
        elsewhere = {g for r, groups in enumerate(self.groups) if self.nodes[r] != self.nodes[rank] for g in groups}
        return len(set(self.nodes)) > 1 and not set(self.groups[rank]) <= elsewhere


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank, its memory, and what the next node has of it. A slot holds a step; 0: nothing whole."""

    phase: str = "compute"
    step: int = 1
    next: int = 0
    count: int = 0
    pending: bool = False
    dead: bool = False
    last: int = 0
    """The step of the last copy."""
    way: str = ""
    """Of the last copy to safety: waiting, sending, or over."""
    own: tuple[int, int] = (0, 0)
    away: tuple[int, int] = (0, 0)

    @property
    def ready(self) -> int:
        """The newest step for which this rank was READY."""
        return self.step - (self.phase == "compute")


@dataclass(frozen=True, slots=True)
class Situation:
    ranks: tuple[Rank, ...]
    lost: int = -1
    """The node that is lost."""
    unsafe: bool = False
    """A keeper has said of a copy, before a node was lost, that it is not safe."""

    def having(self, number: int, rank: Rank) -> Situation:
        return replace(self, ranks=(*self.ranks[:number], rank, *self.ranks[number + 1 :]))

    @property
    def committed(self) -> int:
        """The newest step of which some rank can have the record (L2)."""
        return min(rank.ready for rank in self.ranks)


def with_slot(slots: tuple[int, int], slot: int, step: int) -> tuple[int, int]:
    return (step, slots[1]) if slot == 0 else (slots[0], step)


@dataclass
class Search:
    """All situations of a shape, breadth first."""

    shape: Shape
    protocol: Protocol = field(default_factory=Protocol)
    most_lost: dict[bool, int] = field(default_factory=dict)
    """With a node lost, and without: the most steps that any situation costs."""

    def run(self) -> str:
        """Return the first violation; empty: there is none."""
        first = Situation(tuple(Rank() for _ in self.shape.nodes))
        seen, level = {first}, [first]
        while level:
            for situation in level:
                if wrong := self._judge(situation):
                    return f"{wrong} {situation}"
            found = {after for situation in level for after in self._after(situation)} - seen
            seen |= found
            level = list(found)
        return ""

    # --- what may happen ---

    def _after(self, situation: Situation) -> Iterator[Situation]:
        for number, rank in enumerate(situation.ranks):
            if not rank.dead:
                yield from self._trains(situation, number, rank)
                yield situation.having(number, replace(rank, dead=True))
            if rank.way and self.shape.nodes[number] != situation.lost:
                yield from self._keeps(situation, number, rank)
        if situation.lost < 0 and len(set(self.shape.nodes)) > 1:
            for node in sorted(set(self.shape.nodes)):
                ranks = zip(situation.ranks, self.shape.nodes, strict=True)
                dead = tuple(replace(rank, dead=True) if of == node else rank for rank, of in ranks)
                yield replace(situation, ranks=dead, lost=node)

    def _trains(self, situation: Situation, number: int, rank: Rank) -> Iterator[Situation]:
        slot = self.protocol.slot_of(rank.count + 1)
        if rank.phase == "compute":
            if rank.step <= self.shape.steps and not (
                rank.pending and self.protocol.waits_before(rank.step, rank.next)
            ):
                yield situation.having(number, replace(rank, phase="ready"))
        elif rank.phase == "copy":
            taken = replace(
                rank, phase="compute", step=rank.step + 1, next=rank.step + self.shape.every, count=rank.count + 1,
                last=rank.step, own=with_slot(rank.own, slot, rank.step), way="waiting",
                pending=self.protocol.safe_when_sent,
            )  # fmt: skip
            yield situation.having(number, taken)
        elif situation.committed >= rank.step:  # the spanning collective has ended
            if rank.step >= rank.next:
                yield situation.having(number, replace(rank, phase="copy", own=with_slot(rank.own, slot, 0)))
            else:
                yield situation.having(number, replace(rank, phase="compute", step=rank.step + 1))

    def _keeps(self, situation: Situation, number: int, rank: Rank) -> Iterator[Situation]:
        slot = self.protocol.slot_of(rank.count)
        over = replace(rank, way="", pending=False)
        if not self.shape.sends(number):
            yield situation.having(number, over)
            return
        yield replace(situation.having(number, over), unsafe=situation.unsafe or situation.lost < 0)  # it has failed
        if situation.lost >= 0:
            return
        if rank.way == "waiting":
            yield situation.having(number, replace(rank, way="sending", away=with_slot(rank.away, slot, 0)))
        else:
            yield situation.having(number, replace(over, away=with_slot(rank.away, slot, rank.last)))

    # --- what remains ---

    def offers(self, situation: Situation) -> list[Offer]:
        found = list(self.shape.left_over)
        for number, rank in enumerate(situation.ranks):
            home, groups = self.shape.nodes[number], frozenset(self.shape.groups[number])
            for node, slots in ((home, rank.own), (1 - home, rank.away)):
                if node != situation.lost:
                    found += [
                        Offer(node, number, ATTEMPT, step, slot, groups, node != home)
                        for slot, step in enumerate(slots)
                        if step
                    ]
        return found

    def _judge(self, situation: Situation) -> str:
        offers, groups = self.offers(situation), frozenset("".join(self.shape.groups))
        choice = self.protocol.choose(offers, groups, 0)
        current = [offer for offer in offers if offer.attempt == ATTEMPT]
        if choice is not None:
            if any(s.attempt != ATTEMPT or s.step != choice.step or s not in current for s in choice.sources):
                return "a source is not a whole copy of this step and attempt:"
            if any(not taken <= source.groups for source, taken in choice.sources.items()):
                return "a source has not what is taken of it:"
            taken_of = sorted(group for taken in choice.sources.values() for group in taken)
            if taken_of != sorted(groups):
                return f"taken are {taken_of}:"
        whole = [
            step
            for step in {offer.step for offer in current}
            if groups <= {group for offer in current if offer.step == step for group in offer.groups}
        ]
        step = choice.step if choice is not None else 0
        if step != max(whole, default=0):
            return f"chosen is {step} of {sorted(whole)}:"
        if situation.lost >= 0 and situation.unsafe:
            return ""  # it was said
        lost, node = situation.committed - step, situation.lost >= 0
        self.most_lost[node] = max(self.most_lost.get(node, 0), lost)
        return f"{lost} steps are lost:" if lost > self.protocol.most_lost(self.shape.every) else ""
