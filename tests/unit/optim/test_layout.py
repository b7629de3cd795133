"""The cut points: every element on exactly R holders, the same cuts everywhere, hosts kept apart."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttp.errors import LayoutError
from ttp.optim.shard_layout.layout import ALIGN, Layout, ParamSpec
from ttp.optim.shard_layout.placement import cycle, grid, shared_hosts

DTYPES = ("float32", "bfloat16")


@st.composite
def param_lists(draw: st.DrawFn) -> list[ParamSpec]:
    shapes = draw(st.lists(st.lists(st.integers(1, 40), max_size=3).map(tuple), min_size=1, max_size=12))
    return [
        ParamSpec(f"p{i}", shape, draw(st.integers(0, 2)), draw(st.sampled_from(DTYPES)))
        for i, shape in enumerate(shapes)
    ]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    params = draw(param_lists())
    bucket = draw(st.sampled_from([1, 100, 1000, 100_000]))
    if draw(st.booleans()):
        world, replicas, ring = draw(st.integers(2, 9)), 2, True
    else:
        replicas = draw(st.integers(1, 3))
        world, ring = replicas * draw(st.integers(1, 5)), False
    hosts = draw(st.none() | st.lists(st.sampled_from("abcd"), min_size=world, max_size=world))
    return Layout.build(params, world, replicas, bucket, ring, hosts)


@settings(deadline=None)  # a loaded machine is not a slow layout
@given(layouts())
def test_every_element_is_on_exactly_r_holders(layout: Layout) -> None:
    counts: dict[str, Counter[int]] = {spec.name: Counter() for spec in layout.params}
    for rank in range(layout.world):
        for segment in layout.segments(rank):
            counts[segment.name].update(range(segment.start, segment.start + segment.numel))
    for spec in layout.params:
        assert counts[spec.name] == Counter({i: layout.replicas for i in range(spec.numel)})


@settings(deadline=None)  # a loaded machine is not a slow layout
@given(layouts())
def test_every_shard_has_r_different_holders_and_every_rank_an_equal_load(layout: Layout) -> None:
    for shard in range(layout.shards):
        assert len(set(layout.holders(shard))) == layout.replicas
        assert all(shard in layout.held(rank) for rank in layout.holders(shard))
    load = {len(layout.held(rank)) for rank in range(layout.world)}
    assert load == {layout.shards * layout.replicas // layout.world}
    firsts = [layout.holders(shard)[0] for shard in range(layout.shards)]
    assert len(set(firsts)) == layout.shards, "each shard is gathered from a rank of its own"
    assert all(layout.held(rank)[0] == shard for shard, rank in enumerate(firsts))


@settings(deadline=None)  # a loaded machine is not a slow layout
@given(layouts())
def test_the_holders_of_a_shard_count_each_element_once_and_share_the_work(layout: Layout) -> None:
    for bucket in layout.buckets:
        for shard in range(layout.shards):
            runs = [layout.counted_run(bucket, shard, rank) for rank in layout.holders(shard)]
            assert runs[0][0] == 0 and runs[-1][1] == bucket.shard_numel
            assert all(stop == start for (_, stop), (start, _) in pairwise(runs))
            assert max(stop - start for start, stop in runs) < bucket.shard_numel / layout.replicas + 2 * ALIGN


@settings(deadline=None)  # a loaded machine is not a slow layout
@given(layouts())
def test_buckets_are_contiguous_in_reverse_order_and_never_mix_dtypes(layout: Layout) -> None:
    for dtype in DTYPES:
        order = [index for bucket in layout.buckets if bucket.dtype == dtype for index in bucket.params]
        assert order == [i for i in range(len(layout.params) - 1, -1, -1) if layout.params[i].dtype == dtype]
    for bucket in layout.buckets:
        assert bucket.numel == layout.shards * bucket.shard_numel
        ends = [o + layout.params[i].numel for i, o in zip(bucket.params, bucket.offsets, strict=True)]
        assert bucket.offsets[0] == 0
        assert all(0 <= b - end < ALIGN for end, (_, b) in zip(ends, pairwise(bucket.offsets), strict=False))
        assert 0 <= bucket.numel - ends[-1] < ALIGN * (layout.shards + 1)


@settings(deadline=None)  # a loaded machine is not a slow layout
@given(layouts())
def test_segments_map_onto_the_bucket_memory_without_overlap_and_on_register_boundaries(layout: Layout) -> None:
    for shard in range(layout.shards):
        end: dict[int, int] = {}
        for segment in layout.shard_segments(shard):
            bucket = layout.buckets[segment.bucket]
            place = bucket.params.index(segment.param)
            assert bucket.offsets[place] + segment.start == shard * bucket.shard_numel + segment.offset
            assert segment.offset >= end.get(segment.bucket, 0)
            assert segment.offset % ALIGN == segment.start % ALIGN == segment.padded % ALIGN == 0
            assert segment.offset + segment.padded <= bucket.shard_numel
            end[segment.bucket] = segment.offset + segment.padded


@settings(deadline=None)  # a loaded machine is not a slow layout
@given(param_lists(), st.integers(2, 6))
def test_replicas_and_both_layouts_use_the_same_cuts(params: list[ParamSpec], shards: int) -> None:
    even = Layout.build(params, 2 * shards, 2, 1000)
    triple = Layout.build(params, 3 * shards, 3, 1000)
    ring = Layout.build(params, shards, 2, 1000, ring=True)
    for shard in range(shards):
        assert even.shard_segments(shard) == triple.shard_segments(shard) == ring.shard_segments(shard)
        assert even.group_id(shard) == ring.group_id(shard)
        assert even.segments(shard) == even.segments(shard + shards)
    assert even.digest() == Layout.build(params, 2 * shards, 2, 1000).digest()
    assert even.digest() != triple.digest() != ring.digest()


def test_rank_i_and_i_plus_half_share_a_shard() -> None:
    layout = Layout.build([ParamSpec("w", (1000,))], 8)
    assert [layout.holders(s) for s in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    ring = Layout.build([ParamSpec("w", (1000,))], 5, ring=True)
    assert [ring.holders(s) for s in range(5)] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)]
    assert [ring.held(r) for r in range(5)] == [(0, 4), (1, 0), (2, 1), (3, 2), (4, 3)]


def test_group_ids_are_stable_and_labels_are_for_people() -> None:
    params = [ParamSpec("wq", (64, 64)), ParamSpec("bias", (64,))]
    layout = Layout.build(params, 4)
    # Frozen: two processes of different versions must agree on them.
    addresses = [b"bias[0:64]\nwq[0:2048]", b"wq[2048:4096]"]
    assert [layout.group_id(s) for s in range(2)] == [hashlib.sha256(a).hexdigest()[:16] for a in addresses]
    assert layout.label(0) == "shard 0 of 2: bias[0:64] and 1 more"
    assert layout.label(1) == "shard 1 of 2: wq[2048:4096]"


@given(st.integers(1, 4), st.integers(1, 8), st.data())
@settings(max_examples=200, deadline=None)
def test_grid_shares_a_host_only_where_it_must(replicas: int, columns: int, data: st.DataObject) -> None:
    world = replicas * columns
    hosts = data.draw(st.lists(st.sampled_from("abcde"), min_size=world, max_size=world))
    rows = grid(world, replicas, hosts)
    assert sorted(rank for row in rows for rank in row) == list(range(world))
    assert list(rows[0]) == sorted(rows[0])
    # A host with more ranks than columns must meet itself once for every rank too many.
    unavoidable = sum(max(0, count - columns) for count in Counter(hosts).values())
    assert shared_hosts(list(zip(*rows, strict=True)), hosts) == unavoidable


@given(st.integers(2, 12), st.data())
@settings(max_examples=200, deadline=None)
def test_ring_shares_a_host_only_where_it_must(world: int, data: st.DataObject) -> None:
    hosts = data.draw(st.lists(st.sampled_from("abcde"), min_size=world, max_size=world))
    successor = cycle(world, hosts)
    walk = [0]
    while (rank := successor[walk[-1]]) != 0:
        walk.append(rank)
    assert sorted(walk) == list(range(world)), "one cycle through every rank"
    biggest = max(Counter(hosts).values())
    unavoidable = max(0, 2 * biggest - world)
    assert shared_hosts(list(enumerate(successor)), hosts) == unavoidable


def test_interleaved_hosts_never_hold_both_replicas() -> None:
    layout = Layout.build([ParamSpec("w", (4096,))], 4, hosts=["a", "b", "a", "b"])
    assert [layout.holders(s) for s in range(2)] == [(0, 1), (2, 3)]


@pytest.mark.parametrize(
    ("world", "replicas", "ring", "expected"),
    [
        (3, 2, False, "TTPOddReplicaOptimizer"),
        (1, 2, False, "replicas=1"),
        (4, 3, True, "2 replicas"),
        (1, 2, True, "replicas=1"),
        (0, 1, False, "got world 0"),
    ],
)
def test_a_world_that_does_not_divide_is_refused_with_what_to_do(
    world: int, replicas: int, ring: bool, expected: str
) -> None:
    with pytest.raises(LayoutError, match=expected):
        Layout.build([ParamSpec("w", (10,))], world, replicas, ring=ring)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ([], "no parameters"),
        ([ParamSpec("w", (2,)), ParamSpec("w", (3,))], "'w' appears twice"),
        ([ParamSpec("e", (0, 4))], "'e' of shape"),
    ],
)
def test_parameters_that_have_no_address_are_refused(params: list[ParamSpec], expected: str) -> None:
    with pytest.raises(LayoutError, match=expected):
        Layout.build(params, 2)


def test_a_model_of_ten_thousand_parameters_is_cut_at_once() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    params = [ParamSpec(f"p{i}", (rng.randrange(1, 100_000),)) for i in range(10_000)]
    layout = Layout.build(params, 64, bucket_numel=6_553_600)
    total = sum(spec.numel for spec in params)
    assert sum(s.numel for shard in range(32) for s in layout.shard_segments(shard)) == total
    padding = sum(bucket.numel for bucket in layout.buckets) - total
    assert padding < ALIGN * (len(params) + 32 * len(layout.buckets))


def test_copies_have_the_same_places_whatever_else_a_rank_has() -> None:
    """Three ranks sum a bucket in an order that depends on the place: what two ranks of the model both have lies alike in both,
    the one that counts it included."""
    norms = [ParamSpec(f"norm.{i}", (100,), shared="0") for i in range(6)]
    first = [spec for i, norm in enumerate(norms) for spec in (norm, ParamSpec(f"w.{i}", (1000 + i, 3)))]
    second = [replace(norm, counted=False) for norm in norms]
    second = [spec for i, norm in enumerate(second) for spec in (ParamSpec(f"w.{i}", (7 + i, 3)), norm)]
    places = []
    for params in (first, second):
        layout = Layout.build(params, 3, ring=True, bucket_numel=256)
        places.append(
            {
                (segment.name, segment.start): (segment.shard, segment.offset, segment.numel)
                for shard in range(3)
                for segment in layout.shard_segments(shard)
                if segment.name.startswith("norm")
            }
        )
    assert places[0] == places[1] and len(places[0]) >= 6
