"""The way of the updated masters into everybody's parameters: started in one moment, waited for in another.

Owns the works in between. Between the two calls the parameters are half new: nothing reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ttp.optim.part import ParameterPart


class Gather:
    """The gather of all parts' parameters."""

    def __init__(self, parts: Sequence[ParameterPart]) -> None:
        self._parts = parts
        self._works: list[Any] = []

    def start(self) -> None:
        """Round the masters into the parameters and begin to share them within the row, bucket by bucket."""
        for part in self._parts:
            for bucket, memory in enumerate(part.memory):
                part.shards.masters_to_params(bucket)
                self._works.extend(part.wires.gather(memory))

    def finish(self) -> None:
        """Wait until the parameters are whole; at once where nothing is under way."""
        while self._works:
            self._works[0].wait()
            del self._works[0]
