"""Mutants that nobody can notice, each with the reason: `make mutants` counts them apart.

A row is found by its module, its line as it is written, and the change; a test holds that each row is still a mutant.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.simulation.mutants.changes import Mutant


@dataclass(frozen=True)
class Equivalent:
    """One row of the list."""

    module: str
    source: str
    change: str
    why: str

    def __contains__(self, mutant: Mutant) -> bool:
        return (mutant.module, mutant.source, mutant.change) == (self.module, self.source, self.change)


EQUIVALENT: tuple[Equivalent, ...] = ()


def reason(mutant: Mutant) -> str:
    """Return why a mutant changes nothing that matters; empty: nobody says so."""
    return next((row.why for row in EQUIVALENT if mutant in row), "")
