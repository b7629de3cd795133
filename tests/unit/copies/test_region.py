"""The form of a rank's memory: what a writer that is stopped after any write leaves behind, and that values come back bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.copies.material import bits, described, empty_region, held, region_of
from ttp.checkpoint.format.block import Block
from ttp.copies import region as regions
from ttp.copies.region import PAGE, STATE_BYTES, Description, Region, data_bytes, places_of, region_bytes, slot_bytes
from ttp.errors import CheckpointError

STATES = {step: json.dumps({"step": step}).encode() for step in range(10)}


class Stopped(BaseException):
    """The writer has ended here."""


@contextmanager
def stopped_after(writes: int) -> Iterator[None]:
    """Every write into the memory goes through `_put` or a tensor's `copy_`; those after so many do not happen."""
    left = writes
    put, copy = Region._put, Region._copy

    def one() -> None:
        nonlocal left
        if not left:
            raise Stopped
        left -= 1

    def limited_put(self: Region, start: int, content: bytes) -> None:
        one()
        put(self, start, content)

    def limited_copy(room: torch.Tensor, values: torch.Tensor) -> None:
        one()
        copy(room, values)

    with mock.patch.object(Region, "_put", limited_put), mock.patch.object(Region, "_copy", staticmethod(limited_copy)):
        yield


@given(before=st.integers(0, 3), writes=st.integers(0, 8))
@settings(max_examples=60, deadline=None)
def test_a_writer_stopped_after_any_write_leaves_the_other_slot_whole_and_its_own_empty_or_whole(
    before: int, writes: int
) -> None:
    region = region_of(attempt=1)
    for step in range(1, before + 1):
        region.write(step % 2, step, step, STATES[step], [torch.full((4,), float(step)), torch.ones(2)])
    step = before + 1
    try:
        with stopped_after(writes):
            region.write(step % 2, step, step, STATES[step], [torch.full((4,), float(step)), torch.ones(2)])
    except Stopped:
        pass
    found = {copy.step for copy in region.copies()}
    whole = writes >= 5  # the record cleared, the state, two tensors, the record
    expected = {before} - {0} | ({step} if whole else set())
    assert found == (expected if writes else {before, before - 1} - {0, -1})
    for copy in region.copies():
        assert copy.state == STATES[copy.step]
        assert bits(region.held(copy.slot, ["a"])[0].values) == bits(torch.full((4,), float(copy.step)))


def test_copies_come_newest_first() -> None:
    region = region_of(attempt=1)
    for step in (1, 2, 3):
        region.write(step % 2, step, step, b"{}", [torch.ones(4), torch.ones(2)])
    assert [(copy.step, copy.slot) for copy in region.copies()] == [(3, 1), (2, 0)]


@pytest.mark.parametrize("byte", range(regions._RECORD.size))
def test_a_slot_whose_record_has_any_changed_byte_is_empty(byte: int) -> None:
    region = region_of(attempt=1)
    region.write(0, 1, 1, b"{}", [torch.ones(4), torch.ones(2)])
    region._memory[region._starts[0] + byte] ^= 0xFF
    assert region.read(0) is None


def test_a_record_of_a_state_that_has_no_room_is_none() -> None:
    region = region_of(attempt=1)
    region.commit(0, 1, 1, STATE_BYTES + 1)
    assert region.read(0) is None


def test_a_damaged_description_is_none() -> None:
    region = region_of(attempt=1)
    assert Region(region._memory).load()
    region._memory[PAGE + 3] ^= 1
    assert not Region(region._memory).load()


@pytest.mark.parametrize("passed_over", [None, {"/c/iter_0000007": "7"}, {"/c/iter_0000007": -1}, ["/c/iter_0000007"]])
def test_a_description_of_other_kinds_is_refused(passed_over: object) -> None:
    content = described(1, facts={"directories": [], "passed_over": passed_over}).encode()
    with pytest.raises(ValueError, match=r"facts\.passed_over"):
        Description.decode(content)


def test_memory_without_a_description_has_no_copies() -> None:
    assert not empty_region(described(1)).load()


def test_a_description_comes_back_as_it_was() -> None:
    region = region_of(attempt=1)
    again = Region(region._memory)
    again.load()
    assert again.description == region.description == described(1)


def test_another_attempts_description_empties_every_slot_and_the_same_one_none() -> None:
    region = region_of(attempt=1)
    for step in (1, 2):
        region.write(step % 2, step, step, b"{}", [torch.ones(4), torch.ones(2)])
    for attempt, left in ((1, [2, 1]), (2, [])):
        again = Region(region._memory)
        again.describe(described(attempt))
        assert [copy.step for copy in again.copies()] == left


def test_a_describer_stopped_after_any_write_leaves_no_copy_under_another_description() -> None:
    for writes in range(5):
        region = region_of(attempt=1)
        region.write(0, 1, 1, b"{}", [torch.ones(4), torch.ones(2)])
        again = Region(region._memory)
        with pytest.raises(Stopped), stopped_after(writes):
            again.describe(described(2))
        found = Region(region._memory)
        assert not found.load() or found.description == described(1)


def test_a_state_or_a_description_without_room_is_refused_and_the_slot_stays() -> None:
    region = region_of(attempt=1)
    region.write(0, 1, 1, b"{}", [torch.ones(4), torch.ones(2)])
    with pytest.raises(CheckpointError, match=r"16,777,217 bytes, expected at most 16,777,216"):
        region.write(0, 3, 3, b" " * (STATE_BYTES + 1), [torch.ones(4), torch.ones(2)])
    with (
        mock.patch.object(regions, "DESCRIPTION_BYTES", 10),
        pytest.raises(CheckpointError, match=r"description has .* bytes, expected at most 10"),
    ):
        region.describe(described(2))
    assert [copy.step for copy in region.copies()] == [1]


def test_values_of_every_kind_come_back_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(7)
    wide = torch.randn(6, 6, generator=generator)
    kinds = {
        "a": [
            held("f32", torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])),
            held("bf16", torch.randn(33, generator=generator).bfloat16()),
            held("i64", torch.tensor([-(2**63), 2**63 - 1])),
        ],
        "b": [
            held("bool", torch.tensor([True, False, True])),
            held("empty", torch.empty(0, dtype=torch.float16)),
            held("strided", wide.t()[1]),
            replace(held("block", wide[2, :3].double()), shape=(6, 6), start=2, block=Block((2, 0), (1, 3))),
        ],
    }
    held_all = [tensor for _, group in sorted(kinds.items()) for tensor in group]
    places = places_of(kinds)
    assert all(place.offset % 64 == 0 for place in places)
    region = empty_region(replace(described(1), slots=(places, places)))
    region.describe(replace(described(1), slots=(places, places)))
    region.write(1, 5, 5, b"{}", [tensor.values for tensor in held_all])
    again = Region(region._memory)
    assert again.load()
    for before, after in zip(held_all, again.held(1, ["a", "b"]), strict=True):
        assert bits(after.values) == bits(before.values)
        assert after.values.dtype == before.values.dtype
        assert replace(after, values=before.values) == before
    assert [tensor.key for tensor in again.held(1, ["b"])] == [tensor.key for tensor in kinds["b"]]


def test_slots_do_not_overlap_and_the_memory_has_room_for_all() -> None:
    description = described(1)
    region = region_of(attempt=1)
    first, second = region._starts
    assert second == first + slot_bytes(description.slots[0])
    assert region_bytes(description.slots) == second + slot_bytes(description.slots[1])
    assert data_bytes(description.slots) == 2 * (PAGE + PAGE), "a record and one page of values for each slot"
    assert len(region.data(1)) == PAGE


def test_a_dtype_that_torch_has_not_is_refused() -> None:
    place = replace(described(1).slots[0][0], dtype="torch.save")
    with pytest.raises(CheckpointError, match=r"got the dtype 'torch.save'"):
        _ = place.nbytes


def test_a_dtype_that_another_node_names_at_length_is_quoted_in_part() -> None:
    place = replace(described(1).slots[0][0], dtype="1" * 5_000)
    with pytest.raises(CheckpointError, match=r"got the dtype '111") as caught:
        _ = place.nbytes
    assert len(str(caught.value)) < 200
