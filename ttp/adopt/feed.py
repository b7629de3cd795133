"""What surrounds the fetching of every batch that `guard.batches` hands out: seeds, the loader's own generators, and the record of what was seen.

Owns what has to be put into a loader so that its epoch is a function of the run's seed and the epoch: torch's, numpy's and Python's generators that
the loader, its samplers or its data set have as attributes, and accelerate's count of epochs. Never iterates over a loader.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ttp.adopt.seeds import Seeds
from ttp.adopt.seen import Seen

_PARTS = ("base_dataloader", "batch_sampler", "sampler", "dataset")
"""Attributes of loaders and samplers that are looked into."""


class Feed:
    """Implements `position.Watch` for one trainer."""

    def __init__(self, seeds: Seeds, seen: Seen) -> None:
        self._seeds = seeds
        self._seen = seen
        self._origins: dict[int, tuple[Any, str]] = {}
        """By id: a generator, kept alive, and the hash of its state when it was first met."""
        self.used = False
        """The trainer takes its batches from the guard, in this start or in an earlier one."""

    def begin(self, loader: object, epoch: int) -> None:
        """The loader is about to be asked for an epoch's batches."""
        self.used = True
        if isinstance(getattr(loader, "iteration", None), int) and hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)  # accelerate's loaders count the epochs of this process
        if self._seeds.enabled:
            shared = getattr(loader, "synchronized_generator", None)
            for path, generator in _generators(loader):
                origin = "shared" if generator is shared else self._origin(generator)
                _seed(generator, self._seeds.number("loader", path, origin, epoch))
        self._seeds.seed_fetch(epoch, -1)

    def before_fetch(self, epoch: int, index: int) -> None:
        self._seeds.seed_fetch(epoch, index)

    def fetched(self, epoch: int, index: int, batch: object) -> None:
        """Raises DataMismatch if the run had another batch there."""
        self._seen.batch(epoch, index, batch)

    def _origin(self, generator: Any) -> str:
        """Return what the trainer has seeded a generator with: another on each rank, or the same."""
        if id(generator) not in self._origins:
            self._origins[id(generator)] = (generator, _hash_of(generator))
        return self._origins[id(generator)][1]


def _generators(loader: object) -> Iterator[tuple[str, Any]]:
    """Yield every generator of a loader once, with where it was found."""
    met: set[int] = set()

    def walk(value: object, path: str) -> Iterator[tuple[str, Any]]:
        if id(value) in met:
            return
        met.add(id(value))
        for name, each in sorted(getattr(value, "__dict__", {}).items()):
            if isinstance(each, torch.Generator | np.random.Generator | random.Random) and id(each) not in met:
                met.add(id(each))
                yield f"{path}.{name}", each
        for name in _PARTS:
            if (part := getattr(value, name, None)) is not None:
                yield from walk(part, f"{path}.{name}")

    yield from walk(loader, "loader")


def _seed(generator: Any, number: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number)
    elif isinstance(generator, random.Random):
        generator.seed(number)
    else:
        kind: Any = type(generator.bit_generator)
        generator.bit_generator.state = kind(number).state


def _hash_of(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        body = generator.get_state().numpy().tobytes()
    elif isinstance(generator, random.Random):
        body = repr(generator.getstate()).encode()
    else:
        body = repr(generator.bit_generator.state).encode()
    return hashlib.sha256(body).hexdigest()
