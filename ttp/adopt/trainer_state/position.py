"""Where the trainer stands in its data: the epoch, and how many of its batches were handed out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar

from ttp.errors import ConfigError

T = TypeVar("T")


class IteratorWatch(Protocol):
    """What is called around the fetching of batches, of those too that are dropped."""

    def begin(self, loader: Any, epoch: int, done: int, *, refetch: bool | None) -> int:
        """The loader is about to be asked for an epoch's batches, of which `done` were handed out; return the number of the one that comes
        first, 0 unless it goes on from a state of its own (never with `refetch`; with workers only where that is False)."""

    def before_fetch(self, epoch: int, index: int) -> None: ...

    def fetched(self, epoch: int, index: int, batch: object) -> None: ...


class DataPosition:
    """Counts batches, and skips on resume those that were trained on."""

    def __init__(self, watch: IteratorWatch) -> None:
        self.epoch = 0
        self.batch = 0
        """Batches of `epoch` that were handed out."""
        self._over = -1
        """The epoch whose end was reached."""
        self._watch = watch

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that are left of `count`, the first where the checkpoint stood."""
        while self.epoch < count:
            yield self.epoch
            self.epoch, self.batch = self.epoch + 1, 0

    def batches(self, loader: Iterable[T], *, refetch: bool | None = None) -> Iterator[tuple[int, T]]:
        """Yield the batches that are left of this epoch, each with its number in it; those before are fetched and dropped, from the epoch's first or from
        the newest state that the loader has of its own (not with `refetch`). So it must give the same ones again in every run. Raises ConfigError when they are asked for again after the epoch's end."""
        if self._over == self.epoch:
            raise ConfigError(
                f"batches() was called again after the end of epoch {self.epoch}, expected once in each epoch that"
                " `for epoch in guard.epochs(count)` counts, for the training data; iterate over other loaders themselves"
            )
        skipped = self.batch
        first = self._watch.begin(loader, self.epoch, skipped, refetch=refetch)
        batches = iter(loader)
        for index in itertools.count(first):
            self._watch.before_fetch(self.epoch, index)
            try:
                batch = next(batches)
            except StopIteration:
                self._over = self.epoch
                return
            self._watch.fetched(self.epoch, index, batch)
            if index >= skipped:
                self.batch = index + 1
                yield index, batch

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch, self.batch, self._over = int(state_dict["epoch"]), int(state_dict["batch"]), -1
