"""The work thread: carries out what the processor's machine orders, one thing at a time.

Closing the gate, rolling forward, writing and publishing may each take long, and the training thread may be stuck
meanwhile; so they have a thread of their own. It answers with events and never decides: what an order asks for while the
state does not stand still, or is of another step, is refused.
"""

from __future__ import annotations

import logging
import queue
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from ttp.errors import TornShare
from ttp.processor.events import (
    ApplyUpdate,
    Event,
    GateClosed,
    PublishCheckpoint,
    PublishDone,
    RollForwardDone,
    WorkFailed,
    WriteDone,
    WriteShare,
)
from ttp.processor.gate import Gate
from ttp.processor.ports import StateHolder
from ttp.processor.voice import Voice
from ttp.proto.messages import CommitRecord, PublishOrder, WriteOrder


@dataclass(frozen=True, slots=True)
class Settle:
    """Report on the freeze whose gate is shut already, once the update in progress has ended."""

    ticket: int
    freeze_id: int


@dataclass(frozen=True, slots=True)
class Reopen:
    """Open the gate, unless it was shut again since; after whatever still reads the state."""

    ticket: int


Task = Settle | Reopen | ApplyUpdate | WriteShare | PublishCheckpoint


class Worker:
    """One rank's work thread. `post` gets the answers, on this thread."""

    def __init__(
        self, gate: Gate, holder: StateHolder, voice: Voice, freeze_timeout_s: float, post: Callable[[Event], None]
    ) -> None:
        self._gate = gate
        self._holder = holder
        self._voice = voice
        self._freeze_timeout_s = freeze_timeout_s
        self._post = post
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ttp-work", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, task: Task) -> None:
        self._tasks.put(task)

    def stop(self, timeout_s: float) -> None:
        """Finish what is queued and end; a task that takes longer than `timeout_s` is left behind (daemon)."""
        self._tasks.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            answer = self._carry_out(task)
            if answer is not None:
                self._post(answer)

    def _carry_out(self, task: Task) -> Event | None:
        match task:
            case Settle(ticket, freeze_id):
                report = self._gate.settle(ticket, freeze_id, self._freeze_timeout_s)
                if self._gate.drain_error:
                    self._voice.say(logging.ERROR, f"freeze {freeze_id}: the device failed: {self._gate.drain_error}")
                return GateClosed(report)
            case Reopen(ticket):
                self._gate.reopen(ticket)
                return None
            case ApplyUpdate(freeze_id, record):
                return self._guarded(freeze_id, "roll_forward", "", lambda: self._roll_forward(freeze_id, record))
            case WriteShare(order) | PublishCheckpoint(order) if order.freeze_id < self._gate.freeze_id:
                return self._taken_back(order)
            case WriteShare(share):
                return self._guarded(share.freeze_id, "write", share.tmp_name, lambda: self._write(share))
            case PublishCheckpoint(order):
                return self._guarded(order.freeze_id, "publish", order.tmp_name, lambda: self._publish(order))
            case _:
                assert_never(task)

    def _taken_back(self, order: WriteOrder | PublishOrder) -> Event:
        """The ranks were frozen anew while this order waited, perhaps by another controller: nobody counts on it any more."""
        error = f"freeze {self._gate.freeze_id} is in force, the order belongs to freeze {order.freeze_id}"
        stage = "write" if isinstance(order, WriteOrder) else "publish"
        self._voice.say(logging.INFO, f"{stage} of {order.tmp_name} left undone: {error}")
        return WorkFailed(order.freeze_id, stage, order.tmp_name, error)

    def _guarded(self, freeze_id: int, stage: str, tmp_name: str, work: Callable[[], Event]) -> Event:
        """Whatever goes wrong in the work is this rank's answer: the controller finds another way."""
        try:
            return work()
        except Exception as error:
            self._voice.say(logging.ERROR, f"freeze {freeze_id}: {stage} failed: {traceback.format_exc()}")
            torn = error.ranks if isinstance(error, TornShare) else ()
            return WorkFailed(freeze_id, stage, tmp_name, f"{type(error).__name__}: {error}", torn)

    def _roll_forward(self, freeze_id: int, record: CommitRecord) -> Event:
        gate = self._gate
        if gate.closed and gate.state_step == record.step and not gate.torn:
            return RollForwardDone(
                freeze_id, gate.state_step
            )  # ordered twice: a second controller, or a repeated order
        gate.start_roll_forward(record)
        try:
            step = self._holder.roll_forward(record)
            if step != record.step:
                raise RuntimeError(f"rolled forward with the record of step {record.step}, but the state is {step}'s")
        except BaseException:
            gate.roll_forward_failed()
            raise
        # An optimizer that keeps a local copy has taken it in this update too: it is the step before now.
        gate.rolled_forward(step, step - 1 if gate.backup_step >= 0 else -1)
        return RollForwardDone(freeze_id, step)

    def _write(self, order: WriteOrder) -> Event:
        gate = self._gate
        if not gate.closed:
            raise RuntimeError(f"ordered to write step {order.step} while the gate is open; a freeze must come first")
        if order.step != gate.backup_step and (gate.torn or order.step != gate.state_step):
            held = "a torn state" if gate.torn else f"step {gate.state_step}"
            raise RuntimeError(f"ordered to write step {order.step}, but this rank holds {held}")
        return WriteDone(order, self._holder.write(order))

    def _publish(self, order: PublishOrder) -> Event:
        return PublishDone(order, self._holder.publish(order))
