"""One entry of the matrix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ttp.chaos.faults.scenario import FaultSpec


@dataclass(frozen=True, slots=True)
class MatrixCase:
    """A kind of fault, a phase, and the role of the rank or node that is hit."""

    kind: str
    phase: str
    role: str
    fault: FaultSpec

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.phase}/{self.role}"


def labelled(cells: Iterable[MatrixCase]) -> tuple[MatrixCase, ...]:
    """Return the cells with faults that carry their names."""
    return tuple(replace(cell, fault=replace(cell.fault, label=cell.name)) for cell in cells)
