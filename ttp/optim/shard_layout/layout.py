"""Where every element of the optimizer state lives: parameters -> buckets -> shards -> holders (PURE).

Owns the cut points and nothing else. A bucket is a flat run of whole parameters of one dtype, in reverse registration
order (the order in which backward finishes them); it is cut into equal shards; shard j of *every* bucket has the same
holders, so shard j of all buckets together is one group that always moves as one. Replicas use the same cuts because
the cuts do not depend on the rank. Never allocates, never communicates.

    even   d ranks, R replicas: d/R shards, R rows of d/R ranks; shard s is on column s of the rows
    ring   d ranks, R = 2:      d shards; shard j is on rank j and on its successor

Every parameter starts, and every shard ends, on a multiple of ALIGN elements. So a piece of a parameter within a
shard is an integral number of vector registers on every machine, and an optimizer kernel rounds each element the same way
wherever the cuts fall (a fused kernel treats a ragged tail with other instructions, which differ in the last bit).
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from ttp.checkpoint.format.block import Block
from ttp.errors import LayoutError
from ttp.optim.shard_layout.placement import cycle, grid

ALIGN = 64
"""Elements. Padding: at most ALIGN - 1 per parameter, and less than ALIGN per shard of a bucket."""


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter, in registration order. `group` indexes the optimizer's param_groups; dtype in torch's short name.

    `shape` is what this rank has of it. Where the model is split over ranks that is a block of the whole parameter, or a
    copy of one that other ranks of the model have as well.
    """

    name: str
    shape: tuple[int, ...]
    group: int = 0
    dtype: str = "float32"
    whole: tuple[int, ...] = ()
    """The whole parameter's shape, where `shape` is a block of it; empty: `shape`."""
    offsets: tuple[int, ...] = ()
    """Where the block begins in the whole parameter; empty: at its first element."""
    counted: bool = True
    """False for a copy that another rank of the model counts and saves."""
    shared: str = ""
    """Which ranks of the model have the same, the one that counts included; empty: no other has."""

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return self.whole or self.shape

    @property
    def block(self) -> Block | None:
        """The block of the whole parameter; None: all of it."""
        return Block(self.offsets or (0,) * len(self.whole), self.shape) if self.whole else None

    @property
    def address(self) -> str:
        """The name, with the block's place in the whole parameter."""
        return f"{self.name}@{','.join(map(str, self.offsets or (0,) * len(self.whole)))}" if self.whole else self.name

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """A flat run of parameters: `params[i]` (index into Layout.params) begins at element `offsets[i]`."""

    index: int
    dtype: str
    counted: bool
    params: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int
    """With padding: shards x shard_numel."""
    shard_numel: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [start, start + numel) of a parameter are at [offset, offset + numel) of shard `shard` of bucket `bucket`."""

    param: int
    name: str
    """With its block's place, where the model is split over ranks: `layers.0.wq.weight@128,0`."""
    group: int
    start: int
    numel: int
    bucket: int
    shard: int
    offset: int

    @property
    def padded(self) -> int:
        """`numel` rounded up to ALIGN: the elements after the segment, up to there, are zeros that have no other use."""
        return -(-self.numel // ALIGN) * ALIGN

    @property
    def address(self) -> str:
        return f"{self.name}[{self.start}:{self.start + self.numel}]"


@dataclass(frozen=True)
class Layout:
    """The whole picture, equal on every rank. Ranks are those of the optimizer's process group, 0 to world - 1."""

    params: tuple[ParamSpec, ...]
    world: int
    replicas: int
    ring: bool
    rows: tuple[tuple[int, ...], ...]
    """Even: one row per replica, in shard order. Ring: the one row of all ranks."""
    successor: tuple[int, ...]
    """Ring: the second holder of each rank's own shard. Even: empty."""
    buckets: tuple[BucketSpec, ...]
    _segments: tuple[tuple[Segment, ...], ...] = field(repr=False)

    @staticmethod
    def build(
        params: Sequence[ParamSpec],
        world: int,
        replicas: int = 2,
        bucket_numel: int = 6_553_600,
        ring: bool = False,
        hosts: Sequence[str] | None = None,
    ) -> Layout:
        """Cut `params` for `world` ranks. A bucket closes before it would exceed `bucket_numel` elements.

        `hosts[rank]` names the machine of each rank. Raises LayoutError when the state cannot be split that way.
        """
        _check(params, world, replicas, bucket_numel, ring, hosts)
        rows = (tuple(range(world)),) if ring else grid(world, replicas, hosts)
        shards = len(rows[0])
        buckets = tuple(_buckets(params, shards, bucket_numel))
        segments = tuple(tuple(_cut(params, buckets, shard)) for shard in range(shards))
        successor = cycle(world, hosts) if ring else ()
        return Layout(tuple(params), world, replicas, ring, rows, successor, buckets, segments)

    @property
    def shards(self) -> int:
        return len(self.rows[0])

    def holders(self, shard: int) -> tuple[int, ...]:
        """Return the ranks that hold `shard`."""
        if self.ring:
            return (shard, self.successor[shard])
        return tuple(row[shard] for row in self.rows)

    def counted_run(self, bucket: BucketSpec, shard: int, rank: int) -> tuple[int, int]:
        """Return the elements [start, stop) of its `shard` of `bucket` that `rank` counts in sums over all shards: every element is
        counted by one holder, and the holders share the work."""
        holders = self.holders(shard)
        run = _align(-(-bucket.shard_numel // len(holders)))
        place = holders.index(rank)
        return min(place * run, bucket.shard_numel), min((place + 1) * run, bucket.shard_numel)

    def held(self, rank: int) -> tuple[int, ...]:
        """Return the shards that `rank` holds; the one that it reduces and gathers first."""
        if self.ring:
            return (rank, self.successor.index(rank))
        return (self.row(rank).index(rank),)

    def row(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that reduce and gather together with `rank`, in the order of their shards."""
        return next(row for row in self.rows if rank in row)

    def shard_segments(self, shard: int) -> tuple[Segment, ...]:
        """Return what `shard` is made of, by bucket and offset. Empty when a small model leaves it nothing but padding."""
        return self._segments[shard]

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """Return all that `rank` holds, its first shard first."""
        return tuple(segment for shard in self.held(rank) for segment in self._segments[shard])

    def group_id(self, shard: int) -> str:
        """Return the name of the shard on the wire: a hash of the sorted addresses, equal for equal contents anywhere.

        Of what is counted: copies belong to the shards of the ranks that count them.
        """
        counted = (segment.address for segment in self._segments[shard] if self.params[segment.param].counted)
        addresses = "\n".join(sorted(counted))
        return hashlib.sha256(addresses.encode()).hexdigest()[:16]

    def label(self, shard: int) -> str:
        """Return the name of the shard for people: `shard 1 of 2: layers.0.wq[0:4096] and 47 more`."""
        segments = self._segments[shard]
        rest = f" and {len(segments) - 1} more" if len(segments) > 1 else ""
        return f"shard {shard} of {self.shards}: {segments[0].address if segments else 'padding only'}{rest}"

    def digest(self) -> str:
        """Return a hash of everything that ranks must agree on before they communicate."""
        facts = [
            [[p.name, p.shape, p.group, p.dtype, p.whole, p.offsets, p.counted] for p in self.params],
            [self.world, self.replicas, self.ring, self.rows, self.successor],
            [[b.dtype, b.params, b.offsets, b.numel] for b in self.buckets],
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def params_digest(self) -> str:
        """Return a hash of the parameters' names and whole shapes."""
        facts = [[p.name, p.whole_shape, p.group] for p in self.params]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Return the sizes for a manifest."""
        summary = {
            "kind": "ring" if self.ring else "even",
            "world": self.world,
            "replicas": self.replicas,
            "shards": self.shards,
            "holders": [self.holders(shard) for shard in range(self.shards)],
            "parameters": len(self.params),
            "elements": sum(p.numel for p in self.params),
            "buckets": [b.numel for b in self.buckets],
            "digest": self.digest(),
        }
        return json.dumps(summary)


def _check(
    params: Sequence[ParamSpec], world: int, replicas: int, bucket_numel: int, ring: bool, hosts: Sequence[str] | None
) -> None:
    if not params:
        raise LayoutError("the optimizer got no parameters, expected at least one")
    names: set[str] = set()
    for spec in params:
        if spec.name in names:
            raise LayoutError(
                f"parameter {spec.name!r} appears twice, expected unique names (model.named_parameters())"
            )
        if spec.numel == 0:
            raise LayoutError(f"parameter {spec.name!r} of shape {spec.shape} has no elements; leave it out")
        names.add(spec.name)
    if bucket_numel < 1:
        raise LayoutError(f"bucket size: got {bucket_numel} elements, expected at least 1")
    if hosts is not None and len(hosts) != world:
        raise LayoutError(f"hosts: got {len(hosts)} names, expected one host for each of the {world} ranks")
    if world < 1 or replicas < 1:
        raise LayoutError(f"got world {world} and replicas {replicas}, expected at least 1 of each")
    if ring:
        if replicas != 2 or world < 2:
            raise LayoutError(
                f"the ring layout of TTPOddReplicaOptimizer has 2 replicas over 2 or more ranks; got {replicas} "
                f"replicas over {world}; use TTPReplicaOptimizer (replicas=1 for a single rank)"
            )
    elif replicas > world:
        raise LayoutError(f"{replicas} replicas need {replicas} ranks, there are {world}; use replicas={world} or less")
    elif world % replicas:
        raise LayoutError(
            f"dp size {world} is not a multiple of replicas {replicas}; use TTPOddReplicaOptimizer (2 replicas over any "
            f"dp size from 2), or another dp size"
        )


def _buckets(params: Sequence[ParamSpec], shards: int, bucket_numel: int) -> list[BucketSpec]:
    """Fill one open bucket per kind, walking backwards; number the buckets in the order in which backward fills them.

    A kind is a dtype, whether the parameters are counted (a bucket's squares count whole or not at all), and who else of the model
    has them: all copies of a parameter are at the same place of a bucket, so that all are summed in the same order.
    """
    open_buckets: dict[tuple[str, bool, str], list[int]] = {}
    sizes: dict[tuple[str, bool, str], int] = {}
    closed: list[list[int]] = []
    for index in range(len(params) - 1, -1, -1):
        spec = params[index]
        size = _align(spec.numel)
        kind = (spec.dtype, spec.counted, spec.shared)
        members = open_buckets.get(kind)
        if members is not None and sizes[kind] + size > bucket_numel:
            closed.append(members)
            members = None
        if members is None:
            members = open_buckets[kind] = []
            sizes[kind] = 0
        members.append(index)
        sizes[kind] += size
    closed.extend(open_buckets.values())
    closed.sort(key=lambda members: -members[-1])
    return [_bucket(params, shards, number, members) for number, members in enumerate(closed)]


def _bucket(params: Sequence[ParamSpec], shards: int, number: int, members: Sequence[int]) -> BucketSpec:
    offsets = [0]
    for index in members:
        offsets.append(offsets[-1] + _align(params[index].numel))
    shard_numel = _align(-(-offsets[-1] // shards))
    first = params[members[0]]
    return BucketSpec(
        number, first.dtype, first.counted, tuple(members), tuple(offsets[:-1]), shards * shard_numel, shard_numel
    )


def _cut(params: Sequence[ParamSpec], buckets: Sequence[BucketSpec], shard: int) -> list[Segment]:
    """Return the parts of parameters that fall into `shard` of each bucket."""
    found = []
    for bucket in buckets:
        low, high = shard * bucket.shard_numel, (shard + 1) * bucket.shard_numel
        for place in range(max(0, bisect_right(bucket.offsets, low) - 1), len(bucket.params)):
            begin = bucket.offsets[place]
            if begin >= high:
                break
            spec = params[bucket.params[place]]
            first, last = max(begin, low), min(begin + spec.numel, high)
            if first < last:
                where = (first - begin, last - first, bucket.index, shard, first - low)
                found.append(Segment(bucket.params[place], spec.address, spec.group, *where))
    return found


def _align(numel: int) -> int:
    return -(-numel // ALIGN) * ALIGN
