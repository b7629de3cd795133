"""What this rank trained on in its newest steps, and whether a restart trains on the same.

Owns the record of the newest batches, learning rates and frozen parameters that goes into a checkpoint, and its comparison with what comes again after the
restart. Only what was seen before the fault can be compared: the batches that a resume fetches and drops, and batch and learning rates of
the step in flight at the fault. Never changes the data, and never waits for another rank.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ttp.adopt.trainer_state.fingerprint import Fingerprint
from ttp.adopt.trainer_state.frozen_parameters import FrozenParameters, check_frozen
from ttp.errors import DataMismatch, NotAsBefore
from ttp.inputs import checked
from ttp.runtime.rank_runtime import show

KEPT = 8
"""Batches and steps in the record."""

CHOICES = ("error", "warn")

_FROM_FIRST = (
    "Let the loader give the same batches in every attempt: seed what shuffles it, call sampler.set_epoch(epoch), draw augmentations"
    " from torch's, numpy's or Python's generator without persistent_workers, set up data before ttp.protect"
)
_BEHIND = (
    "What an evaluation within an epoch changes (ReduceLROnPlateau) belongs at the beginning of the loop's body, in front of the forward"
    " pass: there `if guard.step % 100 == 0` comes again after a restart"
)
_FROZEN = (
    "requires_grad is in no checkpoint. Set it in every attempt in front of the step's first forward pass, as a function of the step or"
    " the epoch (`epoch >= 2`, not `==`)"
)
_FROM_STATE = (
    "The loader went on from its own state_dict. Where that does not lead to the same batches, have them fetched again by"
    " guard.batches(loader, refetch=True)"
)


class SeenBatches:
    """The record of one rank. Written by the training thread; `record` may be called by any."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        on_mismatch: str,
        frozen: FrozenParameters | None = None,
        rates: Callable[[], Sequence[float]] = list,
    ) -> None:
        """`on_mismatch`: one of `CHOICES`. `rates`: returns the learning rates as they are now."""
        self._rates = rates
        self._saved_rates: Sequence[float] = ()
        """Those as the checkpoint was written."""
        self._frozen = frozen or FrozenParameters([])
        self.rank, self.world_size = rank, world_size
        self._on_mismatch = on_mismatch
        # Tuples that are replaced as a whole: other threads read them without a lock.
        self._batches: tuple[tuple[int, int, Fingerprint], ...] = ()
        """Epoch, number in it, fingerprint: the newest, and the first of the newest epoch."""
        self._passes: tuple[tuple[int, Fingerprint, list[float]], ...] = ()
        """Step, fingerprint of what the model was called with (unless batches are counted), learning rates."""
        self._first = ""
        """Fingerprint of step 1's batch, where batches are not counted."""
        self._expected_batches: dict[tuple[int, int], str] = {}
        self._expected_passes: dict[int, tuple[str, list[float]]] = {}
        self._newest_expected = ""
        self._begun = False
        self.recovered = False
        """This process has entered its training again in place of a restart, which may give the batches that this does not."""

    def batch(self, epoch: int, index: int, batch: object, *, from_state: bool = False) -> None:
        """A batch was fetched. Raises DataMismatch if the run had another one there. `from_state`: the loader goes on from its own state_dict."""
        found, before = Fingerprint(batch), self._batches
        kept = [entry for entry in self._batches if entry[0] == epoch]
        first, newest = [entry for entry in kept if entry[1] == 0], [entry for entry in kept if entry[1]]
        self._batches = (*first, *newest[-KEPT + 1 :], (epoch, index, found))
        expected = self._expected_batches.pop((epoch, index), "")
        if expected and (got := found.value()) != expected:
            try:
                self.differs(
                    f"batch {index} of epoch {epoch} on rank {self.rank} is not the one that this run had there before {self.event}: got"
                    f" fingerprint {got}, expected {expected}. {_FROM_STATE if from_state else _FROM_FIRST}"
                )
            except NotAsBefore:
                self._batches = before
                raise

    def forward(self, step: int, inputs: object, rates: Sequence[float], *, counted: bool) -> None:
        """The first forward pass of `step` begins. `counted`: its batches are already in the record. Raises DataMismatch."""
        found, before = Fingerprint(None if counted else inputs), self._passes
        self._passes = (*self._passes[-KEPT + 1 :], (step, found, list(rates)))
        if step == 1 and not counted:
            self._first = found.value()
        begun, self._begun = self._begun, True
        if not begun or self._expected_passes:
            self._compare_saved_rates(step, rates)
            batch, expected = self._expected_passes.pop(step, ("", []))
            self._expected_passes = {later: each for later, each in self._expected_passes.items() if later > step}
            try:
                self._compare_rates(step, rates, expected)
                self._compare_frozen(step)
                if not counted and not begun and step > 1:
                    self._compare_inputs(step, found.value(), batch)
            except NotAsBefore:
                self._passes = before  # a restart is to have what was there
                raise
        self._frozen.keep(step)

    def record(self) -> dict[str, Any]:
        """Return the record as JSON values. Any thread: what a device still copies is left out."""
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "batches": [[epoch, index, known] for epoch, index, each in self._batches if (known := each.known())],
            "passes": [[step, each.known(), rates] for step, each, rates in self._passes],
            "first": self._first,
            "frozen": self._frozen.record(),
            "rates": list(self._rates()),
        }

    def expect(self, record: Mapping[str, Any]) -> None:
        """Compare what comes with the record of a checkpoint, as far as it is this rank's in a job of the same size."""
        self._begun = False
        same_size = record.get("world_size") == self.world_size
        compares = self.rank == (record["rank"] if same_size else 0)  # one rank, or each would report it
        self._frozen.expect(record.get("frozen"), compares=compares)
        if not same_size:
            return
        self._saved_rates = record.get("rates", ())
        mine = record["rank"] == self.rank
        self._expected_passes = {step: (batch if mine else "", rates) for step, batch, rates in record["passes"]}
        if not mine:
            return
        self._expected_batches = {(epoch, index): batch for epoch, index, batch in record["batches"]}
        self._first = record["first"]
        self._newest_expected = record["passes"][-1][1] if record["passes"] else ""

    @property
    def event(self) -> str:
        """What began this attempt, for messages."""
        return "the recovery in place" if self.recovered else "the restart"

    def differs(self, text: str, *, on_all_ranks: bool = False) -> None:
        """Other data come than before the restart: warn, or raise DataMismatch. `on_all_ranks`: rank 0 warns for all."""
        if self._on_mismatch == "warn":
            if self.rank == 0 or not on_all_ranks:
                show(logging.WARNING, text)
        elif self.recovered:
            raise NotAsBefore(text)
        else:
            raise DataMismatch(f"{text}; or continue with other data by on_data_mismatch='warn'")

    # --- inside ---

    def _compare_rates(self, step: int, rates: Sequence[float], expected: Sequence[float]) -> None:
        for group, (got, before) in enumerate(zip(rates, expected, strict=False)):
            if not math.isclose(got, before, rel_tol=1e-9):
                self.differs(
                    f"the learning rate of param group {group} in step {step} is not the one before {self.event}: got {got!r}, expected"
                    f" {before!r}. Give ttp.protect every scheduler whose step() follows each update (accelerate: the prepared one) as"
                    f" schedulers=[...], and others as state={{...}}. {_BEHIND}"
                )
                return

    def _compare_saved_rates(self, step: int, rates: Sequence[float]) -> None:
        """The first step of an attempt, which had not begun before: a rate may have been changed by then that nothing changes again."""
        before = self._expected_passes.get(step - 1, ("", []))[1]
        if self.rank or step in self._expected_passes:
            return
        for group, (got, then, trained) in enumerate(zip(rates, self._saved_rates, before, strict=False)):
            if not any(math.isclose(then, known, rel_tol=1e-9) for known in (got, trained)):
                show(
                    logging.WARNING,
                    f"the learning rate of param group {group} was {then!r} when the checkpoint of step {step - 1} was written, and is"
                    f" {got!r} in step {step}: a change behind an update is not repeated. {_BEHIND}",
                )
                return

    def _compare_frozen(self, step: int) -> None:
        how, certain = self._frozen.differing(step)
        text = f"step {step} does not train the parameters that this run trained before {self.event}: {how}. {_FROZEN}"
        if how and certain:
            self.differs(text)
        elif how:
            show(logging.WARNING, f"{text}. Where they change in step {step} by intention, ignore this")

    def _compare_inputs(self, step: int, got: str, expected: str) -> None:
        """The first batch of an attempt: that of `step` before the fault, if the model was called with it then."""
        what_to_do = (
            "Draw the first batch after ttp.protect and all else at random before it, make batches a function of the step, or take them"
            " from guard.batches(loader)"
        )
        if expected and got and got != expected:
            self.differs(
                f"the model was called with another batch in step {step} on rank {self.rank} than before {self.event}: got fingerprint"
                f" {got}, expected {expected}. {what_to_do}"
            )
        elif not expected and got and got == self._first != self._newest_expected:
            show(
                logging.WARNING,
                f"rank {self.rank} begins after {self.event}, in step {step}, with the batch of step 1: the data may begin again."
                f" {what_to_do}",
            )


def check_record(record: object, path: str) -> None:
    """Judge what a checkpoint has of `SeenBatches.record`. Raises ValueError naming the key."""
    fields = checked.mapping(record, path)
    for name in ("rank", "world_size"):
        checked.integer(*checked.field(fields, name, path))
    checked.string(*checked.field(fields, "first", path))
    if "frozen" in fields:  # older checkpoints have none
        check_frozen(*checked.field(fields, "frozen", path))
    _check_rates(fields.get("rates", []), f"{path}.rates")
    for row, where in checked.items(*checked.field(fields, "batches", path)):
        epoch, index, fingerprint = _cells(row, where)
        checked.integers([epoch, index], where)
        checked.string(fingerprint, where)
    for row, where in checked.items(*checked.field(fields, "passes", path)):
        step, fingerprint, rates = _cells(row, where)
        checked.integer(step, where)
        checked.string(fingerprint, where)
        _check_rates(rates, where)


def _check_rates(rates: Any, where: str) -> None:
    if type(rates) is not list or not all(type(rate) is float for rate in rates):
        raise checked.Invalid(where, rates, "a list of learning rates")


def _cells(row: object, where: str) -> list[Any]:
    if type(row) is not list or len(row) != 3:
        raise checked.Invalid(where, row, "a list of three values")
    return row
