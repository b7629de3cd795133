"""Runs a rank's processor: `Handler` on its own thread, the stream and the work beside it.

Threads of one processor: `ttp-processor` takes items from the queue (`handler.py` says what is done with them), `ttp-work`
carries out orders, `ttp-stream` reads the controller's messages, `ttp-log` logs. The training thread only enqueues, or waits for
the verdict.

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
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path

from ttp.processor.async_log import AsyncLog
from ttp.processor.core.events import (
    BoundaryReached,
    ControllerEnded,
    ControllerStarted,
    LocalFault,
    LookForControllers,
    Noticed,
    ProcessorSettings,
    SavedAlone,
    SavesAlone,
    StartController,
    TrainReturned,
    WorkFailed,
)
from ttp.processor.gate import Gate
from ttp.processor.handler import Closed, Handler, Incoming, Item, Opened, Stop, Stream
from ttp.processor.ports import ControllerStarter, StateProvider
from ttp.processor.stacks import StackWriter
from ttp.processor.starting import Starting
from ttp.processor.worker import Worker
from ttp.proto.codec import DownwardParcel
from ttp.proto.messages import Cause, Regroup, Welcome
from ttp.proto.stream import GREETING_TIMEOUT_S, Address, ControlStream, Relayed

LEAST_WAIT_S = 0.002
"""A machine that is due all the time is asked so often, not at full speed."""

GREETINGS = 5
"""At least so many tries to reach a controller within the time after which it is lost: each may take a lease."""

FREEZE_TIMEOUT_S = 5.0
"""A gate that has not closed by then is reported as such: the update in progress is stuck."""

FLUSH_TIMEOUT_S = 2.0
"""A process that exits waits this long for its own streams: the training thread may be stuck with their locks held."""


def cannot_regroup(order: Regroup) -> str:
    """Return why a process cannot that was not made for it."""
    return "this process cannot make its groups again while a fault is handled"


@dataclass(frozen=True, slots=True)
class ProcessorOptions:
    """What a processor has of the process around it."""

    freeze_timeout_s: float = FREEZE_TIMEOUT_S
    """How long an update in progress is waited for before the gate is reported as not closed."""
    watch_parent: bool = False
    """The parent process is the rank's launcher; when it is gone, that is this rank's fault."""
    stacks_path: Path | None = None
    """Where the stacks of all threads go when the job hangs; None: nowhere."""
    work_done: Callable[[], int] = lambda: 0
    """A number that grows while the holder carries out an order, or updates; called on the processor's thread."""
    checkpoint: Callable[[], str] = lambda: ""
    """Path of the newest checkpoint that this rank knows to be published; as above."""
    relayed: Relayed | None = None
    """By which relay this rank reaches controllers; None: it connects to them itself."""
    starter: ControllerStarter | None = None
    """Starts controllers in the place of lost ones; None: this rank cannot."""
    regroup: Callable[[Regroup], str] = cannot_regroup
    """Has the training thread do it, which answers by RegroupDone or WorkFailed; returns why it cannot, empty: it does. Called on the processor's
    thread."""


class Processor:
    """One rank's processor. The training thread calls `start`, `fault`, `finished`, `wait_for_verdict`, `stop`."""

    def __init__(
        self,
        settings: ProcessorSettings,
        address: Address,
        job_id: str,
        holder: StateProvider,
        gate: Gate,
        options: ProcessorOptions = ProcessorOptions(),
        *,
        exit_process: Callable[[int], None] = os._exit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._job_id = job_id
        self._gate = gate
        self.work_done = options.work_done
        self._regroup = options.regroup
        self.checkpoint = options.checkpoint
        self._relayed = options.relayed
        self._holder = holder
        self.registration = holder.registration
        self._exit_process = exit_process
        self._clock = clock
        self._parent = os.getppid() if options.watch_parent else None
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.put = self._queue.put
        self._released = threading.Event()
        self._releases_at_exit = False
        self._welcomed = threading.Event()
        self._welcome: Welcome | None = None
        self._log = AsyncLog(settings.rank)
        self.log = self._log.log
        self._stacks = StackWriter(options.stacks_path, self._log)
        self.save_stacks = self._stacks.save
        self._paused_until = -inf
        gate.step_boundary.on_reached = lambda step: self._queue.put(BoundaryReached(step))
        self._worker = Worker(gate, holder, self._log, options.freeze_timeout_s, self._queue.put)
        self.submit = self._worker.submit
        starter = options.starter
        self._starting = Starting(starter, self._log, self._queue.put) if starter is not None else None
        if starter is not None:
            starter.on_end(lambda address: self._queue.put(ControllerEnded(address)))
        self._thread = threading.Thread(target=self._run, name="ttp-processor", daemon=True)
        self._handler = Handler(settings, address, gate, self, clock=clock)

    # --- any thread ---

    def start(self) -> None:
        """Start the threads; the controller is reached in the background."""
        self._log.start()
        self._stacks.listen()
        self._worker.start()
        self._thread.start()

    def fault(self, cause: Cause, detail: str) -> None:
        """`train` raised on the calling training thread: tell the controller. Follow with `wait_for_verdict`."""
        self._gate.abandon()
        self._queue.put(LocalFault(cause, detail))

    def preempted(self, text: str = "SIGTERM") -> None:
        """This rank has a preemption notice: all ranks finish the step in flight if they can soon, then the dump follows."""
        self._gate.notice = True
        self._queue.put(Noticed(text))

    def saves_alone(self, step: int) -> None:
        """All ranks save this step together, without a controller. Follow with `saved_alone`."""
        self._queue.put(SavesAlone(step))

    def saved_alone(self, step: int, path: str, error: str = "") -> None:
        """They have, or could not (`error`): the process exits."""
        self._queue.put(SavedAlone(step, path, error))

    def pause(self, at_most_s: float) -> float:
        """The training thread does something else than steps, for `at_most_s` at most: that is not a hang.

        Returns what `end_pause` wants: a pause may lie within another.
        """
        before, now = self._paused_until, self._clock()
        self._handler.steps.pause(now)
        self._paused_until = max(before, now + at_most_s)
        return before

    def end_pause(self, before: float) -> None:
        self._paused_until = before
        if before == -inf:  # the outermost one
            self._handler.steps.resume(self._clock())

    @property
    def step_s(self) -> float | None:
        """Seconds of the newest finished step, without pauses; None: not known, as it was the first one, or held up by a fault."""
        times_s = self._handler.steps.done[1]
        return times_s[-1] if times_s else None

    def report_loss(self, loss: float) -> None:
        """The next heartbeat has the newest one."""
        self._handler.loss = loss

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
        address = self._handler.controller
        return address if isinstance(address, str) else address() or ""

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
        self._queue.put(Stop())
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            self._worker.stop(timeout_s)
            if self._starting is not None:
                self._starting.stop()
            self._stacks.close()
            self._log.stop(timeout_s)
        self._gate.step_boundary.release()
        self._released.set()
        self._welcomed.set()

    # --- listener of the stream, on the stream's thread ---

    def stream_opened(self, stream: ControlStream) -> None:
        self._queue.put(Opened(stream))

    def stream_received(self, stream: ControlStream, parcel: DownwardParcel) -> None:
        self._queue.put(Incoming(stream, parcel))

    def stream_closed(self, stream: ControlStream, reason: str) -> None:
        if stream.relay_failed:
            self._relayed = None
        self._queue.put(Closed(stream, reason))

    # --- the processor's thread ---

    def _run(self) -> None:
        handler = self._handler
        handler.begin()
        handler.tick()
        while handler.running:
            due = handler.due(self._clock() + LEAST_WAIT_S)
            with contextlib.suppress(queue.Empty):
                handler.take(self._queue.get(timeout=max(0.0, due - self._clock())))
            if self._clock() >= due and handler.running:  # also when events keep coming
                handler.tick()
        handler.close_stream(1.0)

    # --- the handler's ports, on the processor's thread ---

    def open_stream(self, address: Address, fence: int) -> Stream:
        greeting_s = max(GREETING_TIMEOUT_S, self._settings.controller_lost_s / GREETINGS)
        stream = ControlStream(address, self._job_id, self, fence=fence, greeting_s=greeting_s, relayed=self._relayed)
        stream.start()
        return stream

    def start_controller(self, order: StartController | LookForControllers) -> None:
        if self._starting is not None:
            self._starting.submit(order)
        elif isinstance(order, StartController):
            self._queue.put(ControllerStarted("", "this rank starts no controllers"))

    def regroup(self, order: Regroup) -> None:
        self._releases_at_exit = False
        if error := self._regroup(order):
            self._queue.put(WorkFailed(order.freeze_id, "regroup", "", error))

    def paused(self) -> bool:
        return self._clock() < self._paused_until

    def lost_parent(self) -> str:
        if self._parent is None or os.getppid() == self._parent:
            return ""
        text = f"the launcher (pid {self._parent}) is gone"
        self._parent = None
        return text

    def welcomed(self, welcome: Welcome) -> None:
        self._welcome = welcome
        self._welcomed.set()

    def release(self) -> None:
        self._released.set()
        self._welcomed.set()

    def leave(self, code: int, reason: str) -> None:
        if self._releases_at_exit:
            self._log.log(logging.INFO, f"released: {reason}")
            self._released.set()
            self._handler.close_stream(1.0)
            return
        self._log.log(logging.INFO, f"leaving with exit status {code}: {reason}")
        farewell = threading.Thread(target=self._say_farewell, name="ttp-farewell", daemon=True)
        farewell.start()
        farewell.join(FLUSH_TIMEOUT_S)
        self._exit_process(code)
        self._released.set()  # reached in tests only

    def _say_farewell(self) -> None:
        self._stacks.finish(FLUSH_TIMEOUT_S)
        self._log.stop(FLUSH_TIMEOUT_S)
        for handler in logging.getLogger().handlers:
            handler.flush()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):  # a closed or broken pipe: it has no reader any more
                continue
