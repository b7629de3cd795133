"""One simulated rank: the shipped gate and the shipped handler of its processor, and around them a training thread, a network and
a clock that one seed decides.

Items of the processor's queue are handled in their order, as soon as the processor's threads run; where a shipped part would wait,
it is called again later (`waits.py`).
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, get_args

from tests.simulation.boundaries import Boundary
from tests.simulation.collectives import ATTEMPT, Returned
from tests.simulation.controllers import ROUNDING_S
from tests.simulation.disk import OLDER_STEP, final_name
from tests.simulation.in_place import FIRST_PID, PIDS_APART, Regrouping
from tests.simulation.network import RankStream, Route, Stream
from tests.simulation.on_disk import nothing_on_disk
from tests.simulation.piece_work import PieceWorker
from tests.simulation.rehearsal import Rehearsal
from tests.simulation.replica import Replica
from tests.simulation.threads import Threads
from tests.simulation.waits import TRAINING, Waits
from tests.simulation.work import Worker
from ttp.errors import AbortedCollective, ProtocolError
from ttp.optim.step_agreement.participation import Contribution, Ending
from ttp.processor.core import events as ev
from ttp.processor.core.state import LinkState
from ttp.processor.gate import Gate
from ttp.processor.handler import Closed, Handler, Incoming, Item
from ttp.processor.worker import Reopen, Task
from ttp.proto import messages
from ttp.proto.messages import Cause, CauseKind, Downward, Phase, Registration, ShardGroup, StateReport, Welcome

if TYPE_CHECKING:
    from tests.simulation.job import Job

GROUP_BYTES = 1 << 20
_GOT = {kind: f"got {kind.__name__}" for kind in get_args(Downward)}
LONGEST_START_S = 10.0
"""A rank whose job has not assembled by then gives up by itself."""


class Rank(Threads):
    """Driver, adapters and training thread of one rank. A dead rank's callbacks do nothing; a stopped one's wait."""

    def __init__(self, job: Job, rank: int, vacant: int = 0, before: Rank | None = None, address: str = "c0") -> None:
        """`vacant`: the freeze in which it is started in the place of the process `before`."""
        super().__init__(job)
        self.rank = rank
        self.pid: int = FIRST_PID + rank if before is None else before.pid + PIDS_APART
        self.node: int = job.nodes[rank]
        """Where it runs."""
        self.began_in = self.generation = vacant
        self.stuck = False
        """Its training thread comes out of nothing any more."""
        self.returned = False
        """Its training has returned, and is not entered again."""
        self.regrouping = Regrouping(self)
        self.waits = Waits(self.clock)
        self.gate: Gate = Gate(rank, waits=self.waits)
        self.gate.step_boundary.on_reached = lambda step: self.put(ev.BoundaryReached(step))
        self.boundary = Boundary(self)
        self.replica: Replica = Replica(rank, job.training)
        self.route: Route = Route()
        self.ended, self.ended_s = "", inf
        self.released = self.gave_up = False
        self.relayed = True  # it has not left its node's relay, where there is one
        self.was_stopped = False
        """Something kept it from answering for a while, or for good."""
        self.stopped_for_good = False
        self.still_s = inf
        """When it was stopped last."""
        self.held_for_good = False
        """Its training thread holds the interpreter and does nothing else any more: as if it were stopped, but the process runs."""
        self.ahead_s = 0.0
        """Its clock against the job's."""
        self.main_raised = False
        self.rehearsal = Rehearsal(self)
        self.hang_update_at = 0
        self.slow_compute: dict[int, float] = {}
        """Seconds that a step's computation takes, by step, instead of the usual; inf: it never ends."""
        self.slow_update: dict[int, float] = {}
        """The same of its update."""
        self.pauses: dict[int, float] = {}
        """Seconds for which it does something else before a step, and says so: an evaluation, a save."""
        self._paused = False
        self.slow_work: dict[str, float] = {}
        """Seconds that a step of the work takes the next time, by step, instead of the usual; it progresses all the while."""
        self.updating = False
        """The training thread's update progresses."""
        self._work_done = 0
        self.late_results: dict[int, float] = {}
        """Seconds for which a step's commit record is under way to this rank when others have it, by step."""
        self.closed_late_s = -inf
        """When an update ended whose rank had given up waiting for it and said that its gate is not closed."""
        self.break_roll = False
        self.hang_work = False
        settings = ev.ProcessorSettings(
            rank, 0.2, 0.05, job.times.controller_lost_s, job.times.boundary_s, address,
            job.times.lease_s / 3 if job.first_standbys else inf, job.times.standby_start_s, self.boundary.possible,
            job.times.total_timeout_s, vacant, beats_together=bool(job.relays),
        )  # fmt: skip
        self.handler = Handler(settings, address, self.gate, self, clock=self.clock)
        self.work = Worker(self) if job.own is None else PieceWorker(self)
        self._items: deque[Item] = deque()
        """The processor's queue."""
        self._taking = False
        self._tick_at = inf
        """When the next tick comes."""
        self._lost_launcher = ""
        self._gave_up_waiting = False
        """Its gate was reported as not closed."""
        self.started, self.started_s = bool(vacant), job.scheduler.now if vacant else inf
        self.acknowledged = -1
        self.known_checkpoint = "" if vacant else f"{job.roots[0]}/{final_name(OLDER_STEP)}"
        """The newest that it has resumed from or published, or behind which all have regrouped."""
        self.knew: dict[int, str] = {}
        """By freeze, which one that was when its gate closed."""
        self.handler.begin()
        self.soon(LONGEST_START_S, self._start_failed)

    def clock(self) -> float:
        return self.job.scheduler.now + self.ahead_s

    @property
    def state(self) -> Any:
        """The machine's."""
        return self.handler.state

    @property
    def stream(self) -> RankStream | None:
        """The stream that its handler has, where it is open at this end."""
        stream = self.handler.stream
        return stream if isinstance(stream, RankStream) and stream.up else None

    # --- time: the training thread's, and that of the threads beside it ---

    def leave_training(self) -> None:
        super().leave_training()
        self.main_raised, self.gate.waiting, self._paused = False, False, False

    def take_waiting(self) -> None:
        if self._items:
            self._take_all()

    def jump(self, seconds: float) -> None:
        """Its clock leaps."""
        self.ahead_s += seconds
        self._tick_at = inf
        if self.alive:
            self._schedule_tick()

    # --- the processor's thread ---

    def put(self, item: Item) -> None:
        """Queue an item; the processor's thread takes it at once, unless it is at another or cannot run."""
        if not self.alive:
            return
        if self.stopped or self.hogged:
            self.run_beside(partial(self.put, item))
            return
        self._items.append(item)
        if not self._taking:
            self._take_all()

    def _take_all(self) -> None:
        items, handler = self._items, self.handler
        self._taking = True
        while items and self.alive and not self.stopped and not self.hogged:
            item = items.popleft()
            if type(item) is Incoming:
                known = item.stream is handler.stream
                handler.take(item)
                if known:
                    self.job.happened(_GOT[type(item.parcel.message)], self.rank)
                continue
            if type(item) is ev.GateClosed:
                self._gave_up_waiting = not item.report.closed
                self._acknowledge(item.report)
            handler.take(item)
        self._taking = False
        self._schedule_tick()

    def _acknowledge(self, report: StateReport) -> None:
        self.knew[report.freeze_id] = self.known_checkpoint
        if report.closed:
            self.acknowledged = max(self.acknowledged, report.freeze_id)

    def _schedule_tick(self) -> None:
        due = self.handler.due()
        if due < self._tick_at and self.alive:
            self._tick_by(due)

    def _tick_by(self, due: float) -> None:
        self._tick_at = due
        moment = due if self.ahead_s == 0.0 else due - self.ahead_s + ROUNDING_S
        self.job.scheduler.at(moment, partial(self._tick_beside, due))

    def _tick_beside(self, due: float) -> None:
        if self.alive and not self.stopped and not self.hogged:
            self._tick(due)
        else:
            self.run_beside(partial(self._tick, due))

    def _tick(self, asked_for: float) -> None:
        if asked_for != self._tick_at:
            return  # an earlier one was asked for since
        self._tick_at = inf
        due = self.handler.due()
        if due > asked_for:
            self._tick_by(due)  # something has happened since
        else:
            self.tick()

    def tick(self) -> None:
        self._taking = True
        self.handler.tick()
        self._take_all()

    def count_work(self) -> None:
        """A piece of work is done: it counts, however short it was."""
        self._work_done += 1

    # --- the ports of the handler ---

    def submit(self, task: Task) -> None:
        if type(task) is Reopen:
            nothing_on_disk(self, "opens its gate")
        self.work.submit(task)

    def open_stream(self, address: Any, fence: int) -> RankStream:
        stream = RankStream(self, self.job.controller_at(address), fence)
        if self.relayed and self.node in self.job.relays:
            self.job.relays[self.node].carry(stream)
        self.later(self.job.rng.uniform(0.001, 0.01), stream.dial)
        return stream

    def regroup(self, order: messages.Regroup) -> None:
        nothing_on_disk(self, "regroups")
        self.regrouping.begin(order)

    def start_controller(self, order: ev.StartController | ev.LookForControllers) -> None:
        self.job.standbys.carry_out(self, order)

    def paused(self) -> bool:
        return self._paused

    def work_done(self) -> int:
        self._work_done += self.updating or self.work.progresses
        return self._work_done

    def checkpoint(self) -> str:
        return self.known_checkpoint

    def lost_parent(self) -> str:
        lost, self._lost_launcher = self._lost_launcher, ""
        return lost

    def welcomed(self, welcome: Welcome) -> None:
        if not self.started:
            self.started, self.started_s = True, self.job.scheduler.now
            self.soon(0.001, self._compute)

    def release(self) -> None:
        self.released = True
        self.job.process_gone(self, "exit code 0" if self.started else "exit code 1")

    def leave(self, code: int, reason: str) -> None:
        self.job.note(f"rank {self.rank} leaves with {code}: {reason}")
        self.gave_up = "no controller answered" in reason or "without a controller" in reason
        self.boundary.leaves(code)
        self.job.process_gone(self, f"exit code {code}")

    def save_stacks(self, reason: str) -> None:
        """A simulated rank has none."""

    def log(self, level: int, text: str) -> None:
        """What the handler logs as an error is one of the protocol: no simulated fault is a reason for it."""
        if level >= logging.ERROR:
            self.job.refused(text, sys.exception() or AssertionError(text))

    def disconnected(self, stream: Stream) -> None:
        """The processor learns that a stream broke."""
        assert isinstance(stream, RankStream)
        self.put(Closed(stream, "stream broke"))

    def registration(self) -> Registration:
        groups = tuple(ShardGroup(g, f"shard {g}", GROUP_BYTES) for g in self.job.training.groups_of(self.rank))
        world_size, host = self.job.training.layout.world_size, f"host{self.node}"
        return Registration(
            self.rank, world_size, host, self.pid, groups, self.gate.state_step, self.job.roots, "{}",
            "" if self.began_in else self.job.standbys.first_of(self.rank), regroups=not (self.job.times.publish_first and self.job.comparing.acts), repairs=self.job.comparing.repairs,
        )  # fmt: skip

    @property
    def runs(self) -> bool:
        """What its agent sees: the process is there and is not stopped."""
        return self.alive and (self.held_for_good or not self.stopped)

    @property
    def attached(self) -> Stream | None:
        """The stream on which it has registered, None while there is none."""
        return self.stream if self.state.link is LinkState.UP else None

    def _start_failed(self) -> None:
        if not self.started:
            self.job.process_gone(self, "exit code 1")

    def take_in(self, stream: Stream, message: Downward) -> None:
        """The network brings a message: it is read as soon as the processor's threads run."""
        if isinstance(stream, RankStream):  # else another process in this one's place has it
            self.put(stream.beat if type(message) is messages.KeepAlive else stream.incoming(message))

    # --- the gate ---

    def freed(self) -> None:
        """An update or a roll forward has ended, and has given the gate's lock back."""
        if self._gave_up_waiting:
            self._gave_up_waiting, self.closed_late_s = False, self.job.now
        self.waits.gates_lock.freed()
        self.pass_on()

    def report(self) -> StateReport:
        """Return what is so at this moment, whatever the gate would report."""
        gate = self.gate
        return StateReport(
            self.rank, gate.freeze_id, not self.waits.gates_lock.owner, gate.phase, gate.step, gate.state_step, gate.torn,
            gate.backup_step, gate.records, gate.final,
        )  # fmt: skip

    # --- the training thread ---

    def compute_again(self) -> None:
        self.in_turn(partial(self.pass_gate, self.gate.await_open, self._enter_training))()

    def _enter_training(self) -> None:
        self.job.in_place.enters(self)
        self.job.in_place.knows_checkpoint(self, self.gate.state_step)
        self._compute()

    def _compute(self) -> None:
        """Forward and backward of the next step."""
        step = self.gate.state_step + 1
        if step in self.pauses:
            self._paused = True
            self.handler.steps.pause(self.clock())
            self.soon(self.pauses.pop(step), self._end_pause)
            return
        if step > self.job.training.steps:
            self.end_training()
            return
        self.pass_gate(partial(self.gate.computing, step), partial(self._computing, step))

    def end_training(self) -> None:
        """Training returns; no gate is in the way."""
        self.returned = True
        self.put(ev.TrainReturned())

    def _computing(self, step: int) -> None:
        self.replica.compute(step)
        self.job.happened(f"COMPUTE {step}", self.rank)
        seconds = self.job.rng.uniform(0.005, 0.04)
        if step in self.slow_compute:
            seconds = self.slow_compute[step]
            self.stuck = seconds == inf
            self.job.struck("hang in compute" if self.stuck else "slow rank", self.rank)
        if seconds < inf:
            self.soon(seconds, partial(self._come_to_ready, step))

    def _end_pause(self) -> None:
        self._paused = False
        self.handler.steps.resume(self.clock())
        if not self.main_raised:
            self._compute()

    def _come_to_ready(self, step: int) -> None:
        if not self.main_raised:
            self.pass_gate(partial(self._say_ready, step), partial(self._ready, step))

    def _say_ready(self, step: int) -> None:
        if not self.main_raised:  # while it waited
            self.gate.ready(step)

    def _ready(self, step: int) -> None:
        if self.main_raised:
            return
        self.replica.reduced(step)
        self.job.happened(f"READY {step}", self.rank)
        members, self.gate.waiting = self.job.training.collectives(self.rank), True
        self.boundary.contribute(members, step)
        update = partial(self.pass_gate, partial(self._begin_update, step), partial(self._update, step))
        go_on = self.in_turn(self.rehearsal.instead_of(step, update))
        if step in self.late_results:
            go_on = partial(self.job.scheduler.after, self.late_results[step], go_on)
        returned = partial(self._returned, self.turn, step, go_on)
        self.enter(self.rehearsal.collective(step), step, members, go_on, returned)

    def _returned(self, turn: int, step: int, go_on: Callable[[], None], numbers: Sequence[float]) -> None:
        """The spanning collective was aborted and returned all the same: the shipped check says whether it counts."""
        if turn != self.turn:
            return
        try:
            Contribution(ATTEMPT, step).check(numbers, len(self.job.training.collectives(self.rank)))
        except (AbortedCollective, ProtocolError):
            self.in_turn(self._peer_failed)()
        else:
            go_on()

    def _begin_update(self, step: int) -> None:
        if not self.main_raised:
            self.gate.begin_update(step, self.job.training.record(step), self.replica.copy_step)

    def _update(self, step: int) -> None:
        if self.main_raised:
            return
        self.gate.waiting = False
        self.job.update_begins(self, step)
        self.replica.begin(self.job.training.record(step))
        self.job.happened(f"UPDATING {step}", self.rank)
        if self.hang_update_at and step >= self.hang_update_at:
            self.stuck = True
            self.job.struck("hang in update", self.rank)
            return
        seconds = self.slow_update.get(step, self.job.rng.uniform(0.001, 0.02))
        self.updating = True
        self.soon(seconds, partial(self._gather, step))

    def _gather(self, step: int) -> None:
        self.updating = False
        if self.gate.torn:
            return
        self.count_work()
        self.replica.end()
        self.gate.end_update(step)
        self.freed()
        self.job.happened(f"DONE {step}", self.rank)
        self.gate.waiting = True
        self.enter("gather", step, self.job.everybody, self.in_turn(self._after_gather))

    def _after_gather(self) -> None:
        step = self.gate.state_step
        if self.main_raised:
            return
        self.gate.waiting = False
        self.job.comparing.compare(self, step, partial(self._end_step, step))

    def _end_step(self, step: int) -> None:
        if (ending := self.boundary.ending(step)) is Ending.GO_ON:
            self._compute()
        else:
            self.boundary.stop(step, ending, self._compute)

    def enter(
        self,
        name: str,
        step: int,
        members: tuple[int, ...],
        go_on: Callable[[], None],
        returned: Returned | None = None,
    ) -> None:
        """Enter a collective of its groups."""
        fail, enter = self.in_turn(self._peer_failed), self.job.collectives.enter
        enter(name, step, members, self.rank, go_on, fail, returned, self.generation)

    def _peer_failed(self) -> None:
        self.fault(CauseKind.PEER_ERROR, "connection closed by peer")

    def notice(self) -> None:
        """SIGTERM: the training thread takes it along to the next spanning collective."""
        self.gate.notice = True
        self.put(ev.Noticed("SIGTERM"))

    def lose_launcher(self) -> None:
        self._lost_launcher = "the launcher is gone"

    def fault(self, kind: CauseKind, text: str) -> None:
        """The training thread raises; in the middle of an update that tears the state."""
        if self.main_raised or not self.alive:
            return
        if kind in (CauseKind.EXCEPTION, CauseKind.PEER_ERROR, CauseKind.DIVERGED):
            if self.regrouping.raised(text):
                return
            self.main_raised = True
            self.updating = False
            self.waits.gates_lock.asking = TRAINING
            self.gate.abandon()
            self.waits.gates_lock.asking = ""
            self.freed()
        self.put(ev.LocalFault(Cause(kind, (self.rank,), text), ""))

    @property
    def phase(self) -> Phase:
        return self.gate.phase
