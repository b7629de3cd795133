"""Runs, boxes and cuts are exact for every shape."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ttp.checkpoint.format import tiling
from ttp.checkpoint.format.tiling import Box
from ttp.checkpoint.format.types import HeldTensor

shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@st.composite
def runs(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(shapes)
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


def elements(shape: tuple[int, ...], box: Box) -> list[int]:
    """Flat indices of a box's elements, in the box's own order."""
    whole = torch.arange(math.prod(shape)).view(shape)
    part = whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
    return [int(i) for i in part.reshape(-1)]


@given(runs())
@settings(max_examples=200)
def test_boxes_are_the_run_in_order_and_at_most_2n_minus_1(run: tuple[tuple[int, ...], int, int]) -> None:
    """Joined, the boxes' elements are exactly the run's; each box is a run of its own that begins at `start`."""
    shape, start, stop = run
    boxes = tiling.boxes_of_run(shape, start, stop)
    assert [i for box in boxes for i in elements(shape, box)] == list(range(start, stop))
    assert all(elements(shape, box)[0] == box.start and len(elements(shape, box)) == box.numel for box in boxes)
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


def test_the_bound_of_2n_minus_1_is_reached() -> None:
    """A run that begins and ends inside rows of every dimension."""
    assert [len(tiling.boxes_of_run((4,) * n, 1, 4**n - 1)) for n in (1, 2, 3, 4)] == [1, 3, 5, 7]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 7), (4, 3)])
def test_a_run_outside_the_tensor_is_refused(start: int, stop: int) -> None:
    """The message names run and shape."""
    with pytest.raises(ValueError, match=rf"run \[{start}, {stop}\) does not lie within shape \(2, 3\) of 6 elements"):
        tiling.boxes_of_run((2, 3), start, stop)


@given(runs(), st.integers(1, 20))
def test_slabs_of_a_box_are_the_box(run: tuple[tuple[int, ...], int, int], limit: int) -> None:
    """Cutting keeps order and elements, and the limit."""
    shape, start, stop = run
    for box in tiling.boxes_of_run(shape, start, stop):
        slabs = tiling.split_box(box, limit)
        assert [i for slab in slabs for i in elements(shape, slab)] == elements(shape, box)
        assert all(slab.numel <= limit and slab.start == elements(shape, slab)[0] for slab in slabs)


@st.composite
def holdings(draw: st.DrawFn) -> list[HeldTensor]:
    held = []
    for number in range(draw(st.integers(0, 6))):
        shape, start, stop = draw(runs())
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.uint8]))
        held.append(HeldTensor(f"model.p{number}", shape, start, torch.zeros(stop - start, dtype=dtype)))
    return held


@given(holdings(), st.integers(1, 7), st.randoms(use_true_random=False))
def test_parts_hold_every_element_once_whatever_the_order_given(
    held: list[HeldTensor], count: int, random: random.Random
) -> None:
    """Two holders that list the same shards in other orders cut them alike; together the parts are all elements."""
    parts = tiling.split_parts(held, count)
    shuffled = random.sample(held, len(held))
    addresses = [[(p.key, p.start, p.values.numel()) for p in part] for part in parts]
    assert [
        [(p.key, p.start, p.values.numel()) for p in part] for part in tiling.split_parts(shuffled, count)
    ] == addresses
    assert tiling.address_hash(shuffled) == tiling.address_hash(held)
    assert len(parts) == count
    for tensor in held:
        pieces = [p for part in parts for p in part if p.key == tensor.key]
        covered = [i for p in pieces for i in range(p.start, p.start + p.values.numel())]
        assert covered == list(range(tensor.start, tensor.start + tensor.values.numel()))
        assert all(p.shape == tensor.shape and p.values.dtype == tensor.values.dtype for p in pieces)


@given(holdings(), st.integers(1, 7))
def test_parts_are_balanced_to_one_element(held: list[HeldTensor], count: int) -> None:
    """No part is further from its fair share than an element at either end."""
    sizes = [tiling.nbytes_of(part) for part in tiling.split_parts(held, count)]
    largest = max((tensor.values.element_size() for tensor in held), default=0)
    assert all(abs(size - sum(sizes) / count) <= 2 * largest + 1 for size in sizes)


def test_parts_are_views_of_the_holders_memory() -> None:
    """A cut copies nothing."""
    tensor = HeldTensor("model.w", (10,), 0, torch.arange(10.0))
    (_, second) = tiling.split_parts([tensor], 2)
    assert second[0].values.data_ptr() == tensor.values[5:].data_ptr()


def test_the_address_hash_distinguishes_addresses() -> None:
    """Key, shape, start, length and dtype each count; the values do not."""
    base = HeldTensor("model.w", (4, 5), 0, torch.zeros(10))
    others = [
        HeldTensor("model.v", (4, 5), 0, torch.zeros(10)),
        HeldTensor("model.w", (5, 4), 0, torch.zeros(10)),
        HeldTensor("model.w", (4, 5), 10, torch.zeros(10)),
        HeldTensor("model.w", (4, 5), 0, torch.zeros(9)),
        HeldTensor("model.w", (4, 5), 0, torch.zeros(10, dtype=torch.float64)),
    ]
    assert len({tiling.address_hash([held]) for held in [base, *others]}) == 6
    assert tiling.address_hash([HeldTensor("model.w", (4, 5), 0, torch.ones(10))]) == tiling.address_hash([base])


@given(shapes.filter(bool), st.lists(st.integers(0, 1000), max_size=5), st.randoms(use_true_random=False))
def test_tiling_is_proved_and_every_fault_in_it_found(
    shape: tuple[int, ...], cuts: list[int], random: random.Random
) -> None:
    """Boxes of a cut tensor tile it in any order; without one, with one twice, or with one grown, they do not."""
    numel = math.prod(shape)
    bounds = sorted({0, numel, *(cut % numel for cut in cuts)})
    boxes = [
        (box.offsets, box.sizes)
        for start, stop in itertools.pairwise(bounds)
        for box in tiling.boxes_of_run(shape, start, stop)
    ]
    random.shuffle(boxes)
    assert tiling.tiling_error(shape, boxes) is None
    victim = random.randrange(len(boxes))
    assert tiling.tiling_error(shape, boxes[:victim] + boxes[victim + 1 :]) is not None
    assert "overlaps" in str(tiling.tiling_error(shape, [*boxes, boxes[victim]]))
    offsets, sizes = boxes[victim]
    grown = (offsets, tuple(size + 1 for size in sizes))
    assert tiling.tiling_error(shape, [*boxes[:victim], grown, *boxes[victim + 1 :]]) is not None


def test_boxes_that_are_not_runs_tile_too() -> None:
    """Columns of a matrix, as another layout would save them: volumes alone would not prove it."""
    columns = [((0, 0), (4, 2)), ((0, 2), (4, 3))]
    assert tiling.tiling_error((4, 5), columns) is None
    assert "overlaps" in str(tiling.tiling_error((4, 5), [((0, 0), (4, 2)), ((0, 1), (4, 3))]))
