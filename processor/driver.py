"""Runs a rank's processor: the machine on its own thread, the stream and the work beside it.

Threads of one processor: `ttp-processor` owns the machine (events in by a queue, effects out), `ttp-work` carries out
orders, `ttp-stream` reads the controller's words, `ttp-voice` logs. The training thread only enqueues, or waits for the
verdict.

Never touches the optimizer's state, never calls a collective, and never needs the training thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Protocol, assert_never

from ttp.errors import ProtocolError
from ttp.processor.events import (
    ApplyUpdate,
    BoundaryReached,
    CloseGate,
    Connect,
    Connected,
    Disconnected,
    Effect,
    Event,
    ExitProcess,
    GateClosed,
    LocalFault,
    Log,
    Noticed,
    OpenGate,
    ProcessorSettings,
    PublishCheckpoint,
    Received,
    Release,
    SaveStacks,
    Send,
    Tick,
    TrainReturned,
    WriteShare,
)
from ttp.processor.gate import Gate
from ttp.processor.ports import StateHolder
from ttp.processor.stacks import StackWriter
from ttp.processor.voice import Voice
from ttp.processor.worker import Reopen, Settle, Worker
from ttp.proto.codec import CodecError, DownwardParcel
from ttp.proto.messages import Cause, CauseKind, Downward, StateReport, Upward, Welcome
from ttp.proto.stream import Address, ControlStream

TICK_S = 0.2
"""Longest time between two ticks: bounds how late a lost parent process is noticed."""

AT_ONCE_S = 0.02
"""A freeze that takes longer goes to the work thread."""

FREEZE_TIMEOUT_S = 5.0
"""A gate that has not closed by then is reported as such: the update in progress is stuck."""

FLUSH_TIMEOUT_S = 2.0
"""A process that exits waits this long for its own streams: the training thread may be stuck with their locks held."""


class Machine(Protocol):
    """The pure machine, `ttp.processor.machine`."""

    def initial(self, settings: ProcessorSettings, now: float) -> Any: ...

    def transition(self, state: Any, event: Event, now: float) -> tuple[Any, tuple[Effect, ...]]: ...

    def next_deadline(self, state: Any) -> float | None: ...


@dataclass(frozen=True, slots=True)
class _Opened:
    stream: ControlStream


@dataclass(frozen=True, slots=True)
class _Incoming:
    stream: ControlStream
    parcel: DownwardParcel


@dataclass(frozen=True, slots=True)
class _Closed:
    stream: ControlStream
    reason: str


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class Processor:
    """One rank's processor. The training thread calls `start`, `fault`, `finished`, `wait_for_verdict`, `stop`."""

    def __init__(
        self,
        settings: ProcessorSettings,
        address: Address,
        job_id: str,
        holder: StateHolder,
        gate: Gate,
        *,
        freeze_timeout_s: float = FREEZE_TIMEOUT_S,
        watch_parent: bool = False,
        on_exit: Callable[[str], None] | None = None,
        stacks_path: Path | None = None,
        work_done: Callable[[], int] | None = None,
        checkpoint: Callable[[], str] | None = None,
        exit_process: Callable[[int], None] = os._exit,
        machine: Machine | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`freeze_timeout_s`: how long an update in progress is waited for before the gate is reported as not closed.

        watch_parent: the parent process is the rank's launcher; when it is gone, that is this rank's fault.
        on_exit(reason): called right before the process leaves on the controller's word, e.g. to print the reason.
        stacks_path: where the stacks of all threads go when the job hangs; None: nowhere.
        work_done(): a number that grows while the holder carries out an order, or updates; called on the processor's thread.
        checkpoint(): path of the newest checkpoint that this rank knows to be published; as above.
        """
        self._settings = settings
        self._address = self._controller = address
        self._job_id = job_id
        self._holder = holder
        self._gate = gate
        self._on_exit = on_exit
        self._work_done = work_done if work_done is not None else lambda: 0
        self._checkpoint = checkpoint if checkpoint is not None else lambda: ""
        self._exit_process = exit_process
        self._machine = machine if machine is not None else _default_machine()
        self._clock = clock
        self._parent = os.getppid() if watch_parent else None
        self._queue: queue.SimpleQueue[Event | _Opened | _Incoming | _Closed | _Stop] = queue.SimpleQueue()
        self._released = threading.Event()
        self._releases_at_exit = False
        self._welcomed = threading.Event()
        self._welcome: Welcome | None = None
        self._voice = Voice(settings.rank)
        self._stacks = StackWriter(stacks_path, self._voice)
        self._paused_until = -inf
        gate.on_boundary = lambda step: self._queue.put(BoundaryReached(step))
        self._worker = Worker(gate, holder, self._voice, freeze_timeout_s, self._queue.put)
        self._thread = threading.Thread(target=self._run, name="ttp-processor", daemon=True)
        self._state: Any = None
        self._running = False
        self._stream: ControlStream | None = None
        self._stream_open = False
        self._highest_term = 0
        self._ticket = 0  # of the gate's last closing
        self._unsettled: tuple[int, int] | None = None  # (ticket, freeze_id) of a closing that timed out

    # --- any thread ---

    def start(self) -> None:
        """Start the threads; the controller is reached in the background."""
        self._voice.start()
        self._stacks.listen()
        self._worker.start()
        self._thread.start()

    def fault(self, cause: Cause, detail: str) -> None:
        """`train` raised on the calling training thread: tell the controller. Follow with `wait_for_verdict`."""
        self._gate.abandon()
        self._queue.put(LocalFault(cause, detail))

    def preempted(self, text: str = "SIGTERM") -> None:
        """This rank was told to leave: all ranks finish the step in flight if they can soon, then the dump follows."""
        self._gate.notice = True
        self._queue.put(Noticed(text))

    def pause(self, at_most_s: float) -> float:
        """The training thread does something else than steps, for `at_most_s` at most: that is no hang.

        Returns what `end_pause` wants: a pause may lie within another.
        """
        before = self._paused_until
        self._paused_until = max(before, self._clock() + at_most_s)
        return before

    def end_pause(self, before: float) -> None:
        self._paused_until = before

    def wait_for_verdict(self, timeout_s: float | None = None) -> bool:
        """Stay as a holder until the controller has decided, and say whether this rank was released (or stopped) within the time;
        else the process ends."""
        return self._released.wait(timeout_s)

    def finished(self) -> None:
        """`train` returned: this rank stays as a holder until every rank has finished. Follow with `wait_for_verdict`."""
        self._queue.put(TrainReturned())

    @property
    def controller(self) -> str:
        """Address of the controller that leads this rank, or that it tries to reach; empty: not known."""
        return self._controller if isinstance(self._controller, str) else self._controller() or ""

    def wait_welcomed(self, timeout_s: float) -> Welcome | None:
        """Wait until the controller has all ranks; return its newest welcome, None after the timeout or a `stop`."""
        self._welcomed.wait(timeout_s)
        return self._welcome

    def release_at_exit(self) -> None:
        """From now on, the controller's order to leave lets the waiting training thread go instead of ending the process:
        it has an exception of its own to show."""
        self._releases_at_exit = True

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the threads; what was said to the controller goes out first. Call it once, not from the processor's threads."""
        self._queue.put(_Stop())
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            self._worker.stop(timeout_s)
            self._stacks.close()
            self._voice.stop(timeout_s)
        self._gate.release_boundary()
        self._released.set()
        self._welcomed.set()

    # --- listener of the stream, on the stream's thread ---

    def stream_opened(self, stream: ControlStream) -> None:
        self._queue.put(_Opened(stream))

    def stream_received(self, stream: ControlStream, parcel: DownwardParcel) -> None:
        self._queue.put(_Incoming(stream, parcel))

    def stream_closed(self, stream: ControlStream, reason: str) -> None:
        self._queue.put(_Closed(stream, reason))

    # --- the driver's thread ---

    def _run(self) -> None:
        self._running = True
        now = self._clock()
        self._state = self._machine.initial(self._settings, now)
        self._step(self._tick(), now)
        next_tick = now + TICK_S
        while self._running:
            due = min(next_tick, self._deadline())
            with contextlib.suppress(queue.Empty):
                self._take(self._queue.get(timeout=max(0.0, due - self._clock())))
            now = self._clock()
            if now >= due and self._running:  # also when events keep coming
                next_tick = now + TICK_S
                self._watch_parent()
                self._settle_late()
                self._step(self._tick(), now)
        if self._stream is not None:
            self._stream.close(drain_s=1.0)

    def _deadline(self) -> float:
        """The machine's deadline; one that a tick did not move is tried again a little later, not at full speed."""
        deadline = self._machine.next_deadline(self._state)
        return float("inf") if deadline is None else max(deadline, self._clock() + 0.002)

    def _tick(self) -> Tick:
        gate = self._gate
        paused = self._clock() < self._paused_until
        return Tick(gate.phase, gate.step, gate.waiting, paused, self._work_done())

    def _take(self, item: Event | _Opened | _Incoming | _Closed | _Stop) -> None:
        now = self._clock()
        match item:
            case _Stop():
                self._running = False
            case _Opened(stream):
                if stream is self._stream:
                    self._stream_open = True
                    self._highest_term = max(self._highest_term, stream.term)
                    self._step(Connected(self._holder.registration()), now)
            case _Incoming(stream, parcel):
                mine = self._settings.rank in parcel.ranks or not parcel.ranks  # none: the stream itself is meant
                if stream is self._stream and parcel.message is not None and mine:
                    self._receive(parcel.message, now)
            case _Closed(stream, reason):
                if stream is self._stream:
                    self._stream = None
                    self._stream_open = False
                    self._step(Disconnected(reason, stream.refused), now)
            case GateClosed(report):
                if not report.closed and report.freeze_id == self._gate.freeze_id:
                    self._unsettled = (self._ticket, report.freeze_id)
                self._gate_closed(report, now)
            case _:
                self._step(item, now)

    def _receive(self, message: Downward, now: float) -> None:
        if isinstance(message, Welcome):
            self._welcome = message
            self._welcomed.set()
        self._step(Received(message), now)

    def _step(self, event: Event, now: float) -> None:
        try:
            self._state, effects = self._machine.transition(self._state, event, now)
        except ProtocolError as error:  # the state is unchanged
            self._voice.say(logging.ERROR, str(error))
            return
        except Exception:  # a bug must not take the rank's protection away with this thread
            self._voice.say(logging.ERROR, f"the processor's machine failed on {event}: {traceback.format_exc()}")
            return
        for effect in effects:
            if self._running:
                self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send(message):
                self._send(message)
            case Connect(address):
                self._controller = self._address if address == self._settings.address else address
                self._connect(self._controller)
            case CloseGate(freeze_id):
                self._close_gate(freeze_id)
            case OpenGate():
                self._unsettled = None
                self._worker.submit(Reopen(self._ticket))
            case ApplyUpdate() | WriteShare() | PublishCheckpoint():
                self._worker.submit(effect)
            case SaveStacks(reason):
                self._stacks.save(reason)
            case ExitProcess(code, reason):
                self._leave(code, reason)
            case Release():
                self._released.set()
                self._welcomed.set()
            case Log(text):
                self._voice.say(logging.INFO, text)
            case _:
                assert_never(effect)

    def _send(self, message: Upward) -> None:
        if self._stream is None or not self._stream_open:
            self._voice.say(logging.DEBUG, f"no stream, not sent: {type(message).__name__}")
            return
        try:
            self._stream.send(message)
        except CodecError as error:
            self._voice.say(logging.ERROR, str(error))

    def _connect(self, address: Address) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream_open = False
        self._stream = ControlStream(address, self._job_id, self, fence=self._highest_term)
        self._stream.start()

    def _close_gate(self, freeze_id: int) -> None:
        """Shut at once, in the order of the effects. Most freezes find no update in progress and are answered at once
        too, even while the work thread writes; the others are waited for on the work thread."""
        self._ticket = self._gate.shut(freeze_id)
        if not self._gate.has_drain:
            report = self._gate.settle(self._ticket, freeze_id, AT_ONCE_S)
            if report.closed:
                self._queue.put(GateClosed(report))
                return
        self._worker.submit(Settle(self._ticket, freeze_id))

    def _settle_late(self) -> None:
        """An update that took longer than the freeze could wait may have ended since: then the state stands still after all,
        and may be what no other rank holds."""
        if self._unsettled is None:
            return
        ticket, freeze_id = self._unsettled
        if ticket != self._ticket:
            self._unsettled = None  # closed anew, or opened, since
            return
        report = self._gate.settle(ticket, freeze_id, 0.0)
        if report.closed:
            self._unsettled = None
            if self._gate.drain_error:
                self._voice.say(logging.ERROR, f"freeze {freeze_id}: the device failed: {self._gate.drain_error}")
            self._voice.say(logging.INFO, f"freeze {freeze_id}: the update of step {report.state_step} has ended")
            self._gate_closed(report, self._clock())

    def _gate_closed(self, report: StateReport, now: float) -> None:
        self._step(GateClosed(replace(report, checkpoint=self._checkpoint())), now)

    def _watch_parent(self) -> None:
        if self._parent is None or os.getppid() == self._parent:
            return
        text = f"the launcher (pid {self._parent}) is gone"
        self._parent = None
        self._step(LocalFault(Cause(CauseKind.AGENT_LOST, (self._settings.rank,), text), ""), self._clock())

    def _leave(self, code: int, reason: str) -> None:
        """End the process, whatever its training thread is stuck in."""
        self._running = False
        if self._releases_at_exit:
            self._voice.say(logging.INFO, f"released: {reason}")
            self._released.set()
            if self._stream is not None:
                self._stream.close(drain_s=1.0)
            return
        self._voice.say(logging.INFO, f"leaving with exit status {code}: {reason}")
        farewell = threading.Thread(target=self._say_farewell, args=(reason,), name="ttp-farewell", daemon=True)
        farewell.start()
        farewell.join(FLUSH_TIMEOUT_S)
        self._exit_process(code)
        self._released.set()  # reached in tests only

    def _say_farewell(self, reason: str) -> None:
        try:
            if self._on_exit is not None:
                self._on_exit(reason)
        except Exception:  # the process leaves all the same
            self._voice.say(logging.ERROR, f"the exit hook failed: {traceback.format_exc()}")
        self._stacks.finish(FLUSH_TIMEOUT_S)
        self._voice.stop(FLUSH_TIMEOUT_S)
        for handler in logging.getLogger().handlers:
            handler.flush()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):  # a closed or broken pipe: nobody reads it any more
                continue


def _default_machine() -> Machine:
    from ttp.processor import machine

    return machine
