"""What surrounds the fetching of every batch that `guard.batches` hands out: seeds, the loader's own generators, and the record of what was seen.

Owns what has to be put into a loader so that its epoch is a function of the run's seed and the epoch: torch's, numpy's and Python's generators that
the loader, its samplers or its data set have as attributes, and accelerate's and Fabric's count of epochs. Never iterates over a loader.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ttp.adopt.trainer_state.loader_parts import parts
from ttp.adopt.trainer_state.loader_states import LoaderStates
from ttp.adopt.trainer_state.seeds import Seeds
from ttp.adopt.trainer_state.seen import SeenBatches

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class Feed:
    """Implements `position.Watch` for one trainer."""

    def __init__(self, seeds: Seeds, seen: SeenBatches, states: LoaderStates) -> None:
        self._seeds = seeds
        self._seen = seen
        self._states = states
        self._origins: dict[int, tuple[Any, str]] = {}
        """By id: a generator, kept alive, and the hash of its state when it was first met."""
        self.used = False
        """The trainer takes its batches from the guard, in this attempt or in an earlier one."""

    def begin(self, loader: Any, epoch: int, done: int, *, refetch: bool | None) -> int:
        """The loader is about to be asked for an epoch's batches, of which `done` were handed out; return the number of the one that comes first."""
        self.used = True
        for _, part in list(parts(loader)):  # accelerate's loaders and Fabric's count the epochs of this process
            if isinstance(getattr(part, "iteration", None), int) and hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
            elif isinstance(getattr(part, "_num_iter_calls", None), int):
                part._num_iter_calls = epoch
        if self._seeds.enabled:
            shared = getattr(loader, "synchronized_generator", None)
            for path, generator in _generators(loader):
                origin = "shared" if generator is shared else self._origin(generator)
                _seed(generator, self._seeds.number("loader", path, origin, epoch))
        first = self._states.begin(loader, epoch, done, refetch=refetch)
        self._seeds.seed_fetch(epoch, -1)
        return first

    def before_fetch(self, epoch: int, index: int) -> None:
        self._seeds.seed_fetch(epoch, index)

    def fetched(self, epoch: int, index: int, batch: object) -> None:
        """Raises DataMismatch if the run had another batch there."""
        self._seen.batch(epoch, index, batch, from_state=self._states.loaded)

    def _origin(self, generator: Any) -> str:
        """Return what the trainer has seeded a generator with: another on each rank, or the same."""
        if id(generator) not in self._origins:
            self._origins[id(generator)] = (generator, _hash_of(generator))
        return self._origins[id(generator)][1]


def _generators(loader: object) -> Iterator[tuple[str, Any]]:
    """Yield every generator of a loader once, with where it was found."""
    met: set[int] = set()
    for path, part in parts(loader):
        for name, each in sorted(getattr(part, "__dict__", {}).items()):
            if isinstance(each, _KINDS) and id(each) not in met:
                met.add(id(each))
                yield f"{path}.{name}", each


def _seed(generator: Any, number: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number)
    elif isinstance(generator, random.Random):
        generator.seed(number)
    elif isinstance(generator, np.random.RandomState):
        generator.seed(number & 0xFFFFFFFF)
    else:
        kind: Any = type(generator.bit_generator)
        generator.bit_generator.state = kind(number).state


def _hash_of(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        body = generator.get_state().numpy().tobytes()
    elif isinstance(generator, random.Random):
        body = repr(generator.getstate()).encode()
    elif isinstance(generator, np.random.RandomState):
        body = repr(generator.get_state(legacy=False)).encode()
    else:
        body = repr(generator.bit_generator.state).encode()
    return hashlib.sha256(body).hexdigest()
