"""The collector of cyclic garbage, run seldom: a simulated job is made of cycles and thrown away whole, so looking for garbage
in the middle of it finds nothing and costs a quarter of the time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

ALLOCATIONS = 200_000
"""Objects that come into being between two looks: a few jobs' worth, some tens of megabytes."""


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Run the body with few collections; afterwards everything is as it was."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(ALLOCATIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
