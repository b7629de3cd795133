"""Addresses of runs of tensors: flat runs, the boxes they cover, and cuts of them that every holder computes alike.

Owns integer arithmetic only (it slices tensors but never reads, copies or changes an element). Never does I/O.

A *run* is elements [start, stop) of a tensor laid out row-major. A *box* is what torch's distributed checkpoint stores:
offsets and sizes in every dimension. A run of an N-d tensor is at most 2N - 1 boxes, each of which is itself a run:

    shape (4, 5), run [3, 17)        . . . 3 4      box 1: a part of a row
                                     5 6 7 8 9      box 2: whole rows
                                     a b c d e
                                     f g . . .      box 3: a part of a row
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ttp.checkpoint.format.types import HeldTensor


@dataclass(frozen=True, slots=True)
class Box:
    """Elements offsets[d] <= i_d < offsets[d] + sizes[d] of a tensor; `start` is the flat index of its first element (in the
    holder's block, where the tensor is split over ranks)."""

    start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return the at most 2N - 1 boxes that cover elements [start, stop), in flat order; none for an empty run.

    Raises ValueError when the run does not lie within the shape.
    """
    numel = math.prod(shape)
    if not 0 <= start <= stop <= numel:
        raise ValueError(f"run [{start}, {stop}) does not lie within shape {tuple(shape)} of {numel} elements")
    if start == stop:
        return []
    return list(_boxes(tuple(shape), start, stop, (), 0))


def _boxes(shape: tuple[int, ...], start: int, stop: int, prefix: tuple[int, ...], base: int) -> Iterator[Box]:
    """Boxes of [start, stop) within the sub-tensor `shape`, which sits at indices `prefix` and flat index `base`."""
    ones = (1,) * len(prefix)
    if len(shape) <= 1:
        yield Box(base + start, (*prefix, *((start,) if shape else ())), (*ones, *((stop - start,) if shape else ())))
        return
    inner = math.prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    if first == last and stop - start < inner:  # within one row
        row = first * inner
        yield from _boxes(shape[1:], start - row, stop - row, (*prefix, first), base + row)
        return
    whole_from, whole_to = -(-start // inner), stop // inner
    if start % inner:
        row = first * inner
        yield from _boxes(shape[1:], start - row, inner, (*prefix, first), base + row)
    if whole_from < whole_to:
        offsets = (*prefix, whole_from, *(0 for _ in shape[1:]))
        yield Box(base + whole_from * inner, offsets, (*ones, whole_to - whole_from, *shape[1:]))
    if stop % inner:
        row = last * inner
        yield from _boxes(shape[1:], 0, stop - row, (*prefix, last), base + row)


def split_box(box: Box, max_numel: int) -> list[Box]:
    """Cut a box that is a run (as `boxes_of_run` returns) into slabs of at most `max_numel` elements, in flat order."""
    if box.numel <= max(max_numel, 1):
        return [box]
    axis = next(i for i, size in enumerate(box.sizes) if size > 1)  # all dims before it are 1: slabs stay runs
    inner = math.prod(box.sizes[axis + 1 :])
    rows = max(max_numel // inner, 1)
    slabs = []
    for row in range(0, box.sizes[axis], rows):
        sizes = list(box.sizes)
        offsets = list(box.offsets)
        sizes[axis] = min(rows, box.sizes[axis] - row)
        offsets[axis] += row
        slabs += split_box(Box(box.start + row * inner, tuple(offsets), tuple(sizes)), max_numel)
    return slabs


def boxes_of(held: HeldTensor, max_numel: int | None = None) -> list[Box]:
    """Return the boxes of the whole tensor that `held` is stored as, none larger than `max_numel` elements. An empty tensor
    (a dimension of 0) is stored as one empty box."""
    if math.prod(held.shape) == 0:
        return [Box(0, (0,) * len(held.shape), tuple(held.shape))]
    boxes = boxes_of_run(held.extent, held.start, held.start + held.values.numel())
    if max_numel is not None:
        boxes = [slab for box in boxes for slab in split_box(box, max_numel)]
    if held.block is None:
        return boxes
    return [replace(box, offsets=_added(box.offsets, held.block.offsets)) for box in boxes]


def _added(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def nbytes_of(tensors: Iterable[HeldTensor]) -> int:
    """Bytes of all values."""
    return sum(held.values.numel() * held.values.element_size() for held in tensors)


def split_parts(tensors: Sequence[HeldTensor], count: int) -> list[list[HeldTensor]]:
    """Cut what a shard group holds into `count` parts of nearly equal bytes.

    Every element is in exactly one part, and every holder of the same addresses gets the same cuts: the order given does
    not matter. A tensor may be cut between any two elements; the parts' values are views. Empty tensors go whole into
    the part that the bytes before them have reached. Parts may be empty when there are fewer elements than parts.
    """
    if count < 1:
        raise ValueError(f"cannot cut a shard group into {count} parts: expected at least 1")
    ordered = sorted(tensors, key=lambda held: (held.key, held.origin, held.start))
    total = nbytes_of(ordered)
    bounds = [total * i // count for i in range(1, count)] + [total]
    parts: list[list[HeldTensor]] = [[] for _ in range(count)]
    index = position = 0
    for held in ordered:
        item, numel, done = held.values.element_size(), held.values.numel(), 0
        if numel == 0:
            parts[index].append(held)
        while done < numel:
            while index < count - 1 and position >= bounds[index]:
                index += 1
            room = numel - done if index == count - 1 else min(-(-(bounds[index] - position) // item), numel - done)
            parts[index].append(_narrow(held, done, room))
            done += room
            position += room * item
    return parts


def _narrow(held: HeldTensor, begin: int, numel: int) -> HeldTensor:
    if begin == 0 and numel == held.values.numel():
        return held
    return replace(held, start=held.start + begin, values=held.values[begin : begin + numel])


def address_hash(tensors: Iterable[HeldTensor]) -> str:
    """Return 16 hex digits that are equal exactly when two ranks hold the same addresses (order and values do not count)."""
    lines = sorted(
        f"{held.key}\t{held.values.dtype}\t{held.shape}\t{held.origin}\t{held.extent}\t{held.start}\t{held.values.numel()}"
        for held in tensors
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def tiling_error(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> str | None:
    """Say why boxes (offsets, sizes) do not cover a tensor exactly once; None when they do.

    Exact: the boxes lie within the shape, no two overlap, and their volumes add up to the shape's.
    """
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return f"box at {tuple(offsets)} of {tuple(sizes)} has another number of dimensions than {tuple(shape)}"
        if any(o < 0 or s < 0 or o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
            return f"box at {tuple(offsets)} of {tuple(sizes)} leaves the tensor's shape {tuple(shape)}"
    if not boxes:
        return f"no box of shape {tuple(shape)} is there"
    overlap = _overlap(shape, boxes)
    if overlap is not None:
        (a_at, a_of), (b_at, b_of) = boxes[overlap[0]], boxes[overlap[1]]
        return f"box at {tuple(a_at)} of {tuple(a_of)} overlaps box at {tuple(b_at)} of {tuple(b_of)}"
    missing = math.prod(shape) - sum(math.prod(sizes) for _, sizes in boxes)
    if missing:
        return f"{missing} of {math.prod(shape)} elements of shape {tuple(shape)} are in no box"
    return None


def _overlap(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[int, int] | None:
    """First pair of boxes that share an element: a sweep along the longest dimension."""
    filled = [i for i, (_, sizes) in enumerate(boxes) if math.prod(sizes) > 0]
    if not shape:
        return (filled[0], filled[1]) if len(filled) > 1 else None
    axis = max(range(len(shape)), key=lambda d: shape[d])
    active: list[tuple[int, int]] = []  # (end along the axis, box), by end
    for i in sorted(filled, key=lambda i: boxes[i][0][axis]):
        offsets, sizes = boxes[i]
        del active[: bisect_right(active, (offsets[axis], len(boxes)))]
        for _, j in active:
            other_offsets, other_sizes = boxes[j]
            if all(
                a < b + m and b < a + n for a, n, b, m in zip(offsets, sizes, other_offsets, other_sizes, strict=True)
            ):
                return j, i
        insort(active, (offsets[axis] + sizes[axis], i))
    return None
