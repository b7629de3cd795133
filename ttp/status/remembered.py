"""What was read from files, kept until they change: one value for each name.

Owns which change of a file counts: its size and when it was written, or another file in its place. That it was read is none.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
State = tuple[tuple[int, int, int], ...]


def state_of(paths: Iterable[Path]) -> State:
    """Return the state of files: another one when any of them has changed. Raises OSError."""
    return tuple((found.st_ino, found.st_size, found.st_mtime_ns) for found in map(os.stat, paths))


class Remembered(Generic[Key, Value]):
    """The newest value of each key. Any thread; two that look at once may both read."""

    def __init__(self, most: int) -> None:
        """`most`: keys; the one that was asked for longest ago goes first."""
        self._most = most
        self._values: OrderedDict[Key, tuple[State, Value]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Key, state: State, read: Callable[[], Value]) -> Value:
        """Return the value of a key, read anew where the files' state is another than before. Raises what `read` raises."""
        known = self._values.pop(key, None)
        if known is None or known[0] != state:
            known = state, read()
        self._values[key] = known
        while len(self._values) > self._most:
            self._values.popitem(last=False)
        return known[1]
