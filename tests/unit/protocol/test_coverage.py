"""What a job survives, computed from what its ranks registered."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from tests.unit.protocol.bench import ControllerBench, registration
from ttp.controller.core.facts.coverage import (
    Coverage,
    CoverageRow,
    Group,
    among,
    coverage_of,
    fatal_ranks,
    overview,
    rows,
    survived_pairs,
    survives,
    warnings,
)
from ttp.proto.messages import Registration, ShardGroup, Welcome


def even(size: int) -> tuple[tuple[int, ...], ...]:
    return tuple((shard, shard + size // 2) for shard in range(size // 2))


def coverage(holders: tuple[tuple[int, ...], ...], hosts: list[str] | None = None) -> Coverage:
    size = 1 + max(max(ranks) for ranks in holders)
    names = hosts or ["one"] * size
    return coverage_of(registration(rank, holders, names[rank]) for rank in range(size))


def test_two_halves_of_eight_survive_any_rank_and_all_pairs_but_the_partners() -> None:
    assert survives(coverage(even(8))) == "any 1 of 8 ranks; 24 of 28 pairs"


def test_nodes_are_named_when_there_is_more_than_one() -> None:
    apart = coverage(even(4), ["a", "a", "b", "b"])
    assert survives(apart) == "any 1 of 4 ranks; 4 of 6 pairs; each of 2 nodes"
    together = coverage(even(4), ["a", "b", "a", "b"])
    assert survives(together) == "any 1 of 4 ranks; 4 of 6 pairs; 0 of 2 nodes (not nodes a, b)"


def test_a_small_job_is_shown_rank_by_rank() -> None:
    assert overview(coverage(even(4), ["a", "a", "b", "b"])) == (
        "rank 0 on node a: shard 0 (1.0 MiB), also on rank 2",
        "rank 1 on node a: shard 1 (1.0 MiB), also on rank 3",
        "rank 2 on node b: shard 0 (1.0 MiB), also on rank 0",
        "rank 3 on node b: shard 1 (1.0 MiB), also on rank 1",
    )


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("shard [0:128, 0:64]: model.weight and 3 more", "shard [0:128, 0:64]"),
        ("shard 1 of 2: wq[2048:4096]", "shard 1 of 2"),
        ("whole state: w", "whole state"),
    ],
)
def test_a_shard_is_named_by_all_of_its_place(label: str, shown: str) -> None:
    """The offsets of a sharded tensor have colons of their own."""
    group = (ShardGroup("g", label, 4000),)
    found = rows(coverage_of([replace(registration(0, ((0,),), "one"), groups=group)]))
    assert found[0].shards == (f"{shown} (3.9 KiB)",)


def test_a_small_shard_has_a_size() -> None:
    """In the unit that fits."""
    whole = (ShardGroup("g", "whole state: w", 4000),)
    members = [replace(registration(rank, host="one"), groups=whole) for rank in range(2)]
    assert overview(coverage_of(members, 2))[0] == "rank 0 on node one: whole state (3.9 KiB), also on rank 1"


def test_a_large_job_is_shown_node_by_node_in_a_screen_at_most() -> None:
    lines = overview(coverage(even(800), [f"n{rank // 8}" for rank in range(800)]))
    assert lines[0] == "node n0: ranks 0-7, their shards also on ranks 400-407"
    assert len(lines) == 17 and lines[-1] == "and 84 more nodes"


def test_only_rank_0_receives_what_to_show() -> None:
    """One line per fact, once per attempt, not once per rank."""
    job = ControllerBench(holders=((0, 2), (1, 3)), assembled=False)
    for rank in range(4):
        job.say(registration(rank, host="ab"[rank % 2]))
    welcomes = job.sent(Welcome)
    assert len(welcomes[0].overview) == 4 and len(welcomes[0].warnings) == 2
    assert not any(welcomes[rank].overview or welcomes[rank].warnings for rank in (1, 2, 3))


def test_the_journal_has_the_table_of_who_holds_what() -> None:
    """Of a large job by node, and not of every one."""
    job = ControllerBench(holders=((0, 2), (1, 3)), assembled=False)
    for rank in range(4):
        job.say(registration(rank, host="ab"[rank // 2]))
    (fields,) = job.logged("assembled")
    table = fields["rows"]
    assert isinstance(table, tuple) and len(table) == 4
    assert table[0] == {"ranks": "0", "host": "a", "shards": ("shard 0 (1.0 MiB)",), "also_on": ("rank 2",)}
    large = rows(coverage(even(800), [f"n{rank // 8}" for rank in range(800)]))
    assert large[0] == CoverageRow("0-7", "n0", (), ("ranks 400-407",)) and large[-1] == CoverageRow(
        "", "and 84 more nodes", (), ()
    )


def test_a_lone_holder_is_named() -> None:
    lone = coverage(((0, 1), (2,)))
    assert survives(lone) == "2 of 3 ranks (not rank 2); 0 of 3 pairs"
    assert "shard 1 is held by rank 2 only" in warnings(lone)[0]
    assert warnings(lone)[0].endswith("raise the number of replicas, or of data-parallel ranks")


def test_a_warning_when_partners_share_a_host_although_there_are_others() -> None:
    assert warnings(coverage(even(4), ["a", "a", "b", "b"])) == ()
    lines = warnings(coverage(even(4), ["a", "b", "a", "c"]))
    assert len(lines) == 1 and "shard 0" in lines[0] and "ranks 0, 2" in lines[0]


def test_no_warning_about_hosts_when_there_is_only_one() -> None:
    assert warnings(coverage(even(4))) == ()


def test_more_replicas_than_hosts_is_not_the_placements_fault() -> None:
    assert warnings(coverage(((0, 1, 2), (0, 1, 3)), ["a", "b", "a", "a"])) == ()


@pytest.mark.parametrize("seed", range(20))
def test_counted_pairs_equal_tried_pairs(seed: int) -> None:
    """The arithmetic over holder sets equals trying every pair."""
    rng = random.Random(seed)
    size = rng.randint(3, 9)
    holders = tuple(tuple(sorted(rng.sample(range(size), rng.randint(1, 3)))) for _ in range(rng.randint(1, 8)))
    groups = tuple(Group(f"g{i}", f"shard {i}", 1, ranks) for i, ranks in enumerate(holders))
    world = Coverage(groups, ("h",) * size)
    pairs = list(itertools.combinations(range(size), 2))
    tried = sum(all(set(ranks) - set(pair) for ranks in holders) for pair in pairs)
    assert survived_pairs(world) == (tried, len(pairs)), f"seed {seed}: {holders}"
    assert fatal_ranks(world) == tuple(r for r in range(size) if any(not set(ranks) - {r} for ranks in holders))


def test_ten_thousand_ranks() -> None:
    """What it costs is for `python -m benchmarks.scale` to say; pair by pair it would not end here."""
    size = 10_000
    registrations = [
        Registration(r, size, f"n{r // 8}", r, (ShardGroup(f"g{r % (size // 2)}", "s", 1),), 0, ("/a",), "{}")
        for r in range(size)
    ]
    assert (
        survives(coverage_of(registrations)) == "any 1 of 10000 ranks; 49990000 of 49995000 pairs; each of 1250 nodes"
    )


def test_copies_in_memory_count_where_every_rank_has_them() -> None:
    def rank(number: int, copies: bool) -> Registration:
        groups = (ShardGroup(f"g{number}", f"shard {number}", 1),)
        return Registration(number, 2, "a", 1, groups, 0, (), "{}", copies=copies)

    with_all, with_one = (coverage_of([rank(0, True), rank(1, copies)]) for copies in (True, False))
    assert survives(with_all).endswith("; all others from copies in memory, some steps back")
    assert not warnings(with_all)
    assert "copies" not in survives(with_one) and len(warnings(with_one)) == 2


def test_two_ranks_on_a_node_have_neither_pairs_nor_nodes_to_lose() -> None:
    assert survives(coverage(((0, 1),))) == "any 1 of 2 ranks"
    assert survives(coverage(((0, 1),), ["a", "b"])) == "any 1 of 2 ranks; each of 2 nodes"


def test_a_lone_rank_is_advised_to_have_company_and_others_to_have_replicas() -> None:
    held = "shard 0 is held by rank 0 only: its death loses the step; "
    assert warnings(coverage(((0,),))) == (f"{held}replicas need more ranks",)
    more = "raise the number of replicas, or of data-parallel ranks"
    assert warnings(coverage(((0,), (1,))))[0] == f"{held}{more}"


@pytest.mark.parametrize("apart", [True, False])
def test_of_many_shards_that_are_badly_protected_the_rest_is_counted(apart: bool) -> None:
    """Eight are named, whether they have one holder or partners on one node; a shard without a partner is of the first kind alone."""
    pairs = tuple((2 * shard, 2 * shard + 1) for shard in range(10))
    lone = tuple((rank,) for rank in range(20, 29))
    hosts = [f"n{rank // 2}" if not apart else f"n{rank}" for rank in range(29)]
    said = warnings(coverage((*pairs, *lone), hosts))
    assert sum("is held by rank" in line for line in said) == 8
    assert sum("do not all sit on different nodes" in line for line in said) == (0 if apart else 8)
    more = 1 if apart else 3
    assert said[-1] == f"{more} more shard groups are protected as badly"


def test_exactly_as_many_as_are_named_have_no_rest() -> None:
    said = warnings(coverage(tuple((rank,) for rank in range(8))))
    assert len(said) == 8


def test_nothing_is_copied_where_no_rank_has_come_and_the_others_hosts_are_unknown() -> None:
    none = coverage_of([], 2)
    assert (none.groups, none.hosts, none.copied) == ((), ("", ""), False)
    assert coverage_of([]).hosts == ()


def test_among_some_ranks_a_shard_may_have_no_holder() -> None:
    left = among(coverage(((0, 2), (1, 3))), {0, 2})
    assert [group.holders for group in left.groups] == [(0, 2), ()]
    assert left.hosts == ("one",) * 4


def test_sixteen_ranks_have_a_line_each_and_sixteen_nodes_too() -> None:
    assert overview(coverage(even(16)))[-1] == "rank 15 on node one: shard 7 (1.0 MiB), also on rank 7"
    assert len(overview(coverage(even(16)))) == 16
    nodes = overview(coverage(even(32), [f"n{rank // 2}" for rank in range(32)]))
    assert len(nodes) == 16
    assert nodes[-1].startswith("node n15: ranks 30-31, ")
