"""The memory that one rank copies its state into: a description, and slots, each of which holds one step whole or nothing.

Owns the form of that memory, and the order of writes: the slot's record is cleared, then the content is written, then the record. A rank that
dies between any two of them leaves the other slots as they were. Whoever reads takes a slot by its record alone.
"""

from __future__ import annotations

import json
import mmap
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ttp.checkpoint.format.block import Block
from ttp.checkpoint.format.dcp import dtype_name
from ttp.checkpoint.format.types import HeldTensor
from ttp.errors import CheckpointError
from ttp.inputs import checked

PAGE = mmap.PAGESIZE
DESCRIPTION_BYTES = 64 << 20
"""Room for the description. Pages that are never written take no memory."""
STATE_BYTES = 16 << 20
"""Room for the host state of one step."""
_ALIGNED = 64
_MOST_NUMEL = 1 << 40
_RECORD = struct.Struct("<8sQqQI")
_MARK = b"ttpcopy1"
_LENGTH = struct.Struct("<QI")


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one run of a tensor's elements lies in a slot: everything of a HeldTensor but its values."""

    group: str
    key: str
    shape: tuple[int, ...]
    start: int
    dtype: str
    numel: int
    block: tuple[tuple[int, ...], tuple[int, ...]] | None
    offset: int

    @property
    def nbytes(self) -> int:
        return self.numel * _dtype(self.dtype).itemsize


def places_of(holdings: dict[str, list[HeldTensor]]) -> tuple[TensorPlace, ...]:
    """Lay out what a rank holds, by group."""
    places: list[TensorPlace] = []
    offset = 0
    for group, tensors in sorted(holdings.items()):
        for held in tensors:
            block = None if held.block is None else (tuple(held.block.offsets), tuple(held.block.sizes))
            values = held.values
            places.append(
                TensorPlace(
                    group,
                    held.key,
                    tuple(held.shape),
                    held.start,
                    dtype_name(values.dtype),
                    values.numel(),
                    block,
                    offset,
                )
            )
            offset = _end(places)
    return tuple(places)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"invalid copy: got the dtype {checked.shown(name)}, expected one of torch's")
    return found


@dataclass(frozen=True, slots=True)
class Description:
    """What is the same for all steps of one attempt."""

    rank: int
    attempt: int
    """Its number."""
    world_size: int
    groups: tuple[str, ...]
    """The shard groups of the whole job."""
    slots: tuple[tuple[TensorPlace, ...], ...]
    """What each slot holds."""
    facts: dict[str, Any]
    """For the manifest, and for whoever writes: layout, shapes of all tensors, directories, keys."""

    def encode(self) -> bytes:
        return json.dumps(
            {
                "rank": self.rank,
                "attempt": self.attempt,
                "world_size": self.world_size,
                "groups": self.groups,
                "slots": [
                    [[getattr(place, name) for name in TensorPlace.__slots__] for place in slot] for slot in self.slots
                ],
                "facts": self.facts,
            }
        ).encode()

    @classmethod
    def decode(cls, content: bytes) -> Description:
        """Return a description that `encode` has written. Raises ValueError for another one: no place lies outside of its slot."""
        try:
            fields = checked.mapping(json.loads(content), "description")
        except RecursionError:
            raise ValueError("invalid description: got values nested too deep to be read") from None
        rank, attempt, world_size = (
            checked.integer(*checked.field(fields, name, "")) for name in ("rank", "attempt", "world_size")
        )
        groups = [checked.string(*each) for each in checked.items(*checked.field(fields, "groups", ""))]
        slots = [_slot(*each) for each in checked.items(*checked.field(fields, "slots", ""))]
        facts = checked.mapping(*checked.field(fields, "facts", ""))
        for each in checked.items(*checked.field(facts, "directories", "facts")):
            checked.string(*each)
        checked.inodes(*checked.field(facts, "passed_over", "facts"))
        return cls(rank, attempt, world_size, tuple(groups), tuple(slots), facts)


def _slot(value: object, path: str) -> tuple[TensorPlace, ...]:
    places: list[TensorPlace] = []
    for each, where in checked.items(value, path):
        values = [item for item, _ in checked.items(each, where)]
        if len(values) != len(TensorPlace.__slots__):
            raise checked.Invalid(where, each, f"{len(TensorPlace.__slots__)} values of a tensor's place")
        places.append(_place(values, where, _end(places)))
    return tuple(places)


def _end(places: Sequence[TensorPlace]) -> int:
    """Return where the next place of a slot begins."""
    return places[-1].offset + -(-places[-1].nbytes // _ALIGNED) * _ALIGNED if places else 0


def _place(values: Sequence[Any], path: str, offset: int) -> TensorPlace:
    group, key, shape, start, dtype, numel, block, offset_in_tensor = values
    cut = None
    if block is not None:
        sides = [checked.integers(*each) for each in checked.items(block, f"{path}.block")]
        if len(sides) != 2:
            raise checked.Invalid(f"{path}.block", block, "offsets and sizes")
        cut = (sides[0], sides[1])
    try:
        _dtype(checked.string(dtype, f"{path}.dtype"))
    except CheckpointError as error:
        raise ValueError(str(error)) from None
    return TensorPlace(
        checked.string(group, f"{path}.group"), checked.string(key, f"{path}.key"), checked.integers(shape, f"{path}.shape"),
        checked.integer(start, f"{path}.start"), dtype, checked.integer(numel, f"{path}.numel", 0, _MOST_NUMEL), cut,
        checked.integer(offset_in_tensor, f"{path}.offset", offset, offset),
    )  # fmt: skip


def slot_bytes(places: Sequence[TensorPlace]) -> int:
    """Return the size of a slot: its record, its state's room, its data."""
    data = places[-1].offset + places[-1].nbytes if places else 0
    return PAGE + STATE_BYTES + -(-data // PAGE) * PAGE


def region_bytes(slots: Sequence[Sequence[TensorPlace]]) -> int:
    return PAGE + DESCRIPTION_BYTES + sum(map(slot_bytes, slots))


def data_bytes(slots: Sequence[Sequence[TensorPlace]]) -> int:
    """Return how much of it is written for sure: what has to fit into memory."""
    return sum(slot_bytes(slot) - STATE_BYTES for slot in slots)


@dataclass(frozen=True, slots=True)
class Copy:
    """One slot that is whole."""

    slot: int
    step: int
    sequence: int
    """Grows with each copy of the rank's."""
    state: bytes
    """The host state of the step, JSON."""


class Region:
    """A mapping of one rank's memory. Of a rank: `describe`, `write`. Of a keeper: `read`, `clear`, `receive`."""

    def __init__(self, memory: memoryview) -> None:
        """`memory`: all of it, writable, from its first byte."""
        self._memory = memory
        self.description: Description | None = None
        self._starts: list[int] = []
        self._written: dict[int, list[torch.Tensor]] = {}
        """By slot that was written: the memory of its places."""

    def describe(self, description: Description) -> None:
        """Begin an attempt: every slot is empty. Where the memory has this very description, its slots are this attempt's and stay."""
        content = description.encode()
        if len(content) > DESCRIPTION_BYTES:
            raise CheckpointError(
                f"the state's description has {len(content):,} bytes, expected at most {DESCRIPTION_BYTES:,}"
            )
        self._take(description)
        if self._content() == content:
            return
        self._put(0, bytes(_LENGTH.size))
        for slot in range(len(description.slots)):
            self.clear(slot)
        self._put(PAGE, content)
        self._put(0, _LENGTH.pack(len(content), zlib.crc32(content)))

    def load(self) -> bool:
        """Read the description; False: there is none, so no slot holds anything."""
        if content := self._content():
            self._take(Description.decode(content))
        return bool(content)

    def _content(self) -> bytes:
        """Return the description as it is encoded; empty: there is none, or no room for one."""
        if len(self._memory) < _LENGTH.size:
            return b""
        size, check = _LENGTH.unpack(self._memory[: _LENGTH.size])
        content = bytes(self._memory[PAGE : PAGE + min(size, DESCRIPTION_BYTES)])
        return content if zlib.crc32(content) == check else b""

    def _take(self, description: Description) -> None:
        self.description, self._written = description, {}
        self._starts, start = [], PAGE + DESCRIPTION_BYTES
        for slot in description.slots:
            self._starts.append(start)
            start += slot_bytes(slot)

    def write(self, slot: int, step: int, sequence: int, state: bytes, tensors: Sequence[torch.Tensor]) -> None:
        """Copy a step into a slot. `tensors`: the values of its places, in their order, 1-D; those of a device are waited for."""
        assert self.description is not None
        if len(state) > STATE_BYTES:
            raise CheckpointError(
                f"step {step}: the host state has {len(state):,} bytes, expected at most {STATE_BYTES:,}"
            )
        self.clear(slot)
        start = self._starts[slot]
        self._put(start + PAGE, state)
        if slot not in self._written:
            data = start + PAGE + STATE_BYTES
            self._written[slot] = [self._values(data, place) for place in self.description.slots[slot]]
        for room, values in zip(self._written[slot], tensors, strict=True):
            self._copy(room, values)
        self.commit(slot, step, sequence, len(state))

    @staticmethod
    def _copy(room: torch.Tensor, values: torch.Tensor) -> None:
        room.copy_(values)

    def _values(self, data: int, place: TensorPlace) -> torch.Tensor:
        if not place.numel:
            return torch.empty(0, dtype=_dtype(place.dtype))
        part = self._memory[data + place.offset : data + place.offset + place.nbytes]
        return torch.frombuffer(part, dtype=_dtype(place.dtype))

    def clear(self, slot: int) -> None:
        """From here on the slot holds nothing."""
        self._put(self._starts[slot], bytes(_RECORD.size))

    def commit(self, slot: int, step: int, sequence: int, state_bytes: int) -> None:
        """From here on the slot holds the step."""
        self._put(self._starts[slot], record_of(step, sequence, state_bytes))

    def read(self, slot: int) -> Copy | None:
        """Return what the slot holds; None: nothing whole."""
        start = self._starts[slot]
        mark, sequence, step, size, check = _RECORD.unpack(self._memory[start : start + _RECORD.size])
        if mark != _MARK or check != zlib.crc32(self._memory[start : start + _RECORD.size - 4]) or size > STATE_BYTES:
            return None
        return Copy(slot, step, sequence, bytes(self._memory[start + PAGE : start + PAGE + size]))

    def copies(self) -> list[Copy]:
        """Return all that is whole, newest first."""
        found = [self.read(slot) for slot in range(len(self._starts))]
        return sorted((copy for copy in found if copy is not None), key=lambda copy: -copy.sequence)

    def held(self, slot: int, groups: Sequence[str]) -> list[HeldTensor]:
        """Return views of what a slot has of these groups."""
        assert self.description is not None
        data = self._starts[slot] + PAGE + STATE_BYTES
        return [
            HeldTensor(
                place.key,
                place.shape,
                place.start,
                self._values(data, place),
                None if place.block is None else Block(*place.block),
            )
            for place in self.description.slots[slot]
            if place.group in groups
        ]

    def state(self, slot: int) -> memoryview:
        """Return the state's room."""
        return self._memory[self._starts[slot] + PAGE :][:STATE_BYTES]

    def data(self, slot: int) -> memoryview:
        """Return the bytes of a slot's tensors."""
        assert self.description is not None
        size = slot_bytes(self.description.slots[slot]) - PAGE - STATE_BYTES
        return self._memory[self._starts[slot] + PAGE + STATE_BYTES :][:size]

    def _put(self, start: int, content: bytes) -> None:
        self._memory[start : start + len(content)] = content


def record_of(step: int, sequence: int, state_bytes: int) -> bytes:
    """Return a slot's commit record."""
    body = _RECORD.pack(_MARK, sequence, step, state_bytes, 0)[:-4]
    return body + zlib.crc32(body).to_bytes(4, "little")
