"""Where the trainer stands in its data: the epoch, and how many of its batches were handed out."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar

from ttp.adopt.trainer_state.loader_parts import counts_itself, length, samples_in_batch
from ttp.adopt.trainer_state.seen import SeenBatches
from ttp.errors import ConfigError
from ttp.inputs import checked
from ttp.runtime.rank_runtime import show

T = TypeVar("T")

_COUNTED = ("ranks", "samples", "length")
"""What a batch was counted by."""


class IteratorWatch(Protocol):
    """What is called around the fetching of batches, of those too that are dropped."""

    def begin(self, loader: Any, epoch: int, done: int, *, refetch: bool | None) -> int:
        """The loader is about to be asked for an epoch's batches, of which `done` were handed out; return the number of the one that comes
        first, 0 unless it goes on from a state of its own (never with `refetch`; with workers only where that is False)."""

    def before_fetch(self, epoch: int, index: int) -> None: ...

    def fetched(self, epoch: int, index: int, batch: object) -> None: ...


class DataPosition:
    """Counts batches, and skips on resume those that were trained on."""

    def __init__(self, watch: IteratorWatch, seen: SeenBatches) -> None:
        """`seen`: knows the ranks, and what follows data that differ."""
        self.epoch = 0
        self.batch = 0
        """Batches of `epoch` that were handed out."""
        self._ranks = self._samples = self._length = 0
        """On how many ranks they were counted, the samples of one batch of each, and the epoch's batches; 0: not known."""
        self._over = -1
        """The epoch whose end was reached."""
        self._taken = (0, 0)
        """The epoch and its batches in the newest step's state."""
        self._counts_epochs = self._left = self._warned = False
        """`epochs` was called; the newest loop ended behind a step, by break or return; that was warned of."""
        self._watch, self._seen = watch, seen

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that are left of `count`, the first where the checkpoint stood."""
        self._counts_epochs = True
        while self.epoch < count:
            yield self.epoch
            self.warn_if_left()
            self.epoch, self.batch = self.epoch + 1, 0

    def warn_if_left(self) -> None:
        """The trainer goes on without a further batch, and not by an exception: a loop that ended behind a step by break or return is warned of once."""
        if self._left and not self._warned and self._seen.rank == 0:
            self._warned = True
            show(
                logging.WARNING,
                f"the loop over guard.batches ended by break or return after the step of batch {self.batch - 1} of epoch {self.epoch}: a restart from that step"
                f" would hand out batch {self.batch}, and train on it, before a test behind the step is made. Expected"
                f" guard.batches(loader, limit={self.batch}), or the test before the step",
            )
        self._left = False

    def batches(
        self, loader: Iterable[T], *, refetch: bool | None = None, limit: int | None = None
    ) -> Iterator[tuple[int, T]]:
        """Yield the batches that are left of this epoch, which ends after `limit` of them, each with its number in it; those before are fetched and
        dropped, from the epoch's first or from the newest state that the loader has of its own (not with `refetch`). So it must give the same ones again
        in every run. Raises ConfigError for a wrong limit and when they are asked for again after the epoch's end, DataMismatch where it is not known
        which ones remain."""
        if self._over == self.epoch:
            raise ConfigError(
                f"batches() was called again after the end of epoch {self.epoch}, expected once in each epoch that"
                " `for epoch in guard.epochs(count)` counts, for the training data; iterate over other loaders themselves"
            )
        if limit is not None and (not isinstance(limit, int) or limit < 0):
            raise ConfigError(
                f"invalid limit: got {checked.shown(limit)}, expected a number of batches, or None for all"
            )
        self._count_on(loader, limit)
        if self._over == self.epoch:
            return
        skipped = self.batch
        first = self._watch.begin(loader, self.epoch, skipped, refetch=refetch)
        batches = iter(loader)
        for index in itertools.count(first) if limit is None else range(first, limit):
            self._watch.before_fetch(self.epoch, index)
            try:
                batch = next(batches)
            except StopIteration:
                if index < skipped:
                    self._seen.differs(
                        f"the loader ended before batch {index} of epoch {self.epoch}, of which {skipped} batches were trained on before"
                        f" {self._seen.event}, expected the same data in every attempt: give the loader what it had",
                        on_all_ranks=True,
                    )
                break
            self._watch.fetched(self.epoch, index, batch)
            if index >= skipped:
                self.batch, self._left = index + 1, False
                try:
                    yield index, batch
                except GeneratorExit:  # by `break` or `return`, or by an exception: what follows shows it
                    stepped, ended = self._taken == (self.epoch, index + 1), index + 1 == self._length
                    self._left = self._counts_epochs and stepped and not ended and not counts_itself(loader)
                    raise
        self._over = self.epoch

    def state_dict(self) -> dict[str, Any]:
        self._taken = self.epoch, self.batch
        counted = {"ranks": self._ranks, "samples": self._samples, "length": self._length}
        return {"epoch": self.epoch, "batch": self.batch, **counted}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch, self.batch, self._over = int(state_dict["epoch"]), int(state_dict["batch"]), -1
        self._left = False
        # Older checkpoints have none of these.
        self._ranks, self._samples, self._length = (int(state_dict.get(name, 0)) for name in _COUNTED)

    # --- inside ---

    def _count_on(self, loader: object, limit: int | None) -> None:
        """Have `batch` count the batches of this loader on this job's ranks. Raises DataMismatch."""
        ranks, samples = self._seen.world_size, samples_in_batch(loader)
        if self.batch and self._ranks not in (0, ranks):
            if self._length and self.batch >= self._length:
                self._over = self.epoch
                return
            self.batch = self._recounted(ranks, samples)
        self._ranks, self._samples, self._length = ranks, samples, length(loader, limit)

    def _recounted(self, ranks: int, samples: int) -> int:
        """Return after how many batches on `ranks` as many samples were handed out. Raises DataMismatch."""
        where = f"epoch {self.epoch} was interrupted after {self.batch} batches on each of {self._ranks} ranks, and goes on with {ranks}"
        if not (self._samples and samples):
            self._seen.differs(
                f"{where}: got a loader of which it is not certain what that is on another number of ranks, expected torch's"
                f" DistributedSampler, or a loader that accelerate has prepared. Skipping {self.batch} batches on each rank may leave samples"
                f" out, or train on them twice: resume with {self._ranks} ranks",
                on_all_ranks=True,
            )
            return self.batch
        before = self.batch * self._samples
        recounted, twice = divmod(before, samples)
        if self._seen.rank == 0:
            again = f". {twice} of them are trained on again, fewer than all ranks take at once" if twice else ""
            show(
                logging.WARNING if twice else logging.INFO,
                f"{where}. Skipping {recounted} batches on each rank, of {before} samples that were trained on{again}",
            )
        return recounted


def check_position(position: object, path: str) -> None:
    """Judge what a checkpoint has of `DataPosition.state_dict`. Raises ValueError naming the key."""
    fields = checked.mapping(position, path)
    for name in ("epoch", "batch", *(_COUNTED if "ranks" in fields else ())):
        checked.integer(*checked.field(fields, name, path))
