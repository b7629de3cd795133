"""A store whose entries are sealed: what another program has written there is as if it were absent.

Owns which operations are sealed. `set`, `compare_set` and `append` seal, `get`, `multi_get` and `check` look at the seals, and every other
operation is refused, but for one: `add` counts in the store itself, so a counter has no seal. Whoever uses a counter sees to it that a wrong one
can delay the job or do what a crash would, and nothing else. Raises what the store raises, and nothing of its own.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from ttp.identity import own
from ttp.identity.sealed import NotSealed, seal, unseal

LOOK_S = 0.1
"""Between two looks at an entry that was refused: its writer may replace it."""
_LINE = "line"
"""Ends the context of what was appended: no whole entry is taken for a line of a list."""
_MOST_REFUSALS = 1000

Value = str | bytes


@dataclass(frozen=True, slots=True)
class Seal:
    """How one store's entries are sealed."""

    key: bytes = field(repr=False)
    context: tuple[str, ...]
    """The job, and the attempt or the endpoint."""
    log: logging.Logger = field(default=logging.getLogger("ttp"), compare=False)


_refused: set[tuple[Seal, str, str]] = set()
"""What was logged."""


def attempts_seal(job_id: str, log: logging.Logger) -> Seal | None:
    """Return how the workers' store of an attempt is sealed; None: this process has no credentials for that, and entries are plain. Raises
    ControllerError. `job_id`: the attempt's name."""
    credentials = own.credentials()
    return Seal(credentials.store_key, (job_id,), log) if credentials is not None and credentials.store_key else None


def sealed(store: Store, how: Seal | None) -> Store:
    """Return the store with its entries sealed; None: as it is."""
    return store if how is None else SealedStore(store, how)


def unsealed(store: Store) -> Store:
    """Return the store itself, to read counters in."""
    found: Store = store.base if isinstance(store, SealedStore) else store
    return found


class SealedStore(Store):
    """Seals what is written to another store. An entry without a seal that fits is logged once, and is absent."""

    def __init__(self, base: Store, how: Seal) -> None:
        super().__init__()
        self.base: Any = base  # torch's types lack some of its operations, and bytes
        self._how = how

    def set(self, key: str, value: Value) -> None:
        self.base.set(key, self._seal(key, value))

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        self.base.multi_set(keys, [self._seal(key, value) for key, value in zip(keys, values, strict=True)])

    def append(self, key: str, value: Value) -> None:
        """Add a line to a list, its end included."""
        self.base.append(key, seal(self._how.key, (*self._how.context, key, _LINE), _bytes(value)))

    def add(self, key: str, amount: int) -> int:
        return int(self.base.add(key, amount))

    def get(self, key: str) -> bytes:
        """Wait for the entry; one that is refused may still be replaced. Raises DistStoreError after the store's own time."""
        until_s = time.monotonic() + self.base.timeout.total_seconds()
        while True:
            if (value := self._open(key, self.base.get(key))) is not None:
                return value
            if time.monotonic() >= until_s:
                raise DistStoreError(f"wait timeout: the store's entry {key!r} is not this job's")
            time.sleep(LOOK_S)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return entries that this job has written, as `get` does."""
        found = [self._open(key, entry) for key, entry in zip(keys, self.base.multi_get(keys), strict=True)]
        return [self.get(key) if value is None else value for key, value in zip(keys, found, strict=True)]

    def check(self, keys: Sequence[str]) -> bool:
        if not self.base.check(keys):
            return False
        opened = [self._open(key, entry) for key, entry in zip(keys, self.base.multi_get(keys), strict=True)]
        return None not in opened

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Where nothing is expected, an entry that is refused is replaced. Returns what is there now; empty: nothing of this job."""
        entry = self._seal(key, desired)
        found = self.base.compare_set(key, self._seal(key, expected) if expected else b"", entry)
        if (value := self._open(key, found)) is None and not expected:
            value = self._open(key, self.base.compare_set(key, found, entry))
        return value or b""

    def _seal(self, key: str, value: Value) -> bytes:
        return seal(self._how.key, (*self._how.context, key), _bytes(value))

    def _open(self, key: str, entry: bytes) -> bytes | None:
        """Return the value of an entry, or of a list's lines; None: it is refused."""
        context = (*self._how.context, key)
        try:
            return unseal(self._how.key, context, entry)
        except NotSealed as error:
            refusal = str(error)
        lines, opened = entry.splitlines(keepends=True), []
        for line in lines:
            with contextlib.suppress(NotSealed):
                opened.append(unseal(self._how.key, (*context, _LINE), line))
        if len(opened) < max(1, len(lines)):
            self._refuse(key, refusal)
        return b"".join(opened) if opened else None

    def _refuse(self, key: str, reason: str) -> None:
        refusal = self._how, key, reason
        if refusal not in _refused and len(_refused) < _MOST_REFUSALS:
            _refused.add(refusal)
            self._how.log.warning("the store's entry %r is refused, and counts as absent: %s", key, reason)


def _bytes(value: Value) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
