"""Which rank takes which place, so that a shard's holders sit on different hosts (PURE).

Owns two permutations of ranks and nothing else: the grid of the even layout and the cycle of the ring. Never looks at
parameters, torch or the network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def grid(world: int, replicas: int, hosts: Sequence[str] | None) -> tuple[tuple[int, ...], ...]:
    """Lay `world` ranks out as `replicas` rows of world // replicas columns; column s holds shard s.

    Rank i and i + d/2 share a shard (R=2) unless that puts more holders of a shard on one host than must be: then the
    ranks of a host take consecutive places, so that a host of at most world // replicas ranks meets no column twice.
    Row 0 is ascending, so that its places are its ranks in a process group.
    """
    columns = world // replicas
    natural = [tuple(range(r * columns, (r + 1) * columns)) for r in range(replicas)]
    if hosts is None:
        return tuple(natural)
    by_host = [rank for block in _blocks(hosts) for rank in block]
    packed = [by_host[r * columns : (r + 1) * columns] for r in range(replicas)]
    if shared_hosts(list(zip(*natural, strict=True)), hosts) <= shared_hosts(list(zip(*packed, strict=True)), hosts):
        return tuple(natural)
    turn = sorted(range(columns), key=lambda column: packed[0][column])
    return tuple(tuple(row[column] for column in turn) for row in packed)


def cycle(world: int, hosts: Sequence[str] | None) -> tuple[int, ...]:
    """Return `successor`: shard j is on ranks j and successor[j], and following successors visits every rank once.

    With hosts, neighbours differ where they can: the biggest host's ranks take every other seat of a round table.
    """
    natural = tuple((rank + 1) % world for rank in range(world))
    if hosts is None:
        return natural
    seats = [*range(0, world, 2), *range(1, world, 2)]
    table = [0] * world
    for seat, rank in zip(seats, (rank for block in _blocks(hosts) for rank in block), strict=True):
        table[seat] = rank
    spread = [0] * world
    for seat, rank in enumerate(table):
        spread[rank] = table[(seat + 1) % world]
    if shared_hosts(list(enumerate(natural)), hosts) <= shared_hosts(list(enumerate(spread)), hosts):
        return natural
    return tuple(spread)


def replicas_apart(hosts: Sequence[str], replicas: int) -> bool:
    """Say whether the ranks of a data-parallel group, `hosts[rank]` the machine of each, would hold every shard on `replicas`
    different machines: by the even layout, or by the ring where their number is not a multiple."""
    ranks = len(hosts)
    if replicas < 2 or ranks < replicas:
        return False
    columns = (
        list(enumerate(cycle(ranks, hosts)))
        if ranks % replicas
        else list(zip(*grid(ranks, replicas, hosts), strict=True))
    )
    return not shared_hosts(columns, hosts)


def shared_hosts(columns: Sequence[Sequence[int]], hosts: Sequence[str]) -> int:
    """Count the holders that share a host with an earlier holder of the same shard."""
    return sum(len(column) - len({hosts[rank] for rank in column}) for column in columns)


def _blocks(hosts: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each host, biggest host first, ties by first appearance."""
    counts = Counter(hosts)
    names = sorted(counts, key=lambda host: (-counts[host], hosts.index(host)))
    return [[rank for rank, host in enumerate(hosts) if host == name] for name in names]
