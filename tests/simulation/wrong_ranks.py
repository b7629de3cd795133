"""Ranks that are wrong on purpose: the processor's machine, its gate, and its work on the disk; undone with the patch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.gates import thaw
from tests.simulation.controllers import Controller
from tests.simulation.disk import Disk, File, Manifest, final_name
from tests.simulation.piece_work import PieceWorker
from tests.simulation.pieces import OwnDisks, key_of
from tests.simulation.rehearsal import Rehearsal
from tests.simulation.work import Worker
from ttp.errors import AbortedCollective
from ttp.optim.step_agreement.participation import Contribution
from ttp.processor.core import freezes, orders
from ttp.processor.core import transitions as tables
from ttp.processor.core.events import OpenGate
from ttp.processor.gate import Gate
from ttp.proto.fence import Fence
from ttp.proto.messages import Phase, PublishOrder, StateReport, Thaw, WriteOrder

Patch = pytest.MonkeyPatch


# --- the gate ---


def gate_stays_open(patch: Patch) -> None:
    """The freeze is acknowledged, and nothing is held up."""

    def wrong(self: Gate, freeze_id: int) -> int:
        self._freezes.freeze_id = freeze_id
        self._freezes.ticket += 1
        return self._freezes.ticket

    patch.setattr(Gate, "shut", wrong)


def ready_passes_a_closed_gate(patch: Patch) -> None:
    """A rank that reported COMPUTE goes on into the collective, and another gets a record that no rank can use."""

    def wrong(self: Gate, step: int) -> None:
        self._step, self._phase = step, Phase.READY

    patch.setattr(Gate, "ready", wrong)


def keeps_the_record_of_a_step_given_up(patch: Patch) -> None:
    """Under a rehearsal: the record of the first try is reported, and no rank can be rolled forward to it."""
    right = Rehearsal._step_back

    def wrong(self: Rehearsal, step: int) -> None:
        right(self, step)
        gate, training = self._process.gate, self._process.job.training
        gate._previous_record, gate._record = gate._record, training.record(step)

    patch.setattr(Rehearsal, "_step_back", wrong)


def one_rank_gives_no_step_up(patch: Patch) -> None:
    """Under a rehearsal: the settings are not compared at the start, and rank 0 has none."""
    right = Rehearsal.instead_of

    def wrong(self: Rehearsal, step: int, update: Callable[[], None]) -> Callable[[], None]:
        return update if self._process.rank == 0 else right(self, step, update)

    patch.setattr(Rehearsal, "instead_of", wrong)


def reports_before_the_update_ends(patch: Patch) -> None:
    def wrong(self: Gate, ticket: int, freeze_id: int, timeout_s: float) -> StateReport:
        return self._report(freeze_id, closed=True)

    patch.setattr(Gate, "settle", wrong)


def gate_opens_for_a_writer(patch: Patch) -> None:
    """The gate of a rank opens as soon as it begins to write."""
    begin = Worker._begin_write

    def wrong(self: Worker, order: WriteOrder) -> None:
        begin(self, order)
        gate = self.process.gate
        gate._freezes.final = False
        thaw(gate, gate.freeze_id)
        self.process.pass_on()

    patch.setattr(Worker, "_begin_write", wrong)


def thaw_opens_nothing(patch: Patch) -> None:
    for standing, kind in list(tables.TRANSITIONS):
        if kind is Thaw:
            patch.setitem(tables.TRANSITIONS, (standing, kind), tables.late)


def gate_opens_by_itself(patch: Patch) -> None:
    closed = freezes.gate_closed

    def wrong(state: Any, event: Any, now: float, out: Any) -> Any:
        state = closed(state, event, now, out)
        out.append(OpenGate(state.freeze_id))
        return state

    for key, handler in list(tables.TRANSITIONS.items()):
        if handler is closed:
            patch.setitem(tables.TRANSITIONS, key, wrong)


# --- orders ---


def orders_are_carried_out_twice(patch: Patch) -> None:
    """An order that is said again is begun again."""
    take = orders._take_order

    def wrong(state: Any, message: Any, effect: Any, out: Any) -> Any:
        known = replace(state, orders=tuple(order for order in state.orders if order.order != message))
        return take(known, message, effect, out)

    patch.setattr(orders, "_take_order", wrong)


def term_is_not_checked(patch: Patch) -> None:
    """Ranks go back to a lower term, and the freezes of two controllers mix."""
    init = Fence.__init__
    patch.setattr(Fence, "__init__", lambda self, job_id, lowest: init(self, job_id, 0))
    patch.setattr(Controller, "_supersede", lambda self, older, generation: None)


# --- the disk ---


def answers_before_fsync(patch: Patch) -> None:
    write = Disk.write
    patch.setattr(
        Disk,
        "write",
        lambda self, root, name, file, content: write(self, root, name, file, File(content.parts, False)),
    )


def tracker_before_rename(patch: Patch) -> None:
    publish = Worker._begin_publish

    def wrong(self: Worker, order: PublishOrder) -> None:
        trackers = self.job.disk.tracker
        trackers[order.directory] = max(order.step, trackers.get(order.directory, 0))
        publish(self, order)

    patch.setattr(Worker, "_begin_publish", wrong)


def tracker_goes_back(patch: Patch) -> None:
    """It is replaced whatever it names."""
    patch.setattr("tests.simulation.work.max", lambda step, *known: step, raising=False)


def published_directory_is_overwritten(patch: Patch) -> None:
    """The rename takes no notice of what is there."""
    rename = Worker._rename

    def wrong(self: Worker, order: PublishOrder) -> None:
        directories = self.job.disk.directories
        if (order.directory, order.tmp_name) in directories:
            directories.pop((order.directory, final_name(order.step)), None)
        rename(self, order)

    patch.setattr(Worker, "_rename", wrong)


# --- pieces ---


def earlier_piece_is_removed(patch: Patch) -> None:
    """A piece of the same step makes room by being removed."""

    def wrong(self: OwnDisks, root: str, step: int) -> None:
        del self.directories[root, final_name(step)]

    patch.setattr(OwnDisks, "supersede", wrong)


def late_publisher_of_a_lower_term_supersedes(patch: Patch) -> None:
    """Only its own staging directory is left alone by a publisher."""

    def wrong(self: PieceWorker, order: PublishOrder) -> bool:
        there = self.disks.directories.get((self._root(order), final_name(order.step)))
        return there is not None and there.manifest is not None and key_of(there.manifest) == self._key(order)

    patch.setattr(PieceWorker, "_is_done", wrong)


def piece_without_looking_at_sizes(patch: Patch) -> None:
    """A torn file is published."""

    def wrong(self: PieceWorker, order: PublishOrder, claim: str) -> Manifest:
        names = tuple(file.name for result in order.results for file in result.files)
        return Manifest(order.step, names, self.replica.host_states.get(order.step, 0), order.term, order.tmp_name)

    patch.setattr(PieceWorker, "_piece", wrong)
    patch.setattr("tests.simulation.pieces.look_at", lambda files, entries: None)


# --- the spanning collective ---


def aborted_collectives_are_believed(patch: Patch) -> None:
    """Whatever a collective returns makes a record."""
    patch.setattr(Contribution, "check", lambda self, result, size: None)


def only_participants_are_counted(patch: Patch) -> None:
    """The result of an earlier step counts, if all ranks were in it."""

    def wrong(self: Contribution, result: Sequence[float], size: int) -> None:
        if result[0] != size:
            raise AbortedCollective("some rank is missing")

    patch.setattr(Contribution, "check", wrong)
