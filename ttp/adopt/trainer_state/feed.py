"""What surrounds the fetching of every batch that `guard.batches` hands out: seeds, the loader's own generators, and the record of what was seen.

Owns what has to be put into a loader so that its epoch is a function of the run's seed and the epoch: torch's, numpy's and Python's generators that
the loader, its samplers or its data set have as attributes, and accelerate's and Fabric's count of epochs. Never iterates over a loader.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
        self._origins: dict[int, _Origin] = {}
        """By the generator's id."""
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
                self._note_seeded(generator)
        first = self._states.begin(loader, epoch, done, refetch=refetch)
        self._seeds.seed_fetch(epoch, -1)
        return first

    def before_fetch(self, epoch: int, index: int) -> None:
        self._seeds.seed_fetch(epoch, index)

    def fetched(self, epoch: int, index: int, batch: object) -> None:
        """Raises DataMismatch if the run had another batch there."""
        self._seen.batch(epoch, index, batch, from_state=self._states.loaded)

    def _origin(self, generator: Any) -> str:
        """Return what the trainer has seeded a generator with: another on each rank, or the same; in each epoch, or once. A process that begins in a
        later epoch finds the same."""
        known = self._origins.get(id(generator))
        if known is None or _is_seeded_anew(generator, known.seeded):
            known = self._origins[id(generator)] = _Origin(generator, _hash_of(generator))
        return known.text

    def _note_seeded(self, generator: Any) -> None:
        if (known := self._origins.get(id(generator))) is not None:
            known.seeded = _seeding_of(generator)


@dataclass(slots=True)
class _Origin:
    generator: Any
    """Kept alive, so that no other one gets its id."""
    text: str
    """The hash of its state when the trainer had seeded it."""
    seeded: object = None
    """What `_seeding_of` has found behind this module's own seeding."""


def _seeding_of(generator: Any) -> object:
    """Return what only a new seed changes, and no drawn number does; None: this cannot be seen now."""
    if isinstance(generator, torch.Generator):
        return generator.initial_seed()
    if isinstance(generator, random.Random):
        return _hash_of(generator) if _is_fresh(generator.getstate()[1]) else None
    if isinstance(generator, np.random.RandomState):
        fields: Any = generator.get_state(legacy=False)
        state = fields["state"]
        return _hash_of(generator) if "key" in state and _is_fresh(state["key"].tolist()) else None
    return generator.bit_generator.state["state"].get("inc")


def _is_fresh(words: Sequence[int]) -> bool:
    """Return whether no number was drawn from a Mersenne Twister since it was seeded: its first words are what its authors' two ways of seeding make
    (init_by_array and init_genrand in mt19937ar.c), and the first number that is drawn replaces them all."""
    return words[0] == 1 << 31 or words[1] == (1812433253 * (words[0] ^ words[0] >> 30) + 1) % (1 << 32)


def _is_seeded_anew(generator: Any, seeded: object) -> bool:
    """Return whether the trainer has seeded a generator since this module has."""
    now = _seeding_of(generator)
    return now is not None and now != seeded


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
