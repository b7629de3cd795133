"""One simulated rank: a training thread, a gate, a work thread, and the real processor machine between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import TYPE_CHECKING, get_args

from tests.simulation.controllers import BEAT, ROUNDING_S
from tests.simulation.gate import Gate
from tests.simulation.network import DOWN, UP, Route, Stream
from tests.simulation.piece_work import PieceWorker
from tests.simulation.work import Worker
from ttp.processor import events as ev
from ttp.processor import machine
from ttp.processor.state import Link
from ttp.proto.messages import Cause, CauseKind, Downward, Phase, Registration, ShardGroup, Welcome

if TYPE_CHECKING:
    from tests.simulation.job import Job

GROUP_BYTES = 1 << 20
_REFUSED = ev.Disconnected("connection refused", refused=True)
_HEARD_BEAT = ev.Received(BEAT)
_GOT = {kind: f"got {kind.__name__}" for kind in get_args(Downward)}
LONGEST_START_S = 10.0
"""A rank whose job has not assembled by then gives up by itself."""


class Rank:
    """Driver, adapters and training thread of one rank. A dead rank's callbacks do nothing; a stopped one's wait."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        self.gate = Gate(rank, job.training)
        self.stream: Stream | None = None
        self.route = Route()
        self.alive, self.stopped, self.ended, self.ended_s = True, False, "", inf
        self.released = False
        self.was_stopped = False
        """Something kept it from answering for a while, or for good."""
        self.stopped_for_good = False
        self.hogged = False
        """Its training thread holds the interpreter: the processor's threads stand still."""
        self.ahead_s = 0.0
        """Its clock against the job's."""
        self.main_raised = False
        self.hang_update_at = 0
        self.slow_compute: dict[int, float] = {}
        """Seconds that a step's computation takes, by step, instead of the usual; inf: it never ends."""
        self.slow_update: dict[int, float] = {}
        """Seconds that a step's update takes, by step, instead of the usual."""
        self.pauses: dict[int, float] = {}
        """Seconds for which it does something else before a step, and says so: an evaluation, a save."""
        self._paused = False
        self.slow_work: dict[str, float] = {}
        """Seconds that a step of the work takes the next time, by step, instead of the usual; it gets on all the while."""
        self._updating = False
        """The training thread's update gets on."""
        self._work_done = 0
        self.late_results: dict[int, float] = {}
        """Seconds for which a step's commit record is under way to this rank when others have it, by step."""
        self.closed_late_s = -inf
        """When an update ended whose rank had given up waiting for it and said that its gate is not closed."""
        self.noticed = False
        self.waiting = False
        self.break_roll = False
        self.hang_work = False
        self.fence = 0
        """The highest term of a controller that was reached."""
        self.state = machine.initial(
            ev.ProcessorSettings(rank, 0.2, 0.05, job.times.controller_lost_s, job.times.boundary_s, "c0"), job.now
        )
        self.work = Worker(self) if job.own is None else PieceWorker(self)
        self._held: list[tuple[bool, Callable[[], None]]] = []
        """What waits until it is not stopped, and (first True) its interpreter is free, in the order in which it came."""
        self._tick_at = inf
        """When the next tick comes."""
        self._deadline: float | None = None
        """When the machine asked to be called last."""
        self._attempts = 0
        self._current: Stream | None = None
        """The stream that the machine knows of, broken or not."""
        self._greeted_on: Stream | None = None
        self.started, self.started_s = False, inf
        self.acknowledged = -1
        self.soon(LONGEST_START_S, self._start_failed)

    # --- time: the training thread's, and that of the threads beside it ---

    def soon(self, delay_s: float, call: Callable[[], None]) -> None:
        self.job.scheduler.after(delay_s, partial(self.run, call))

    def run(self, call: Callable[[], None]) -> None:
        if not self.alive:
            return
        if self.stopped:
            self._held.append((False, call))
        else:
            call()

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        self.job.scheduler.after(delay_s, partial(self.run_beside, call))

    def run_beside(self, call: Callable[[], None]) -> None:
        """Do it on a thread that stands still while the training thread holds the interpreter."""
        if not self.alive:
            return
        if self.stopped or self.hogged:
            self._held.append((True, call))
        else:
            call()

    def resume(self) -> None:
        self.stopped = False
        self._run_held()

    def let_go(self) -> None:
        """The training thread gives the interpreter back."""
        self.hogged = False
        self._run_held()

    def _run_held(self) -> None:
        """Do what need not wait any more. What comes to one queue stays in its order, whatever held it up and for how long."""
        held, self._held = self._held, []
        for beside, call in held:
            if beside:
                self.run_beside(call)
            else:
                self.run(call)

    def jump(self, seconds: float) -> None:
        """Its clock leaps."""
        self.ahead_s += seconds
        self._tick_at = inf
        if self.alive:
            self._schedule_tick()

    # --- the processor's driver ---

    def step(self, event: ev.Event) -> None:
        if self.hogged:
            self.run_beside(partial(self.step, event))
            return
        if not self.alive:
            return
        self.state, effects = machine.transition(self.state, event, self.job.scheduler.now + self.ahead_s)
        for effect in effects:
            if not self.alive:
                break
            if type(effect) is ev.Send:  # nearly all are
                self.job.send_up(self, effect.message)
            else:
                self._carry_out(effect)
        self._schedule_tick()

    def _schedule_tick(self) -> None:
        deadline = self._deadline = machine.next_deadline(self.state)
        if deadline is not None and deadline < self._tick_at:
            self._tick_by(deadline)

    def _tick_by(self, deadline: float) -> None:
        self._tick_at = deadline
        due = deadline if self.ahead_s == 0.0 else deadline - self.ahead_s + ROUNDING_S
        self.job.scheduler.at(due, partial(self._tick_beside, deadline))

    def _tick_beside(self, deadline: float) -> None:
        if self.alive and not self.stopped and not self.hogged:
            self._tick(deadline)
        else:
            self.run_beside(partial(self._tick, deadline))

    def _tick(self, asked_for: float) -> None:
        if asked_for != self._tick_at:
            return  # the machine has asked for an earlier one since
        self._tick_at = inf
        deadline = self._deadline
        if deadline is not None and deadline > asked_for:
            self._tick_by(deadline)  # something has happened since
        else:
            self.tick()

    def tick(self) -> None:
        self._work_done += self._updating or self.work.gets_on
        self.step(ev.Tick(self.gate.phase, self.gate.step, self.waiting, self._paused, self._work_done))

    def count_work(self) -> None:
        """A piece of work is done: it counts, however short it was."""
        self._work_done += 1

    def _carry_out(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Connect(address):
                self.job.abandon_stream(self)
                self._current = None
                self._attempts += 1
                self.later(self.job.rng.uniform(0.001, 0.01), partial(self._connect, address, self._attempts))
            case ev.CloseGate(freeze_id):
                self._close_gate(freeze_id)
            case ev.OpenGate() | ev.ApplyUpdate() | ev.WriteShare() | ev.PublishCheckpoint():
                self.work.submit(effect)
            case ev.ExitProcess(code, reason):
                self.job.note(f"rank {self.rank} leaves with {code}: {reason}")
                self.job.process_gone(self, f"exit code {code}")
            case ev.Release():
                self.released = True
                self.job.process_gone(self, "exit code 0" if self.started else "exit code 1")
            case ev.Log() | ev.SaveStacks():
                pass

    # --- the stream ---

    def _connect(self, address: str, attempt: int) -> None:
        if attempt != self._attempts:
            return  # it has gone on meanwhile
        controller = self.job.controller_at(address)
        if controller.gone:
            answered = max(self.route.held_until.values())
            if answered > self.job.scheduler.now:
                self.later(answered - self.job.scheduler.now, partial(self._refused, attempt, _REFUSED))
            else:
                self._refused(attempt, _REFUSED)
            return
        self.stream = self._current = stream = Stream(
            self.rank, self.job.scheduler, self.job.rng, self.job.slowest_s, controller, self.route
        )

        def answer() -> None:
            stream.carry(DOWN, lambda *_: self.run_beside(partial(self._greeted, stream)), None)

        stream.carry(UP, lambda *_: controller.when_running(answer), None)

    def _refused(self, attempt: int, answer: ev.Disconnected) -> None:
        if attempt == self._attempts and self._current is None:
            self.step(answer)

    def _greeted(self, stream: Stream) -> None:
        if self.stream is not stream or self._greeted_on is stream:
            return
        self._greeted_on = stream
        if stream.controller.term < self.fence:
            self.job.abandon_stream(self)
            self.step(ev.Disconnected("it is fenced", refused=True))
            return
        self.fence = stream.controller.term
        self.step(ev.Connected(self.registration()))
        self.job.happened("registers", self.rank)

    def disconnected(self, stream: Stream) -> None:
        """A stream broke; unless this rank has turned to another since."""
        if self._current is stream:
            self._current = None
            self.step(ev.Disconnected("stream broke"))

    def registration(self) -> Registration:
        groups = tuple(ShardGroup(g, f"shard {g}", GROUP_BYTES) for g in self.job.training.groups_of(self.rank))
        world_size, host = self.job.training.layout.world_size, self.job.hosts[self.rank]
        return Registration(
            self.rank, world_size, host, self.pid, groups, self.gate.state_step, self.job.roots, "{}",
            self._standby(),
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return 100 + self.rank

    def _standby(self) -> str:
        """Ranks from 1 on have started the standbys, in order; the last rank has all that are left."""
        place = self.rank if self.rank < len(self.job.controllers) else 0
        return f"c{place}" if place else ""

    @property
    def attached(self) -> Stream | None:
        """The stream on which it has registered, None while there is none."""
        return self._current if self.state.link is Link.UP else None

    def _start_failed(self) -> None:
        if not self.started:
            self.job.process_gone(self, "exit code 1")

    def take_in(self, stream: Stream, message: Downward) -> None:
        """The network brings a message: it is read as soon as the processor's threads run."""
        if self.alive and not self.stopped and not self.hogged:
            self.receive(stream, message)
        else:
            self.run_beside(partial(self.receive, stream, message))

    def receive(self, stream: Stream, message: Downward) -> None:
        if stream is not self.stream:
            return
        if not self.started and isinstance(message, Welcome):
            self.started, self.started_s = True, self.job.scheduler.now
            self.soon(0.001, self._compute)
        self.step(_HEARD_BEAT if message is BEAT else ev.Received(message))
        self.job.happened(_GOT[type(message)], self.rank)

    # --- the gate ---

    def _close_gate(self, freeze_id: int) -> None:
        self.gate.bar(freeze_id)
        if not self.gate.busy:
            self.gate_closed(freeze_id)
        else:
            self.work.submit(ev.CloseGate(freeze_id))

    def gate_closed(self, freeze_id: int) -> None:
        """The gate is closed, or could not be closed in time."""
        report = self.gate.report(freeze_id)
        if report.closed:
            self.acknowledged = freeze_id
        self.step(ev.GateClosed(report))

    # --- the training thread ---

    def _compute(self) -> None:
        """Forward and backward of the next step."""
        step = self.gate.state_step + 1
        if step in self.pauses:
            self._paused = True
            self.soon(self.pauses.pop(step), self._end_pause)
            return
        if step > self.job.training.steps:
            self.step(ev.TrainReturned())
            return

        def computing() -> None:
            self.gate.compute(step)
            self.job.happened(f"COMPUTE {step}", self.rank)
            seconds = self.job.rng.uniform(0.005, 0.04)
            if step in self.slow_compute:
                seconds = self.slow_compute[step]
                self.job.struck("slow rank" if seconds < inf else "hang in compute", self.rank)
            if seconds < inf:
                self.soon(seconds, partial(self._pass_gate_to_ready, step))

        self.gate.enter(computing)

    def _end_pause(self) -> None:
        self._paused = False
        if not self.main_raised:
            self._compute()

    def _pass_gate_to_ready(self, step: int) -> None:
        if self.main_raised:
            return
        self.gate.enter(partial(self._ready, step))

    def _ready(self, step: int) -> None:
        if self.main_raised:
            return
        self.gate.ready(step)
        self.job.happened(f"READY {step}", self.rank)
        members = self.job.training.collectives(self.rank)
        self.waiting = True
        if self.noticed:
            self.job.told_to_leave.add((members, step))
        go_on = partial(self.run, partial(self.gate.enter, partial(self._update, step)))
        if step in self.late_results:
            go_on = partial(self.job.scheduler.after, self.late_results[step], go_on)
        self.job.collectives.enter("norm", step, members, self.rank, go_on, self._peer_failed)

    def _update(self, step: int) -> None:
        if self.main_raised:
            return
        self.waiting = False
        self.job.update_begins(self, step)
        self.gate.begin(self.job.training.record(step))
        self.job.happened(f"UPDATING {step}", self.rank)
        if self.hang_update_at and step >= self.hang_update_at:
            self.job.struck("hang in update", self.rank)
            return
        seconds = self.slow_update.get(step, self.job.rng.uniform(0.001, 0.02))
        self._updating = True
        self.soon(seconds, partial(self._gather, step))

    def _gather(self, step: int) -> None:
        self._updating = False
        if self.gate.torn:
            return
        self.count_work()
        self.gate.end()
        self.job.happened(f"DONE {step}", self.rank)
        members = self.job.everybody
        self.waiting = True
        self.job.collectives.enter(
            "gather", step, members, self.rank, partial(self.run, self._after_gather), self._peer_failed
        )

    def _after_gather(self) -> None:
        step = self.gate.state_step
        if self.main_raised:
            return
        if (self.job.training.collectives(self.rank), step) in self.job.told_to_leave:
            self.job.happened("boundary", self.rank)
            self.step(ev.BoundaryReached(step))  # the training thread waits here for the end of the process
            return
        self.waiting = False
        self._compute()

    def _peer_failed(self) -> None:
        self.run(lambda: self.fault(CauseKind.PEER_ERROR, "connection closed by peer"))

    def notice(self) -> None:
        """SIGTERM: the training thread takes it along to the next spanning collective."""
        self.noticed = True
        self.step(ev.Noticed("SIGTERM"))

    def fault(self, kind: CauseKind, text: str) -> None:
        """The training thread raises; in the middle of an update that tears the state."""
        if self.main_raised or not self.alive:
            return
        if kind in (CauseKind.EXCEPTION, CauseKind.PEER_ERROR):
            self.main_raised = True
            if self.gate.busy and not self.gate.final:
                self._updating = False
                self.gate.fail()
        self.step(ev.LocalFault(Cause(kind, (self.rank,), text), ""))

    @property
    def phase(self) -> Phase:
        return self.gate.phase
