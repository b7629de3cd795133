"""Handles what comes to a rank's processor, one item at a time: the machine goes on, and what it orders is carried out.

Owns the machine's state, the stream in use and the ticket of the gate's last closing. Never waits and has no thread: `driver.py`
gives it one, and what is around it; the simulator runs it without.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from math import inf
from typing import Any, Protocol, assert_never

from ttp.errors import ProtocolError
from ttp.processor.core.events import (
    ApplyUpdate,
    CloseGate,
    Connect,
    Connected,
    Disconnected,
    Effect,
    Event,
    ExitProcess,
    GateClosed,
    LeaveBoundary,
    LocalFault,
    Log,
    LookForControllers,
    OpenGate,
    ProcessorSettings,
    PublishCheckpoint,
    Received,
    RegroupTraining,
    ReleaseTraining,
    ReportUnled,
    SaveStacks,
    Send,
    StartController,
    Tick,
    WriteShare,
)
from ttp.processor.core.step_times import StepTimes
from ttp.processor.gate import Gate
from ttp.processor.worker import Reopen, Settle, Task
from ttp.proto.codec import CodecError, DownwardParcel
from ttp.proto.frozen import dataclass, replace
from ttp.proto.messages import (
    Cause,
    CauseKind,
    Downward,
    Heartbeat,
    Registration,
    Regroup,
    StateReport,
    Upward,
    Welcome,
)
from ttp.proto.stream import Address

TICK_S = 0.2
"""Longest time between two ticks: bounds how late a lost parent process is noticed."""

AT_ONCE_S = 0.02
"""A freeze that takes longer goes to the work thread."""


class RankMachine(Protocol):
    """The pure machine, `ttp.processor.core.machine`."""

    def initial(self, settings: ProcessorSettings, now: float) -> Any: ...

    def transition(self, state: Any, event: Event, now: float) -> tuple[Any, tuple[Effect, ...]]: ...

    def next_deadline(self, state: Any) -> float | None: ...


class Stream(Protocol):
    """One stream to a controller, from its connection to its end. What happens on it comes to the handler as items."""

    @property
    def term(self) -> int:
        """The controller's term, once the stream is open."""

    @property
    def refused(self) -> bool:
        """Whoever is at the address will not be this job's controller; read when the stream has closed."""

    def send(self, message: Upward) -> None:
        """Queue it. Raises CodecError for what the wire cannot carry."""

    def close(self, drain_s: float = 0.0) -> None: ...


@dataclass(frozen=True, slots=True)
class Opened:
    stream: Stream


@dataclass(frozen=True, slots=True)
class Incoming:
    stream: Stream
    parcel: DownwardParcel


@dataclass(frozen=True, slots=True)
class Closed:
    stream: Stream
    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Item = Event | Opened | Incoming | Closed | Stop
"""What comes to a processor's queue."""


class Ports(Protocol):
    """What the handler needs of the process around it. Nothing but `leave` may wait."""

    def put(self, item: Item) -> None:
        """Queue an item behind those that are there."""

    def submit(self, task: Task) -> None:
        """Queue a task for the work thread; its answer comes as an item."""

    def open_stream(self, address: Address, fence: int) -> Stream: ...

    def registration(self) -> Registration: ...

    def paused(self) -> bool:
        """The training thread does something else than steps."""

    def work_done(self) -> int: ...

    def checkpoint(self) -> str: ...

    def lost_parent(self) -> str:
        """Say, once, that the process that watches this one is gone; empty: it is there, or was reported."""

    def welcomed(self, welcome: Welcome) -> None: ...

    def release(self) -> None:
        """The training thread may leave."""

    def leave(self, code: int, reason: str) -> None:
        """End the process, whatever its training thread is stuck in."""

    def regroup(self, order: Regroup) -> None:
        """Have the training thread do it; its answer comes as an item."""

    def start_controller(self, order: StartController | LookForControllers) -> None:
        """Queue it for a thread of its own; its answer comes as an item."""

    def save_stacks(self, reason: str) -> None: ...

    def log(self, level: int, text: str) -> None: ...


class Handler:
    """Takes one item at a time: the machine's state, the stream, and what the machine orders. No thread, and nothing that waits."""

    def __init__(
        self,
        settings: ProcessorSettings,
        address: Address,
        gate: Gate,
        ports: Ports,
        *,
        machine: RankMachine | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`address`: the first controller's, where the settings name it otherwise."""
        self._settings = settings
        self._address = address
        self.controller = address
        """The controller that leads this rank, or that it tries to reach."""
        self._gate = gate
        self._ports = ports
        self._machine = machine if machine is not None else _default_machine()
        self._clock = clock
        self.steps = StepTimes()
        self.loss: float | None = None
        """What the program has reported since the last heartbeat (the training thread writes); None: nothing."""
        gate.on_step = lambda: self.steps.finish(clock())
        gate.on_wait = lambda waits: self.steps.wait(clock()) if waits else self.steps.go_on(clock())
        self.state: Any = None
        """The machine's."""
        self.running = False
        self.stream: Stream | None = None
        self._stream_open = False
        self._next_tick = inf
        self._highest_term = 0
        self._ticket = 0  # of the gate's last closing
        self._unsettled: tuple[int, int] | None = None  # (ticket, freeze_id) of a closing that timed out

    def begin(self) -> None:
        """Take the machine's first state; `tick` comes next."""
        now = self._next_tick = self._clock()
        self.state = self._machine.initial(self._settings, now)
        self.running = True
        if self._settings.vacant:
            self._ticket = self._gate.vacate(self._settings.vacant)

    def due(self, soonest: float = -inf) -> float:
        """Return when `tick` must be called next. The machine's own deadline counts from `soonest` on: one that a tick did not move
        is tried again a little later, not at full speed."""
        moment, deadline = self._next_tick, self._machine.next_deadline(self.state)
        if deadline is None or deadline >= moment:
            return moment
        return deadline if deadline >= soonest else min(moment, soonest)

    def tick(self) -> None:
        now = self._clock()
        self._next_tick = now + TICK_S
        if lost := self._ports.lost_parent():
            self._step(LocalFault(Cause(CauseKind.AGENT_LOST, (self._settings.rank,), lost), ""), now)
        if self._unsettled is not None:
            self._settle_late(*self._unsettled)
        gate, ports = self._gate, self._ports
        place = (gate.phase, gate.step, gate.waiting, ports.paused())
        self._step(Tick(*place, ports.work_done(), *self.steps.done), now)

    def close_stream(self, drain_s: float) -> None:
        if self.stream is not None:
            self.stream.close(drain_s)

    def take(self, item: Item) -> None:
        now = self._clock()
        match item:
            case Stop():
                self.running = False
            case Opened(stream):
                if stream is self.stream:
                    self._stream_open = True
                    self._highest_term = max(self._highest_term, stream.term)
                    self._step(Connected(self._ports.registration()), now)
            case Incoming(stream, parcel):
                mine = self._settings.rank in parcel.ranks or not parcel.ranks  # none: the stream itself is meant
                if stream is self.stream and parcel.message is not None and mine:
                    self._receive(parcel.message, now)
            case Closed(stream, reason):
                if stream is self.stream:
                    self.stream = None
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
            self._ports.welcomed(message)
        self._step(Received(message), now)

    def _step(self, event: Event, now: float) -> None:
        try:
            self.state, effects = self._machine.transition(self.state, event, now)
        except ProtocolError as error:  # the state is unchanged
            self._ports.log(logging.ERROR, str(error))
            return
        except Exception:  # a bug must not take the rank's protection away with this thread
            self._ports.log(logging.ERROR, f"the processor's machine failed on {event}: {traceback.format_exc()}")
            return
        for effect in effects:
            if self.running:
                self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send(message):
                self._send(message)
            case Connect(address):
                self.controller = self._address if address == self._settings.address else address
                self._connect(self.controller)
            case CloseGate(freeze_id):
                self._close_gate(freeze_id)
            case OpenGate():
                self._unsettled = None
                self.steps.discard()
                self._ports.submit(Reopen(self._ticket))
            case ApplyUpdate() | WriteShare() | PublishCheckpoint():
                self._ports.submit(effect)
            case RegroupTraining(order):
                self._ports.regroup(order)
            case StartController() | LookForControllers():
                self._ports.start_controller(effect)
            case ReportUnled(unled):
                self._gate.unled = unled
            case LeaveBoundary():
                self._gate.step_boundary.leave()
            case SaveStacks(reason):
                self._ports.save_stacks(reason)
            case ExitProcess(code, reason):
                self.running = False
                self._ports.leave(code, reason)
            case ReleaseTraining():
                self._ports.release()
            case Log(text):
                self._ports.log(logging.INFO, text)
            case _:
                assert_never(effect)

    def _send(self, message: Upward) -> None:
        if type(message) is Heartbeat:
            message = self._with_shares(message)
        if self.stream is None or not self._stream_open:
            self._ports.log(logging.DEBUG, f"no stream, not sent: {type(message).__name__}")
            return
        try:
            self.stream.send(message)
        except CodecError as error:
            self._ports.log(logging.ERROR, str(error))

    def _with_shares(self, beat: Heartbeat) -> Heartbeat:
        """Add what people are shown, and no machine reads: where the steps' time went on this rank, and the loss."""
        shares, (loss, self.loss) = self.steps.take_shares(), (self.loss, None)
        own_s, waited_s = shares if shares is not None else (None, None)
        if shares is None and loss is None:
            return beat
        return replace(beat, own_s=own_s, waited_s=waited_s, loss=loss)

    def _connect(self, address: Address) -> None:
        if self.stream is not None:
            self.stream.close()
        self._stream_open = False
        self.stream = self._ports.open_stream(address, self._highest_term)

    def _close_gate(self, freeze_id: int) -> None:
        """Shut at once, in the order of the effects. Most freezes find no update in progress, on the device neither, and are answered at
        once too, even while the work thread writes; the others are waited for on the work thread."""
        self._ticket = self._gate.shut(freeze_id)
        report = self._gate.settle(self._ticket, freeze_id, AT_ONCE_S)
        if report.closed:
            self._log_drain_error(freeze_id)
            self._ports.put(GateClosed(report))
        else:
            self._ports.submit(Settle(self._ticket, freeze_id))

    def _settle_late(self, ticket: int, freeze_id: int) -> None:
        """An update that took longer than the freeze could wait may have ended since: then the state stands still after all,
        and may be what no other rank holds."""
        if ticket != self._ticket:
            self._unsettled = None  # closed anew, or opened, since
            return
        report = self._gate.settle(ticket, freeze_id, 0.0)
        if report.closed:
            self._unsettled = None
            self._log_drain_error(freeze_id)
            self._ports.log(logging.INFO, f"freeze {freeze_id}: the update of step {report.state_step} has ended")
            self._gate_closed(report, self._clock())

    def _log_drain_error(self, freeze_id: int) -> None:
        if self._gate.drain_error:
            self._ports.log(logging.ERROR, f"freeze {freeze_id}: the device failed: {self._gate.drain_error}")

    def _gate_closed(self, report: StateReport, now: float) -> None:
        self._step(GateClosed(replace(report, checkpoint=self._ports.checkpoint())), now)


def _default_machine() -> RankMachine:
    from ttp.processor.core import machine

    return machine
