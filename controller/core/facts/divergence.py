"""Which replicas are wrong: what most of all holders of a shard prove, and nothing else (PURE).

Owns what is read from the digests in ranks' reports. A rank reports digests of what it holds itself, and only of shards whose holders have found in
a collective that they differ. So no rank accuses another one, and a replica counts as wrong only where more than half of all holders that a
shard has, lost ones included, report one digest and this one reports another. How many those are the digests say: a controller that took over
knows only holders that came to it. A holder that has reported no digest of a shard that differs is neither right nor wrong: nothing is taken from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ttp.proto.frozen import dataclass
from ttp.proto.messages import StateReport

from .coverage import Group, named


@dataclass(frozen=True, slots=True)
class Dispute:
    """What the holders' digests prove."""

    wrong: frozenset[int] = frozenset()
    """Ranks whose replica is wrong."""
    undecided: tuple[str, ...] = ()
    """What is said of each shard group that differs, without a proof of who is wrong."""
    unproven: frozenset[int] = frozenset()
    """Ranks that have reported no digest of a shard that other holders have: any bits may be theirs."""


def judge(groups: Iterable[Group], reports: Mapping[int, StateReport]) -> Dispute:
    """Return what these reports prove; they are of ranks that live, and whose gates are closed. O(groups + holders) where there is a digest."""
    known = {
        (rank, digest.group_id): digest
        for rank, report in reports.items()
        if report.closed and not report.torn
        for digest in report.digests
    }
    if not known:
        return Dispute()
    wrong: set[int] = set()
    unproven: set[int] = set()
    undecided: list[str] = []
    for group in groups:
        digests = {rank: known[rank, group.group_id] for rank in group.holders if (rank, group.group_id) in known}
        if not digests:
            continue
        unproven.update(rank for rank in group.holders if rank in reports and rank not in digests)
        holders = max(len(group.holders), *(digest.holders for digest in digests.values()))
        value, count = Counter(digest.value for digest in digests.values()).most_common(1)[0]
        if 2 * count > holders:
            wrong.update(rank for rank, digest in digests.items() if digest.value != value)
        else:
            undecided.append(f"{group.label} (held by {named('rank', group.holders)})")
    return Dispute(frozenset(wrong), tuple(undecided), frozenset(unproven))
