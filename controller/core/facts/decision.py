"""Which step the survivors write, and who has to roll forward for it (PURE).

Owns the rule of the protocol: the newest step at which every shard group has a live holder that has that step or can
reach it alone. Knows nothing of stages, deadlines or messages to send.

Why one such step exists whenever every group has a holder: a commit record of step t can only come out of the collective
that every rank entered at READY(t). So with a record every survivor can finish step t alone, and without one no rank has
begun it and all are at t-1.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from ttp.proto.frozen import dataclass
from ttp.proto.messages import CommitRecord, Phase, StateReport

from .coverage import Group

_NAMED = 4


@dataclass(frozen=True, slots=True)
class Decision:
    """Write step `step`."""

    step: int
    record: CommitRecord | None
    """Commit record of `step`, if any rank reported it."""
    roll_forward: tuple[int, ...]
    """Holders that are at step-1 and reach `step` with the record (ascending)."""
    able: tuple[int, ...]
    """Holders that have `step`, or have it after rolling forward (ascending)."""
    copies: bool = False
    """Some rank keeps a local copy: an older step may be covered as well."""

    def rolls(self, rank: int) -> bool:
        """Say whether this rank rolls forward. O(log world)."""
        place = bisect_left(self.roll_forward, rank)
        return self.roll_forward[place : place + 1] == (rank,)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nothing can be written, and why."""

    reason: str
    missing: tuple[str, ...] = ()
    """Labels of the shard groups without a usable holder."""


def decide(
    groups: Iterable[Group],
    reports: Mapping[int, StateReport],
    records: Mapping[int, CommitRecord],
    unreachable: frozenset[tuple[int, int]] = frozenset(),
    absent: Mapping[int, str] | None = None,
    unwritable: Collection[int] = (),
) -> Decision | Refusal:
    """Choose the step to write.

    reports: what the live ranks reported whose gate may be trusted; dead and stuck ranks are not among them.
    records: by step, from any rank that ever reported one, stuck and dead ones too: a record is a proof, not a state.
    unreachable: (rank, step) pairs where rolling forward was tried and failed.
    absent: for people, why a holder is not among the reports.
    unwritable: steps that no directory took.
    """
    groups = tuple(groups)
    usable = {rank: report for rank, report in reports.items() if report.closed and not report.torn}
    offers = _offers(usable, records, unreachable)
    best: tuple[int, list[Group]] | None = None
    for step in sorted(offers.keys() - unwritable, reverse=True):
        having, reaching = offers[step]
        able = having | reaching
        lacking = [group for group in groups if able.isdisjoint(group.holders)]
        if not lacking:
            copies = any(report.backup_step >= 0 for report in usable.values())
            return _decision(step, records.get(step), having, able, copies)
        if best is None or len(lacking) < len(best[1]):
            best = (step, lacking)
    if best is None:
        best = (0, list(groups))
    return _refusal(*best, usable, absent or {})


def _offers(
    usable: Mapping[int, StateReport],
    records: Mapping[int, CommitRecord],
    unreachable: frozenset[tuple[int, int]],
) -> dict[int, tuple[set[int], set[int]]]:
    """Return, by step, the ranks that have it in memory, and those that reach it with its record.

    Only a rank that reported READY(t) reaches t: the report of a closed gate stands still, so one that reported
    COMPUTE(t) never has final gradients of t. Where records span the ranks it cannot meet a record of t either, because
    the collective that makes the record waits for it; where they do not (local copies), its t-1 is what it has.
    """
    offers: defaultdict[int, tuple[set[int], set[int]]] = defaultdict(lambda: (set(), set()))
    for (
        rank,
        report,
    ) in usable.items():  # plain, and once: this runs for every rank between the last report and the orders
        state_step, backup_step, step = report.state_step, report.backup_step, report.step
        offers[state_step][0].add(rank)
        if backup_step >= 0:
            offers[backup_step][0].add(rank)
        ready = report.phase is Phase.READY and step == state_step + 1
        if ready and step in records and (rank, step) not in unreachable:
            offers[step][1].add(rank)
    return offers


def _decision(
    step: int, record: CommitRecord | None, having: set[int], able: set[int], copies: bool
) -> Decision | Refusal:
    if step == 0:
        return Refusal("no optimizer step was finished yet, so there is nothing to save")
    return Decision(step, record, tuple(sorted(able - having)), tuple(sorted(able)), copies)


def _refusal(step: int, lacking: list[Group], usable: Mapping[int, StateReport], absent: Mapping[int, str]) -> Refusal:
    """Name the shards that no live rank can write, who held them, and what became of those ranks."""
    missing = []
    for group in lacking[:_NAMED]:
        holders = ", ".join(_fate(rank, usable, absent) for rank in group.holders[:_NAMED])
        more = f" and {len(group.holders) - _NAMED} more" if len(group.holders) > _NAMED else ""
        missing.append(f"{group.label} (held by {holders}{more})")
    more = f", and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
    where = f" at step {step}" if step else ""
    reason = f"no live rank can write{where}: {'; '.join(missing)}{more}"
    return Refusal(reason, tuple(group.label for group in lacking))


def _fate(rank: int, usable: Mapping[int, StateReport], absent: Mapping[int, str]) -> str:
    if rank in usable:
        return f"rank {rank}, which is at step {usable[rank].state_step}"
    return f"rank {rank}, {absent.get(rank, 'which did not answer')}"
