"""The state of a loader that has one of its own (torchdata's StatefulDataLoader), kept for every rank, so that a resume need not fetch an epoch's
batches again from its first.

A loader's state is its rank's alone, and that of a dead rank is known to no survivor. So the ranks exchange their states in the first step of an attempt and
in every `EVERY`th, while all are about to be READY. A resume loads the newest exchanged state of its own rank, and fetches and drops the batches from there to
where the run stood. Owns these states, and which loaders have one that leads to the same batches; never iterates over a loader.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ttp.adopt.trainer_state.host_objects import from_json, to_json
from ttp.adopt.trainer_state.loader_parts import has_shuffle_buffer, inner, parts, streams
from ttp.errors import ConfigError
from ttp.inputs import checked
from ttp.runtime.rank_runtime import show

EVERY = 100
"""Steps from one exchange to the next."""
KEPT = 2
"""The newest may be of a step that is not committed."""
MAX_BYTES = 16 << 20
"""Of all ranks' states as JSON, of one step: they are a part of the manifest."""


class LoaderStates:
    """The exchanged states, and the loader that they are taken from."""

    def __init__(self, rank: int, world_size: int, exchange: Callable[[Any], list[Any]]) -> None:
        """`exchange`: a collective that returns every rank's JSON value."""
        self._rank, self._world_size, self._exchange = rank, world_size, exchange
        self._loader: Any = None
        self._asked = self._needed = False
        """The ranks have said in this attempt whether a loader has a state; some rank's has."""
        self._warned = False
        self.loaded = False
        """The epoch's batches come from a state that was loaded."""
        self.kept: tuple[dict[str, Any], ...] = ()
        """Newest last: epoch, batches of it that were handed out, every rank's state. Replaced as a whole: other threads read it."""

    def take(self, step: int, epoch: int, batch: int) -> None:
        """`step` is about to be READY on every rank (a collective in the first step of an attempt, and where loaders have states)."""
        first = not self._asked
        if first:
            self._asked, self._needed = True, any(self._exchange(self._loader is not None))
        if not self._needed or not (first or step % EVERY == 0):
            return
        states = self._exchange([epoch, batch, self._state()])
        if all(state is not None and [at, count] == [epoch, batch] for at, count, state in states):
            entry = {"epoch": epoch, "batch": batch, "states": [state for *_, state in states]}
            self.kept = (*self.kept[-KEPT + 1 :], entry)

    def ask_again(self) -> None:
        """Some rank's process is a new one, which begins as in the first step of an attempt: so do all."""
        self._asked = False

    def begin(self, loader: Any, epoch: int, done: int, *, refetch: bool | None) -> int:
        """`loader` is about to be asked for an epoch's batches, of which `done` were handed out: load the newest state before them, and return the
        number of the batch that comes first then. At least one comes again, to be compared. `refetch`: no state is loaded or kept; None: not where
        workers fetch; False: there too."""
        _forget(loader)
        self._loader = None if refetch else stateful(loader, with_workers=refetch is False)
        self.loaded = False
        if self._loader is None or not done:
            return 0
        for entry in reversed(self.kept):
            if entry["epoch"] == epoch and entry["batch"] < done and len(entry["states"]) == self._world_size:
                self._loader.load_state_dict(from_json(entry["states"][self._rank]))
                self.loaded = True
                return int(entry["batch"])
        return 0

    def give_back(self, kept: Sequence[dict[str, Any]]) -> None:
        """Take over what a checkpoint has."""
        self.kept = tuple(kept)

    def _state(self) -> Any:
        """Return this rank's state; None if there is none, or none that a manifest carries."""
        if self._loader is None:
            return None
        try:
            state = to_json(self._loader.state_dict(), "the loader's state")
        except ConfigError as error:
            return self._refuse(str(error))
        size, limit = len(json.dumps(state)), MAX_BYTES // self._world_size
        return (
            state if size <= limit else self._refuse(f"the loader's state has {size} bytes, expected at most {limit}")
        )

    def _refuse(self, reason: str) -> None:
        if not self._warned:
            show(
                logging.WARNING,
                f"rank {self._rank}: the loader's state_dict() is not kept: {reason}. A restart fetches the epoch's batches again from its first",
            )
        self._warned = True


def stateful(loader: Any, *, with_workers: bool = False) -> Any:
    """Return what has the state of a loader that leads to the same batches: the loader, or the one within it; None if there is none. What workers have
    drawn (an augmentation's noise) is in no state: `with_workers` says that they draw nothing."""
    within = inner(loader)
    if getattr(within, "num_workers", 0) and not with_workers:
        return None
    if (
        not _has_methods(within) or type(loader).__name__ == "DataLoaderDispatcher"
    ):  # rank 0 reads ahead for all, and its state is ahead too
        return None
    # Lightning's wrapper draws an epoch's order whenever it is asked for an iterator, and torchdata asks twice to load a state.
    if any(type(part).__name__ == "DistributedSamplerWrapper" for _, part in parts(loader)):
        return None
    kept_by_workers = getattr(within, "persistent_workers", False)
    if any(kept_by_workers or has_shuffle_buffer(stream) for stream in streams(loader)):
        return None
    return loader if _has_methods(loader) else within  # accelerate's reads ahead, and its own state does not


def _forget(loader: Any) -> None:
    """Have a loader begin at an epoch's first batch, as a public call of both libraries has it."""
    for stream in streams(loader):  # would begin every later epoch, too, with the state that was loaded
        stream.load_state_dict({})
    within = inner(loader)
    if getattr(
        within, "_initial_iter_for_state_dict", False
    ):  # accelerate asks for a state at once: an iterator from before the seeds
        within.load_state_dict({})


def _has_methods(loader: Any) -> bool:
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def check_kept(kept: object, path: str) -> None:
    """Judge what a checkpoint has of `LoaderStates.kept`. Raises ValueError naming the key."""
    for entry, where in checked.items(kept, path):
        fields: Mapping[str, Any] = checked.mapping(entry, where)
        for name in ("epoch", "batch"):
            checked.integer(*checked.field(dict(fields), name, where))
        for state, at in checked.items(*checked.field(dict(fields), "states", where)):
            try:
                from_json(state)
            except Exception as error:  # torch raises its own
                raise ValueError(f"{at}: cannot be read: {type(error).__name__}: {error}") from None
