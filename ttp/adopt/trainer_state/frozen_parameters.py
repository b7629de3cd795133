"""Which parameters a step does not train: `requires_grad`, which no state of torch has, and which a trainer may change on the way.

Owns the record of that in a checkpoint, and its comparison in the first step of an attempt. What that step had before the fault is known only
if it had begun. Else the step before counts, as the trainer may change it just now: a difference is certain only where all is as the run and this
attempt began. Never changes a parameter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ttp.inputs import checked

MAX_NAMES = 64
"""More are a number and a digest: the record is a part of the manifest."""

_KEPT = 2
"""Steps: the newest that is finished, and the one in flight."""

_SHOWN = 3


class FrozenParameters:
    """The record of one rank. Written by the training thread; `record` may be called by any."""

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """`named`: the model's parameters, as `ttp.protect` is called."""
        self._names = [name for name, _ in named]
        self._params = [param for _, param in named]
        self._model = _digest(self._names)
        self._at_start = self._now()
        self._first = ""
        """Digest of step 1's."""
        self._steps: tuple[tuple[int, tuple[str, ...]], ...] = ()
        """Replaced as a whole: other threads read it without a lock."""
        self._expected: dict[int, list[Any]] = {}

    def keep(self, step: int) -> None:
        """The first forward pass of `step` begins."""
        now = self._now()
        if step == 1:
            self._first = _digest(now)
        self._steps = (*(each for each in self._steps if each[0] < step), (step, now))[-_KEPT:]

    def record(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        steps = [
            [step, len(names), _digest(names), list(names) if len(names) <= MAX_NAMES else []]
            for step, names in self._steps
        ]
        return {"model": self._model, "first": self._first, "steps": steps}

    def expect(self, record: Mapping[str, Any] | None, *, compares: bool) -> None:
        """Go on with the record of a checkpoint, if there is one of a model with the same names. `compares`: this rank compares its next step with it."""
        self._expected = {}
        if record is not None and record["model"] == self._model:
            self._first = record["first"]
            self._expected = {step: row for step, *row in record["steps"]} if compares else {}

    def differing(self, step: int) -> tuple[str, bool]:
        """Return how the first step since `expect` differs, and whether that is certain; an empty string: not, as far as is known."""
        expected, self._expected = self._expected, {}
        now = self._now()
        as_begun = [now == self._at_start, _digest(now) == self._first]
        row = expected.get(step) or (expected.get(step - 1) if any(as_begun) else None)
        if row is None or row[1] == _digest(now):
            return "", False
        count, _, names = row
        others = [name for name in self._names if (name in now) != (name in names)] if len(names) == count else []
        named = f" ({', '.join(others[:_SHOWN])}{' and others' if others[_SHOWN:] else ''})" if others else ""
        return f"got {len(now)} frozen, expected {count}{named}", step in expected or all(as_begun)

    def _now(self) -> tuple[str, ...]:
        return tuple(name for name, param in zip(self._names, self._params, strict=True) if not param.requires_grad)


def check_frozen(record: object, path: str) -> None:
    """Judge what a checkpoint has of `FrozenParameters.record`. Raises ValueError naming the key."""
    fields = checked.mapping(record, path)
    for name in ("model", "first"):
        checked.string(*checked.field(fields, name, path))
    for row, where in checked.items(*checked.field(fields, "steps", path)):
        if type(row) is not list or len(row) != 4:
            raise checked.Invalid(where, row, "a list of four values")
        checked.integers(row[:2], where)
        checked.string(row[2], where)
        for name, at in checked.items(row[3], where):
            checked.string(name, at)


def _digest(names: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
