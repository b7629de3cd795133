"""Which ranks hold which shards, and what the job survives (PURE).

Owns the arithmetic over holder sets. Never asks who is alive: that is membership's. Everything is O(groups + holders):
the pairs that a job does not survive are counted from the groups with two holders, never by trying all pairs.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from math import comb

from ttp.proto.frozen import dataclass, replace
from ttp.proto.messages import Registration
from ttp.text.wording import runs, size_text

_NAMED = 8
"""How many ranks, nodes or shards a sentence names before it says how many more there are."""

_EACH = 16
"""Up to so many ranks, and then nodes, have a line each in the overview."""

_NONE = "no other"


@dataclass(frozen=True, slots=True)
class Group:
    """Shards that always move together, with every rank that registered them (ascending)."""

    group_id: str
    label: str
    nbytes: int
    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Coverage:
    """The whole job's shards. `groups` in the order of their ids; `hosts` indexed by rank."""

    groups: tuple[Group, ...]
    hosts: tuple[str, ...]
    copied: bool = False
    """Every rank's shards are copied into agents' memory, a few steps behind."""


def coverage_of(registrations: Iterable[Registration], world_size: int = 0) -> Coverage:
    """Gather the groups of these ranks, by one registration of each. Those of a standby are of the ranks that came: `world_size` says how many there
    are, and the others' hosts are empty."""
    ordered = sorted(registrations, key=lambda registration: registration.rank)
    holders: dict[str, list[int]] = {}
    first: dict[str, tuple[str, int]] = {}
    for registration in ordered:
        for group in registration.groups:
            holders.setdefault(group.group_id, []).append(registration.rank)
            first.setdefault(group.group_id, (group.label, group.nbytes))
    groups = tuple(Group(key, *first[key], tuple(sorted(set(holders[key])))) for key in sorted(holders))
    hosts = {registration.rank: registration.host for registration in ordered}
    copied = bool(ordered) and all(registration.copies for registration in ordered)
    return Coverage(groups, tuple(hosts.get(rank, "") for rank in range(max(world_size, len(hosts)))), copied)


def among(coverage: Coverage, holders: Container[int]) -> Coverage:
    """Return the coverage by these ranks alone: a group may have no holder then. O(groups + holders)."""
    groups = tuple(
        replace(group, holders=tuple(rank for rank in group.holders if rank in holders)) for group in coverage.groups
    )
    return replace(coverage, groups=groups)


def fatal_ranks(coverage: Coverage) -> tuple[int, ...]:
    """Return the ranks whose death alone leaves a shard without a holder."""
    return tuple(sorted({group.holders[0] for group in coverage.groups if len(group.holders) == 1}))


def survived_pairs(coverage: Coverage) -> tuple[int, int]:
    """Return (pairs of ranks that the job can lose together, pairs there are)."""
    world_size = len(coverage.hosts)
    fatal = set(fatal_ranks(coverage))
    partners = {group.holders for group in coverage.groups if len(group.holders) == 2}
    lost_together = sum(1 for pair in partners if not fatal.intersection(pair))
    return comb(world_size - len(fatal), 2) - lost_together, comb(world_size, 2)


def fatal_hosts(coverage: Coverage) -> tuple[str, ...]:
    """Return the nodes whose loss leaves a shard without a holder."""
    fatal = set()
    for group in coverage.groups:
        hosts = {coverage.hosts[rank] for rank in group.holders}
        if len(hosts) == 1:
            fatal.update(hosts)
    return tuple(sorted(fatal))


def survives(coverage: Coverage) -> str:
    """Say what the job survives: `any 1 of 8 ranks; 24 of 28 pairs; each of 2 nodes`."""
    world_size = len(coverage.hosts)
    fatal = fatal_ranks(coverage)
    if not fatal:
        ranks = f"any 1 of {world_size} ranks"
    else:
        ranks = f"{world_size - len(fatal)} of {world_size} ranks (not {named('rank', fatal)})"
    parts = [ranks]
    if world_size > 2:
        good, pairs = survived_pairs(coverage)
        parts.append(f"{good} of {pairs} pairs")
    hosts = sorted(set(coverage.hosts))
    if len(hosts) > 1:
        lost = fatal_hosts(coverage)
        nodes = f"{len(hosts) - len(lost)} of {len(hosts)} nodes (not {named('node', lost)})"
        parts.append(nodes if lost else f"each of {len(hosts)} nodes")
    if coverage.copied:
        parts.append("all others from copies in memory, some steps back")
    return "; ".join(parts)


def warnings(coverage: Coverage) -> tuple[str, ...]:
    """Say which shards are worse protected than this world allows; at most a handful of sentences."""
    advice = (
        "raise the number of replicas, or of data-parallel ranks"
        if len(coverage.hosts) > 1
        else "replicas need more ranks"
    )
    if coverage.copied:
        return ()
    alone = [group for group in coverage.groups if len(group.holders) == 1]
    found = [
        f"{group.label} is held by rank {group.holders[0]} only: its death loses the step; {advice}"
        for group in alone[:_NAMED]
    ]
    together: list[Group] = []
    nodes = len(set(coverage.hosts))
    if nodes > 1:
        together = [g for g in coverage.groups if len(g.holders) > 1 and _share_a_host(coverage, g, nodes)]
    found += [
        f"{group.label}: its holders, {named('rank', group.holders)}, do not all sit on different nodes"
        for group in together[:_NAMED]
    ]
    more = max(0, len(alone) - _NAMED) + max(0, len(together) - _NAMED)
    return (*found, f"{more} more shard groups are protected as badly") if more else tuple(found)


@dataclass(frozen=True, slots=True)
class CoverageRow:
    """What one rank of a small job, or one node of a larger one, holds."""

    ranks: str
    """`3`, or a node's `0-7`; empty: only says how many nodes are not listed."""
    host: str
    shards: tuple[str, ...]
    """Empty for a node."""
    also_on: tuple[str, ...]
    """Where the replicas are: shard by shard, or of all of a node's shards together."""


def rows(coverage: Coverage) -> tuple[CoverageRow, ...]:
    """Return what lies where: a row for each rank of a small job, for each of the first nodes of a larger one."""
    held: dict[int, list[Group]] = {rank: [] for rank in range(len(coverage.hosts))}
    for group in coverage.groups:
        for rank in group.holders:
            held[rank].append(group)
    if len(held) <= _EACH:
        return tuple(_rank_row(coverage.hosts[rank], rank, groups) for rank, groups in held.items())
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(coverage.hosts):
        nodes.setdefault(host, []).append(rank)
    found = [_node_row(host, ranks, held) for host, ranks in list(nodes.items())[:_EACH]]
    more = len(nodes) - len(found)
    return (*found, CoverageRow("", f"and {more} more nodes", (), ())) if more else tuple(found)


def overview(coverage: Coverage) -> tuple[str, ...]:
    """Say what lies where: a line for each rank of a small job, for each node of a larger one."""
    by_rank = len(coverage.hosts) <= _EACH
    return tuple(_rank_line(row) if by_rank else _node_line(row) for row in rows(coverage))


def _rank_row(host: str, rank: int, groups: list[Group]) -> CoverageRow:
    shards = [f"{_short(group.label)} ({size_text(group.nbytes)})" for group in groups]
    return CoverageRow(str(rank), host, tuple(shards), tuple(_others(rank, group) for group in groups))


def _short(label: str) -> str:
    """Return a label without the list of its tensors, which begins at the first ": ": a colon alone belongs to an offset."""
    return label.partition(": ")[0]


def _others(rank: int, group: Group) -> str:
    others = [holder for holder in group.holders if holder != rank]
    return named("rank", others) if others else f"{_NONE} rank"


def _rank_line(row: CoverageRow) -> str:
    """`rank 0 on node a: shard 0 (1.0 MiB), also on rank 2`."""
    held = [f"{shard}, {_elsewhere(others)}" for shard, others in zip(row.shards, row.also_on, strict=True)]
    return f"rank {row.ranks} on node {row.host}: {'; '.join(held) or 'no shard'}"


def _node_row(host: str, ranks: list[int], held: dict[int, list[Group]]) -> CoverageRow:
    mine = set(ranks)
    others = sorted(
        {holder for rank in ranks for group in held[rank] for holder in group.holders if holder not in mine}
    )
    return CoverageRow(runs(ranks, _NAMED), host, (), (f"ranks {runs(others, _NAMED)}" if others else f"{_NONE} node",))


def _node_line(row: CoverageRow) -> str:
    """`node a: ranks 0-7, their shards also on ranks 8-15`."""
    if not row.ranks:
        return row.host
    return f"node {row.host}: ranks {row.ranks}, their shards {_elsewhere(row.also_on[0])}"


def _elsewhere(others: str) -> str:
    return f"on {others}" if others.startswith(_NONE) else f"also on {others}"


def _share_a_host(coverage: Coverage, group: Group, nodes: int) -> bool:
    """True when two holders sit on one node although there are enough nodes for one each (or nodes left over)."""
    hosts = {coverage.hosts[rank] for rank in group.holders}
    return len(hosts) < min(len(group.holders), nodes)


def named(noun: str, items: Iterable[int | str]) -> str:
    """Return `rank 3`, `ranks 3, 5` or `ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 more`."""
    listed = [str(item) for item in items]
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return f"{noun}{'' if len(listed) == 1 else 's'} {', '.join(listed[:_NAMED])}{more}"
