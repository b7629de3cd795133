"""The work thread: carries out what the processor's machine orders, one thing at a time.

Closing the gate, rolling forward, writing and publishing may each take long, and the training thread may be stuck
meanwhile; so they have a thread of their own, `Worker`. What is done before and after the holder's own work is in `Tasks`, without
a thread: the simulator runs that too. It answers with events and never decides: what an order asks for while the state does not
stand still, or is of another step, is refused.
"""

from __future__ import annotations

import logging
import queue
import threading
import traceback
from collections.abc import Callable
from typing import assert_never

from ttp.errors import ProtocolError, TornShare
from ttp.processor.async_log import AsyncLog
from ttp.processor.core.events import (
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
from ttp.processor.ports import StateProvider
from ttp.proto.frozen import dataclass
from ttp.proto.messages import PublishOrder, ShareResult, WriteOrder


@dataclass(frozen=True, slots=True)
class Settle:
    """Report on the freeze whose gate is shut already, once the update in progress has ended."""

    ticket: int
    freeze_id: int


@dataclass(frozen=True, slots=True)
class Reopen:
    """Open the gate, unless it was shut again since; after whatever still reads the state."""

    ticket: int


Held = ApplyUpdate | WriteShare | PublishCheckpoint
"""Tasks whose work is the holder's."""
Task = Settle | Reopen | Held


class Tasks:
    """Carries out one task: `begin`, then for the holder's tasks the holder's work, then `done` or `failed`. No thread."""

    def __init__(self, gate: Gate, freeze_timeout_s: float, log: Callable[[int, str], None]) -> None:
        self._gate = gate
        self._freeze_timeout_s = freeze_timeout_s
        self._log = log

    def begin(self, task: Task) -> Event | None:
        """Do what must be done before the holder's work. An event is the answer: then there is no such work.

        May wait for the gate: for the end of an update in progress.
        """
        match task:
            case Settle(ticket, freeze_id):
                report = self._gate.settle(ticket, freeze_id, self._freeze_timeout_s)
                if self._gate.drain_error:
                    self._log(logging.ERROR, f"freeze {freeze_id}: the device failed: {self._gate.drain_error}")
                return GateClosed(report)
            case Reopen(ticket):
                self._gate.reopen(ticket)
                return None
            case WriteShare(order) | PublishCheckpoint(order) if order.freeze_id < self._gate.freeze_id:
                return self._taken_back(order)
            case ApplyUpdate(freeze_id, record):
                gate = self._gate
                if gate.closed and gate.state_step == record.step and not gate.torn:
                    return RollForwardDone(freeze_id, gate.state_step)  # ordered twice, or by a second controller
                try:
                    gate.start_roll_forward(record)
                except ProtocolError as error:
                    return self._failure(task, error)
                return None
            case WriteShare(share):
                why = self._not_writable(share)
                return self._failure(task, RuntimeError(why)) if why else None
            case PublishCheckpoint():
                return None
            case _:
                assert_never(task)

    def done(self, task: Held, result: object) -> Event:
        """The holder has done it, and returned this."""
        match task:
            case ApplyUpdate(freeze_id, record):
                if result != record.step:
                    why = f"rolled forward with the record of step {record.step}, but the state is {result}'s"
                    return self.failed(task, RuntimeError(why))
                # An optimizer that keeps a local copy has taken it in this update too: it is the step before now.
                gate, step = self._gate, record.step
                gate.rolled_forward(step, step - 1 if gate.backup_step >= 0 else -1)
                return RollForwardDone(freeze_id, step)
            case WriteShare(order):
                assert isinstance(result, ShareResult)
                return WriteDone(order, result)
            case PublishCheckpoint(order):
                return PublishDone(order, str(result))
            case _:
                assert_never(task)

    def failed(self, task: Held, error: BaseException) -> Event:
        """The holder has raised."""
        if isinstance(task, ApplyUpdate):
            self._gate.roll_forward_failed()
        return self._failure(task, error)

    def _failure(self, task: Held, error: BaseException) -> Event:
        """Whatever goes wrong in the work is this rank's answer: the controller finds another way."""
        match task:
            case ApplyUpdate(freeze_id, _):
                stage, tmp_name = "roll_forward", ""
            case WriteShare(order):
                freeze_id, stage, tmp_name = order.freeze_id, "write", order.tmp_name
            case PublishCheckpoint(order):
                freeze_id, stage, tmp_name = order.freeze_id, "publish", order.tmp_name
            case _:
                assert_never(task)
        self._log(logging.ERROR, f"freeze {freeze_id}: {stage} failed: {''.join(traceback.format_exception(error))}")
        torn = error.ranks if isinstance(error, TornShare) else ()
        return WorkFailed(freeze_id, stage, tmp_name, f"{type(error).__name__}: {error}", torn)

    def _taken_back(self, order: WriteOrder | PublishOrder) -> Event:
        """The ranks were frozen anew while this order waited, perhaps by another controller: its result is not needed any more."""
        error = f"freeze {self._gate.freeze_id} is in force, the order belongs to freeze {order.freeze_id}"
        stage = "write" if isinstance(order, WriteOrder) else "publish"
        self._log(logging.INFO, f"{stage} of {order.tmp_name} left undone: {error}")
        return WorkFailed(order.freeze_id, stage, order.tmp_name, error)

    def _not_writable(self, order: WriteOrder) -> str:
        """Say why this rank cannot write the ordered step; empty: it can."""
        gate = self._gate
        if not gate.closed:
            return f"ordered to write step {order.step} while the gate is open; a freeze must come first"
        if order.step != gate.backup_step and (gate.torn or order.step != gate.state_step):
            held = "a torn state" if gate.torn else f"step {gate.state_step}"
            return f"ordered to write step {order.step}, but this rank holds {held}"
        return ""


class Worker:
    """One rank's work thread. `post` gets the answers, on this thread."""

    def __init__(
        self, gate: Gate, holder: StateProvider, log: AsyncLog, freeze_timeout_s: float, post: Callable[[Event], None]
    ) -> None:
        self._holder = holder
        self._tasks = Tasks(gate, freeze_timeout_s, log.log)
        self._post = post
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ttp-work", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, task: Task) -> None:
        self._queue.put(task)

    def stop(self, timeout_s: float) -> None:
        """Finish what is queued and end; a task that takes longer than `timeout_s` keeps running (daemon)."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            answer = self._tasks.begin(task)
            if answer is None and isinstance(task, Held):
                answer = self._work(task)
            if answer is not None:
                self._post(answer)

    def _work(self, task: Held) -> Event:
        try:
            match task:
                case ApplyUpdate(_, record):
                    result: object = self._holder.roll_forward(record)
                case WriteShare(share):
                    result = self._holder.write(share)
                case PublishCheckpoint(order):
                    result = self._holder.publish(order)
                case _:
                    assert_never(task)
        except BaseException as error:  # also a trainer's SystemExit: the thread must answer, and go on
            return self._tasks.failed(task, error)
        return self._tasks.done(task, result)
