"""An immutable table with one value per rank (PURE).

Owns only the storage trick: the table is a tuple of chunks of about sqrt(world) values, so that replacing one value
copies two short tuples. At 10,000 ranks a heartbeat then copies 200 references instead of 10,000.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Generic, TypeVar

from ttp.proto.frozen import dataclass

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PerRank(Generic[T]):
    """Values of ranks 0 to size-1. Equal tables compare and hash equal when their values do."""

    chunks: tuple[tuple[T, ...], ...]
    width: int
    size: int

    @classmethod
    def filled(cls, size: int, value: T) -> PerRank[T]:
        """Return a table of `size` ranks that all have `value`."""
        width = max(8, math.isqrt(size))
        whole, rest = divmod(size, width)
        full = (value,) * width
        chunks = (full,) * whole + (((value,) * rest,) if rest else ())
        return cls(chunks, width, size)

    @classmethod
    def of(cls, values: Sequence[T]) -> PerRank[T]:
        """Return a table of these values, that of rank 0 first."""
        size = len(values)
        width = max(8, math.isqrt(size))
        return cls(tuple(tuple(values[at : at + width]) for at in range(0, size, width)), width, size)

    def __getitem__(self, rank: int) -> T:
        return self.chunks[rank // self.width][rank % self.width]

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self.chunks)

    def put(self, rank: int, value: T) -> PerRank[T]:
        """Return the table with `rank`'s value replaced."""
        row, column = divmod(rank, self.width)
        changed = list(self.chunks[row])
        changed[column] = value
        chunks = list(self.chunks)
        chunks[row] = tuple(changed)
        return PerRank(tuple(chunks), self.width, self.size)

    def put_all(self, values: Mapping[int, T]) -> PerRank[T]:
        """Return the table with the values of these ranks replaced; each chunk that changes is copied once."""
        rows: dict[int, list[T]] = {}
        for rank, value in values.items():
            row, column = divmod(rank, self.width)
            if row not in rows:
                rows[row] = list(self.chunks[row])
            rows[row][column] = value
        chunks = tuple(tuple(rows[row]) if row in rows else chunk for row, chunk in enumerate(self.chunks))
        return PerRank(chunks, self.width, self.size)

    def ranks(self, condition: Callable[[T], bool]) -> tuple[int, ...]:
        """Return the ranks whose value meets the condition, ascending. O(world)."""
        return tuple(rank for rank, value in enumerate(self) if condition(value))
