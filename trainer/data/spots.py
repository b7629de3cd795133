"""A short hash of tokens of any number: of some blocks at equal distances, so that it takes no longer for a longer text.

Owns which tokens are looked at. A change that lies between two blocks is missed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Protocol

import numpy.typing as npt

BLOCKS = 256
BLOCK = 1 << 12
"""Tokens of a block."""
EDGE = 1 << 16
"""Tokens at either end that are hashed too: that is where texts are cut off and added to."""


class Readable(Protocol):
    """Token ids of known number, of which some can be read."""

    size: int

    def read(self, start: int, stop: int) -> npt.NDArray[Any]: ...


def spots(size: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges that are hashed of `size` tokens: all of a text that is not longer than the blocks, else both ends, and the blocks from the
    first token to the last."""
    if size <= BLOCKS * BLOCK:
        yield 0, size
        return
    yield 0, EDGE
    for number in range(BLOCKS):
        start = (size - BLOCK) * number // (BLOCKS - 1)
        yield start, start + BLOCK
    yield size - EDGE, size


def spot_hash(tokens: Readable, known: str) -> str:
    """Return a short hash of the tokens' spots, and of what is `known` of all of them. Raises DatasetError for what cannot be read."""
    digest = hashlib.sha256(f"{tokens.size} {known} ".encode())
    for start, stop in spots(tokens.size):
        digest.update(tokens.read(start, stop).tobytes())
    return digest.hexdigest()[:16]
