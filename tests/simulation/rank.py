"""One simulated rank: a training thread, a gate, a work thread, and the real processor machine between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.disk import DiskError, File, Manifest, Piece
from tests.simulation.gate import Gate
from tests.simulation.network import Stream
from ttp.processor import events as ev
from ttp.processor import machine
from ttp.proto.messages import (
    Cause,
    CauseKind,
    CommitRecord,
    Downward,
    FileEntry,
    Part,
    Phase,
    PublishOrder,
    Registration,
    ShardGroup,
    ShareResult,
    WriteOrder,
)

if TYPE_CHECKING:
    from tests.simulation.job import Job

GROUP_BYTES = 1 << 20
FREEZE_TIMEOUT_S = 0.5
LONGEST_START_S = 10.0
"""A rank whose job has not assembled by then gives up by itself."""


class Rank:
    """Driver, adapters and training thread of one rank. A dead rank's callbacks do nothing; a stopped one's wait."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        self.gate = Gate(rank, job.training)
        self.stream: Stream | None = None
        self.alive, self.stopped, self.ended = True, False, ""
        self.released = False
        self.was_stopped = False
        self.stopped_for_good = False
        self.main_raised = False
        self.hang_update_at = 0
        self.slow_compute: dict[int, float] = {}
        """Seconds that a step's computation takes, by step, instead of the usual; inf: it never ends."""
        self.slow_update: dict[int, float] = {}
        """Seconds that a step's update takes, by step, instead of the usual."""
        self.noticed = False
        self.waiting = False
        self.break_roll = False
        self.hang_work = False
        self.fence = 0
        """The highest term of a controller that was reached."""
        self.state = machine.initial(
            ev.ProcessorSettings(rank, 0.2, 0.05, job.times.controller_lost_s, job.times.boundary_s, "c0"), job.now
        )
        self._written: dict[tuple[str, int, tuple[Part, ...]], tuple[Piece, ...]] = {}
        """What this rank has written, by directory, step and parts: linked instead of written again."""
        self._held: list[Callable[[], None]] = []
        self._tasks: list[ev.Effect] = []
        self._working = False
        self._tick_at = float("inf")
        self._attempts = 0
        self._current: Stream | None = None
        """The stream that the machine knows of, broken or not."""
        self._files = 0
        self.started, self.started_s = False, float("inf")
        self.acknowledged = -1
        self.soon(LONGEST_START_S, self._start_failed)

    # --- time ---

    def soon(self, delay_s: float, call: Callable[[], None]) -> None:
        self.job.scheduler.after(delay_s, lambda: self.run(call))

    def run(self, call: Callable[[], None]) -> None:
        if not self.alive:
            return
        if self.stopped:
            self._held.append(call)
        else:
            call()

    def resume(self) -> None:
        self.stopped = False
        calls, self._held = self._held, []
        for call in calls:
            self.run(call)

    # --- the processor's driver ---

    def step(self, event: ev.Event) -> None:
        if not self.alive:
            return
        self.state, effects = machine.transition(self.state, event, self.job.now)
        for effect in effects:
            if self.alive:
                self._carry_out(effect)
        self._schedule_tick()

    def _schedule_tick(self) -> None:
        deadline = machine.next_deadline(self.state)
        if deadline is None or deadline >= self._tick_at:
            return
        self._tick_at = deadline
        self.job.scheduler.at(deadline, lambda: self.run(lambda: self._tick(deadline)))

    def _tick(self, asked_for: float) -> None:
        if asked_for == self._tick_at:  # else the machine has asked for an earlier one since
            self.tick()

    def tick(self) -> None:
        self._tick_at = float("inf")
        self.step(ev.Tick(self.gate.phase, self.gate.step, self.waiting))

    def _carry_out(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Send(message):
                self.job.send_up(self, message)
            case ev.Connect(address):
                self.job.abandon_stream(self)
                self._current = None
                self._attempts += 1
                attempt = self._attempts
                self.soon(self.job.rng.uniform(0.001, 0.01), lambda: self._connect(address, attempt))
            case ev.CloseGate(freeze_id):
                self._close_gate(freeze_id)
            case ev.OpenGate() | ev.ApplyUpdate() | ev.WriteShare() | ev.PublishCheckpoint():
                self._tasks.append(effect)
                self._work()
            case ev.ExitProcess(code, reason):
                self.job.note(f"rank {self.rank} leaves with {code}: {reason}")
                self.job.process_gone(self, f"exit code {code}")
            case ev.Release():
                self.released = True
                self.job.process_gone(self, "exit code 0" if self.started else "exit code 1")
            case ev.Log() | ev.SaveStacks():
                pass

    def _connect(self, address: str, attempt: int) -> None:
        if attempt != self._attempts:
            return  # it has gone on meanwhile
        controller = self.job.controller_at(address)
        if controller.gone:
            self.step(ev.Disconnected("connection refused", refused=True))
            return
        self.stream = self._current = stream = Stream(self.job.scheduler, self.job.rng, self.job.slowest_s, controller)

        def answer() -> None:
            stream.carry("down", lambda _: self.run(lambda: self._greeted(stream)), None)

        stream.carry("up", lambda _: controller.when_running(answer), None)

    def _greeted(self, stream: Stream) -> None:
        if self.stream is not stream:
            return
        if stream.controller.term < self.fence:
            self.job.abandon_stream(self)
            self.step(ev.Disconnected("it is fenced", refused=True))
            return
        self.fence = stream.controller.term
        self.step(ev.Connected(self._registration()))

    def disconnected(self, stream: Stream) -> None:
        """A stream broke; unless this rank has turned to another since."""
        if self._current is stream:
            self._current = None
            self.step(ev.Disconnected("stream broke"))

    def _registration(self) -> Registration:
        groups = tuple(ShardGroup(g, f"shard {g}", GROUP_BYTES) for g in self.job.training.groups_of(self.rank))
        layout = self.job.training.layout
        host = f"host{layout.hosts[self.rank]}"
        return Registration(
            self.rank, layout.world_size, host, 100 + self.rank, groups, self.gate.state_step, self.job.roots, "{}",
            self._standby(),
        )  # fmt: skip

    def _standby(self) -> str:
        """Ranks from 1 on have started the standbys, in order; the last rank has all that are left."""
        place = self.rank if self.rank < len(self.job.controllers) else 0
        return f"c{place}" if place else ""

    def _start_failed(self) -> None:
        if not self.started:
            self.job.process_gone(self, "exit code 1")

    def receive(self, stream: Stream, message: Downward) -> None:
        if stream is not self.stream:
            return
        name = type(message).__name__
        if name == "Welcome" and not self.started:
            self.started, self.started_s = True, self.job.now
            self.soon(0.001, self._compute)
        self.step(ev.Received(message))
        self.job.happened(f"got {name}", self.rank)

    # --- the gate and the work thread ---

    def _close_gate(self, freeze_id: int) -> None:
        self.gate.bar(freeze_id)
        if not self.gate.busy:
            self._closed(freeze_id)
        else:
            self._tasks.append(ev.CloseGate(freeze_id))
            self._work()

    def _closed(self, freeze_id: int) -> None:
        report = self.gate.report(freeze_id)
        if report.closed:
            self.acknowledged = freeze_id
        self.step(ev.GateClosed(report))

    def _work(self) -> None:
        """The work thread: one task at a time."""
        if self._working or not self._tasks:
            return
        self._working = True
        task = self._tasks.pop(0)
        if self.hang_work and not isinstance(task, ev.CloseGate | ev.OpenGate):
            return  # for ever
        match task:
            case ev.WriteShare(order) | ev.PublishCheckpoint(order) if order.freeze_id < self.gate.freeze_id:
                stage = "write" if isinstance(order, WriteOrder) else "publish"
                self._next(ev.WorkFailed(order.freeze_id, stage, order.tmp_name, "taken back"))
            case ev.CloseGate(freeze_id):
                self._wait_for_update(freeze_id)
            case ev.OpenGate(freeze_id):
                self.gate.thaw(freeze_id)
                self._next()
            case ev.ApplyUpdate(freeze_id, record):
                self._roll_forward(freeze_id, record)
            case ev.WriteShare(order):
                self._begin_write(order)
            case ev.PublishCheckpoint(order):
                self._begin_publish(order)

    def _next(self, answer: ev.Event | None = None) -> None:
        self._working = False
        if answer is not None:
            self.step(answer)
        self._work()

    def _wait_for_update(self, freeze_id: int) -> None:
        waiting = [True]

        def report() -> None:
            if waiting:
                waiting.clear()
                self._closed(freeze_id)
                self._next()
            elif self.gate.freeze_id == freeze_id and self.gate.barred:  # it was reported as not closed before
                self.soon(self.job.rng.uniform(0.0, 0.2), lambda: self._closed_late(freeze_id))

        def give_up() -> None:
            if waiting:
                report()

        self.gate.when_free(lambda: self.run(report))
        self.soon(FREEZE_TIMEOUT_S, give_up)

    def _closed_late(self, freeze_id: int) -> None:
        if self.gate.freeze_id == freeze_id and self.gate.barred:
            self._closed(freeze_id)

    def _roll_forward(self, freeze_id: int, record: CommitRecord) -> None:
        if not self.gate.can_roll(record):
            self._next(ev.WorkFailed(freeze_id, "roll_forward", "", f"not READY({record.step})"))
            return
        self.job.happened("rolling", self.rank)
        self.gate.start_roll(record)

        def finish() -> None:
            if self.break_roll:
                self.gate.fail()
                self._next(ev.WorkFailed(freeze_id, "roll_forward", "", "raised half way"))
            else:
                self.gate.end()
                self._next(ev.RollForwardDone(freeze_id, record.step))

        self.soon(self.job.rng.uniform(0.001, 0.02), finish)

    def _begin_write(self, order: WriteOrder) -> None:
        """Read the values at the start and at the end: a holder must stand still meanwhile."""
        self.job.happened("writing", self.rank)
        disk, name = self.job.disk, f"r{self.rank}_{self._files}"
        self._files += 1
        before = dict(self.gate.held(order.step))
        disk.write(order.directory, order.tmp_name, name, File((), False))

        key = self._reuse_key(order)
        again = key in self._written  # a link to the file of an earlier attempt

        def finish() -> None:
            after = self.gate.held(order.step)
            if any(before[part.group_id] != after[part.group_id] for part in order.parts):
                self.job.broken(f"I5: rank {self.rank}'s state changed while it was written")
            fresh = tuple((p.group_id, p.index, p.count, after[p.group_id]) for p in order.parts)
            pieces = self._written[key] if again else fresh
            try:
                disk.check(self.rank, order.directory)
                disk.write(order.directory, order.tmp_name, name, File(pieces, True))
            except DiskError as error:
                self._next(ev.WorkFailed(order.freeze_id, "write", order.tmp_name, str(error)))
                return
            self._written[key] = pieces
            entry = FileEntry(name, 10 * len(pieces), "0", self.rank)
            self._next(ev.WriteDone(order, ShareResult((entry,))))

        self.soon(0.0005 if again else self.job.rng.uniform(0.001, 0.05) * len(order.parts), finish)

    def _reuse_key(self, order: WriteOrder) -> tuple[str, int, tuple[Part, ...]]:
        return order.directory, order.step, order.parts

    def _begin_publish(self, order: PublishOrder) -> None:
        """Manifest, rename, tracker: each a moment of its own, so that death may come between."""
        disk, final = self.job.disk, f"iter_{order.step:07d}"
        here, there = (order.directory, order.tmp_name), (order.directory, final)
        self.job.happened("publishing", self.rank)

        def manifest() -> None:
            if there not in disk.directories:
                try:
                    disk.check(self.rank, order.directory)
                    if here not in disk.directories:
                        raise DiskError(f"{order.tmp_name} is gone")
                except DiskError as error:
                    self._next(ev.WorkFailed(order.freeze_id, "publish", order.tmp_name, str(error)))
                    return
                names = tuple(file.name for result in order.results for file in result.files)
                disk.directories[here].manifest = Manifest(order.step, names)
            self.soon(self.job.rng.uniform(0.0005, 0.005), rename)
            self.job.happened("manifest written", self.rank)

        def rename() -> None:
            try:
                if disk.rename(*here, final):
                    self.job.renamed(order.directory, order.step)
            except DiskError as error:
                self._next(ev.WorkFailed(order.freeze_id, "publish", order.tmp_name, str(error)))
                return
            self.soon(self.job.rng.uniform(0.0005, 0.005), track)
            self.job.happened("renamed", self.rank)

        def track() -> None:
            disk.tracker[order.directory] = max(order.step, disk.tracker.get(order.directory, 0))
            self._next(ev.PublishDone(order, f"{order.directory}/{final}"))

        self.soon(self.job.rng.uniform(0.0005, 0.005), manifest)

    # --- the training thread ---

    def _compute(self) -> None:
        """Forward and backward of the next step."""
        step = self.gate.state_step + 1
        if step > self.job.training.steps:
            self.step(ev.TrainReturned())
            return

        def computing() -> None:
            self.gate.phase, self.gate.step = Phase.COMPUTE, step
            self.gate.gradients_of = 0
            usual = self.job.rng.uniform(0.005, 0.04)
            if (seconds := self.slow_compute.get(step, usual)) < float("inf"):
                self.soon(seconds, lambda: self._pass_gate_to_ready(step))

        self.gate.enter(computing)

    def _pass_gate_to_ready(self, step: int) -> None:
        if self.main_raised:
            return
        self.gate.enter(lambda: self._ready(step))

    def _ready(self, step: int) -> None:
        if self.main_raised:
            return
        self.gate.phase, self.gate.step, self.gate.gradients_of = Phase.READY, step, step
        self.job.happened(f"READY {step}", self.rank)
        members = self.job.training.collectives(self.rank)
        self.waiting = True
        if self.noticed:
            self.job.told_to_leave.add((members, step))
        go_on = lambda: self.run(lambda: self.gate.enter(lambda: self._update(step)))  # noqa: E731
        self.job.collectives.enter("norm", step, members, self.rank, go_on, self._peer_failed)

    def _update(self, step: int) -> None:
        if self.main_raised:
            return
        self.waiting = False
        self.job.update_begins(self, step)
        self.gate.begin(self.job.training.record(step))
        self.job.happened(f"UPDATING {step}", self.rank)
        if self.hang_update_at and step >= self.hang_update_at:
            return
        usual = self.job.rng.uniform(0.001, 0.02)
        self.soon(self.slow_update.get(step, usual), lambda: self._gather(step))

    def _gather(self, step: int) -> None:
        if self.gate.torn:
            return
        self.gate.end()
        self.job.happened(f"DONE {step}", self.rank)
        members = tuple(range(self.job.training.layout.world_size))
        go_on = lambda: self.run(self._after_gather)  # noqa: E731
        self.waiting = True
        self.job.collectives.enter("gather", step, members, self.rank, go_on, self._peer_failed)

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
                self.gate.fail()
        self.step(ev.LocalFault(Cause(kind, (self.rank,), text), ""))
