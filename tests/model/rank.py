"""One rank of the model: the shipped processor machine, and around it a gate, a training thread and a work thread as values.

A transition takes a rank and returns the next one with what it lets out: messages, a connection, a piece of disk work,
the end of the process. Everything is a function of its arguments, so that the search can remember it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from tests.model.clock import ago, later_processor
from tests.model.gate import Gate
from tests.model.shape import Shape
from ttp.processor.core import events as ev
from ttp.processor.core import machine
from ttp.processor.core.state import LinkState, ProcessorState
from ttp.proto.frozen import replace
from ttp.proto.messages import (
    Cause,
    CauseKind,
    CommitRecord,
    Downward,
    FileEntry,
    Heartbeat,
    Phase,
    Progress,
    PublishOrder,
    Registration,
    Regroup,
    ShareResult,
    Welcome,
    WriteOrder,
)

Out = tuple[str, object]
"""("up", (controller, message)), ("beat", the same), ("connect", controller), ("gone", (controller, exit text))."""


@dataclass(frozen=True, slots=True)
class Rank:
    """`main`: where the training thread is: start, compute, norm (in the spanning collective), update, gather, done (train
    has returned), raised; and of one that regroups: vacant (in a process that waits to be filled), groups (they are being made),
    filled, again (in front of its training). `link`: the controller that its stream goes to, -1: none."""

    number: int
    proc: ProcessorState
    gate: Gate = field(default_factory=Gate)
    main: str = "start"
    link: int = -1
    tasks: tuple[ev.Effect, ...] = ()
    """Of the work thread, the first one is being done."""
    stage: str = ""
    """How far the first task is: empty before it began."""
    files: int = 0
    fence: int = 0
    """The highest term of a controller that was reached."""
    close_by: float = inf
    """When a gate that is not closed yet is reported as such."""
    acknowledged: int = -1
    came: tuple[int, int] = (0, 0)
    """The last spanning collective and the last gathering of parameters that it came to, by step."""
    ended: str = ""
    """How the process ended; empty: it lives."""
    stopped: bool = False
    unsound: bool = False
    """It was stopped, hung or raised in its update: its copy may not have been there when it was needed."""
    hung: bool = False
    """Its update ends late, or never."""
    late: int = -1
    """The freeze for which its gate was reported as not closed, while the update goes on."""
    broken: str = ""
    """A violated invariant."""
    pid: int = 0
    """Counts the processes in this rank's place."""
    began_in: int = 0
    """The freeze in which this one was started in another's place."""
    generation: int = 0
    """The freeze under which its groups were made; 0: at the start."""
    left: tuple[int, int] = (0, 0)
    """What it, or the process before it, had come to in its earlier groups."""
    regroup: Regroup | None = None
    """What the training thread has been ordered, until it is done."""
    met: int = 0
    """In its generation: 1: it has come to where the groups are made, 2: to where all have been filled."""
    stuck: bool = False
    """Its training thread comes out of nothing any more. Its state stands still."""
    spared: bool = False
    """An agent ended a sound process in this one's place: until all gates have opened, what it held counts as there."""

    @property
    def alive(self) -> bool:
        return not self.ended

    @property
    def running(self) -> bool:
        return not self.ended and not self.stopped

    @property
    def working_on_disk(self) -> bool:
        return bool(self.tasks) and isinstance(self.tasks[0], ev.WriteShare | ev.PublishCheckpoint)


def host_of(rank: int) -> str:
    return f"host{rank}"


def first(shape: Shape, number: int, address: str = "c0", vacant: int = 0) -> Rank:
    """Return a rank that has not looked for a controller yet."""
    settings = ev.ProcessorSettings(
        number, shape.reconnect_s, shape.reconnect_s, shape.controller_lost_s, 0.25, address, vacant=vacant
    )
    return Rank(number, machine.initial(settings, 0.0))


def _remains(shape: Shape, rank: Rank, text: str) -> Rank:
    """Return what remains to know of a rank whose process has ended. One that leaves on order takes its coming to a meeting with it."""
    if text.startswith("exit code"):
        has_to_leave = rank.regroup is not None and rank.generation != rank.regroup.freeze_id
        rank = replace(leave(shape, rank)[0] if has_to_leave else rank, met=0)
    known = replace(first(shape, rank.number), came=rank.came, ended=text, broken=rank.broken)
    gate = Gate(state=rank.gate.state) if text == "exit code 0" or rank.met == 2 else Gate()
    return replace(
        known, gate=gate, unsound=rank.unsound, pid=rank.pid, began_in=rank.began_in, generation=rank.generation, left=rank.left,
        met=rank.met, spared=rank.spared,
    )  # fmt: skip


class Turn:
    """One transition of one rank under way."""

    def __init__(self, shape: Shape, rank: Rank) -> None:
        self.shape, self.rank = shape, rank
        self.out: list[Out] = []

    def ended(self) -> tuple[Rank, tuple[Out, ...]]:
        """Call the machine as long as it is due, and return the rank in its form at rest."""
        for _ in range(16):
            deadline = machine.next_deadline(self.rank.proc)
            if not self.rank.running or deadline is None or deadline > 0:
                break
            self.take(ev.Tick(self.rank.gate.phase, self.rank.gate.step))
        if self.rank.alive:
            self.rank = replace(self.rank, proc=later_processor(self.rank.proc, 0.0))
        return self.rank, tuple(self.out)

    def take(self, event: ev.Event) -> None:
        """Let the shipped machine take one event, and carry out what it says."""
        if not self.rank.alive:
            return
        proc, effects = machine.transition(self.rank.proc, event, 0.0)
        self.rank = replace(self.rank, proc=proc)
        for effect in effects:
            if self.rank.alive:
                self._carry_out(effect)

    def _carry_out(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Send(message):
                if self.rank.link >= 0 and not isinstance(message, Progress):
                    self.out.append(("beat" if isinstance(message, Heartbeat) else "up", (self.rank.link, message)))
            case ev.Connect(address):  # it takes the place of one that was not answered
                self.out = [out for out in self.out if out[0] != "connect"]
                self.out.append(("connect", int(address.removeprefix("c"))))
            case ev.CloseGate(freeze_id):
                self._close_gate(freeze_id)
            case ev.OpenGate() | ev.ApplyUpdate() | ev.WriteShare() | ev.PublishCheckpoint():
                self.rank = replace(self.rank, tasks=(*self.rank.tasks, effect))
                self.start_tasks()
            case ev.RegroupTraining(order):
                self.rank = replace(self.rank, regroup=order)
            case ev.ExitProcess(code, _):
                self.leave(f"exit code {code}")
            case ev.ReleaseTraining():
                self.leave("exit code 0" if self.rank.main != "start" else "exit code 1")
            case ev.Log() | ev.SaveStacks():
                pass

    def leave(self, text: str) -> None:
        self.out.append(("gone", (self.rank.link, text)))
        self.rank = _remains(self.shape, self.rank, text)

    # --- the gate ---

    def _close_gate(self, freeze_id: int) -> None:
        rank = self.rank = replace(self.rank, gate=self.rank.gate.bar(freeze_id))
        if not rank.gate.busy:
            self.report(freeze_id)
        else:
            close_by = min(rank.close_by, self.shape.update_timeout_s)
            self.rank = replace(rank, tasks=(*rank.tasks, ev.CloseGate(freeze_id)), close_by=close_by)

    def report(self, freeze_id: int) -> None:
        report = self.rank.gate.report(self.rank.number, freeze_id)
        if report.closed:
            self.rank = replace(self.rank, acknowledged=freeze_id)
        self.take(ev.GateClosed(report))

    def freed(self) -> None:
        """An update has ended, or its time is over: whoever waits to close the gate reports."""
        waiting = [task for task in self.rank.tasks if isinstance(task, ev.CloseGate)]
        rest = tuple(task for task in self.rank.tasks if not isinstance(task, ev.CloseGate))
        late, gate = self.rank.late, self.rank.gate
        self.rank = replace(self.rank, tasks=rest, close_by=inf, late=-1)
        for task in waiting:
            if gate.busy:
                self.rank = replace(self.rank, late=task.freeze_id)
            self.report(task.freeze_id)
        if late == gate.freeze_id and gate.barred and not gate.busy:
            self.report(late)
        self.start_tasks()

    # --- the work thread: what needs no disk is begun, or done, at once ---

    def start_tasks(self) -> None:
        while self.rank.alive and self.rank.tasks and not self.rank.stage:
            match self.rank.tasks[0]:
                case ev.OpenGate(freeze_id):
                    self._next()
                    self.rank = replace(self.rank, gate=self.rank.gate.thaw(freeze_id))
                case ev.ApplyUpdate(freeze_id, record):
                    self._roll(freeze_id, record)
                case ev.WriteShare(order) | ev.PublishCheckpoint(order) if order.freeze_id < self.rank.gate.freeze_id:
                    self._next()
                    stage = "write" if isinstance(order, WriteOrder) else "publish"
                    self.take(ev.WorkFailed(order.freeze_id, stage, order.tmp_name, "taken back"))
                case _:
                    return

    def _next(self) -> None:
        self.rank = replace(self.rank, tasks=self.rank.tasks[1:], stage="")

    def _roll(self, freeze_id: int, record: CommitRecord) -> None:
        if not self.rank.gate.can_roll(record):
            self._next()
            self.take(ev.WorkFailed(freeze_id, "roll_forward", "", f"not READY({record.step})"))
            return
        gate = replace(self.rank.gate, final=True).begin(record, "roll")
        self.rank = replace(self.rank, gate=gate, stage="rolling")

    def end_roll(self) -> None:
        task = self.rank.tasks[0]
        assert isinstance(task, ev.ApplyUpdate)
        self._next()
        self.rank = replace(self.rank, gate=self.rank.gate.end())
        self.take(ev.RollForwardDone(task.freeze_id, task.record.step))
        self.freed()

    def answer(self, event: ev.Event) -> None:
        """A piece of disk work is over."""
        self._next()
        self.take(event)
        self.start_tasks()


# --- transitions: every one takes (shape, rank, ...) and returns the rank at rest and what it lets out ---

Transition = Callable[..., tuple[Rank, tuple[Out, ...]]]


def later(shape: Shape, rank: Rank, seconds: float) -> tuple[Rank, tuple[Out, ...]]:
    """Time has passed; nothing is done about it yet."""
    proc, close_by = later_processor(rank.proc, seconds), ago(rank.close_by, seconds)
    return replace(rank, proc=proc, close_by=close_by), ()


def due_in(rank: Rank) -> float:
    """Return the seconds until this rank has to do something; inf: never."""
    deadline = machine.next_deadline(rank.proc)
    return min(inf if deadline is None else deadline, rank.close_by)


def tick(shape: Shape, rank: Rank) -> tuple[Rank, tuple[Out, ...]]:
    turn = Turn(shape, rank)
    if rank.close_by <= 0:
        turn.freed()
    return turn.ended()


def receive(shape: Shape, rank: Rank, message: Downward) -> tuple[Rank, tuple[Out, ...]]:
    turn = Turn(shape, rank)
    if rank.main == "start" and isinstance(message, Welcome):
        turn.rank = replace(rank, main="compute")
    turn.take(ev.Received(message))
    return turn.ended()


def connected(shape: Shape, rank: Rank, place: int, standby: str) -> tuple[Rank, tuple[Out, ...]]:
    """The stream to a controller is open."""
    turn = Turn(shape, replace(rank, link=place))
    if place + 1 < rank.fence:
        return refused(shape, rank, "it is fenced")
    turn.rank = replace(turn.rank, fence=place + 1)
    groups = shape.groups_of(rank.number)
    registration = Registration(
        rank.number, shape.world_size, host_of(rank.number), pid_of(rank), groups, rank.gate.state[0], shape.roots,
        "{}", "" if rank.pid else standby, regroups=shape.in_place_s > 0,
    )  # fmt: skip
    turn.take(ev.Connected(registration))
    return turn.ended()


def refused(shape: Shape, rank: Rank, why: str) -> tuple[Rank, tuple[Out, ...]]:
    turn = Turn(shape, replace(rank, link=-1))
    turn.take(ev.Disconnected(why, refused=True))
    return turn.ended()


def waits_at(shape: Shape, rank: Rank, place: int) -> tuple[Rank, tuple[Out, ...]]:
    """It has asked a controller for a stream that does not answer yet."""
    return replace(rank, link=place), ()


def let_go(shape: Shape, rank: Rank) -> tuple[Rank, tuple[Out, ...]]:
    return replace(rank, link=-1), ()


def found_broken(shape: Shape, rank: Rank, what: str) -> tuple[Rank, tuple[Out, ...]]:
    """Note a violated invariant."""
    return replace(rank, broken=rank.broken or what), ()


def stream_broke(shape: Shape, rank: Rank) -> tuple[Rank, tuple[Out, ...]]:
    turn = Turn(shape, replace(rank, link=-1))
    if rank.proc.link is not LinkState.DOWN:
        turn.take(ev.Disconnected("stream broke"))
    return turn.ended()


# the training thread


def ready(shape: Shape, rank: Rank) -> tuple[Rank, tuple[Out, ...]]:
    """Forward, backward and reduction are done: on into the spanning collective, if the gate is open."""
    gate = replace(rank.gate, phase=Phase.READY, gradients_of=rank.gate.step)
    return replace(rank, gate=gate, main="norm", came=(rank.gate.step, rank.came[1])), ()


def begin_update(shape: Shape, rank: Rank, thawed_up_to: int) -> tuple[Rank, tuple[Out, ...]]:
    broken = rank.broken
    if rank.acknowledged > thawed_up_to:
        broken = f"I7: rank {rank.number} began update {rank.gate.step} after acknowledging freeze {rank.acknowledged}"
    gate = rank.gate.begin(shape.record(rank.gate.step), "update")
    return replace(rank, gate=gate, main="update", broken=broken), ()


def end_update(shape: Shape, rank: Rank) -> tuple[Rank, tuple[Out, ...]]:
    came = (rank.came[0], rank.gate.step)
    turn = Turn(shape, replace(rank, gate=rank.gate.end(), main="gather", came=came, hung=False))
    turn.freed()
    return turn.ended()


def gathered(shape: Shape, rank: Rank) -> tuple[Rank, tuple[Out, ...]]:
    """The parameters are there: the next step, or the end of training."""
    step = rank.gate.state[0] + 1
    if step <= shape.steps:
        gate = replace(rank.gate, phase=Phase.COMPUTE, step=step, gradients_of=0)
        return replace(rank, gate=gate, main="compute"), ()
    turn = Turn(shape, replace(rank, main="done"))
    turn.take(ev.TrainReturned())
    return turn.ended()


def raised(shape: Shape, rank: Rank, kind: CauseKind) -> tuple[Rank, tuple[Out, ...]]:
    """The training thread raises; in the middle of its update that tears the state."""
    turn = Turn(shape, replace(rank, main="raised", hung=False))
    if rank.gate.busy == "update":
        turn.rank = replace(turn.rank, gate=rank.gate.fail(), unsound=True)
        turn.freed()
    turn.take(ev.LocalFault(Cause(kind, (rank.number,), kind.value), ""))
    return turn.ended()


def pid_of(rank: Rank) -> int:
    return 100 + rank.number + 1000 * rank.pid


def leave(shape: Shape, rank: Rank) -> tuple[Rank, tuple[Out, ...]]:
    """The training thread gives up its step and its groups, and comes to where the new ones are made."""
    order = rank.regroup
    assert order is not None
    left = rank.left if rank.main == "vacant" else rank.came
    return replace(rank, main="groups", generation=order.freeze_id, left=left, came=(0, 0), met=1), ()


def end_roll(shape: Shape, rank: Rank) -> tuple[Rank, tuple[Out, ...]]:
    turn = Turn(shape, rank)
    turn.end_roll()
    return turn.ended()


# the work thread's disk work: the world does the disk's side


def order_of(rank: Rank) -> WriteOrder | PublishOrder:
    task = rank.tasks[0]
    assert isinstance(task, ev.WriteShare | ev.PublishCheckpoint)
    return task.order


def file_name(rank: Rank) -> str:
    return f"r{rank.number}_{rank.files}"


def work_begun(shape: Shape, rank: Rank, stage: str) -> tuple[Rank, tuple[Out, ...]]:
    return replace(rank, stage=stage), ()


def write_done(shape: Shape, rank: Rank) -> tuple[Rank, tuple[Out, ...]]:
    order = order_of(rank)
    assert isinstance(order, WriteOrder)
    turn = Turn(shape, replace(rank, files=rank.files + 1))
    entry = FileEntry(file_name(rank), 1, "0", rank.number)
    turn.answer(ev.WriteDone(order, ShareResult((entry,))))
    return turn.ended()


def publish_done(shape: Shape, rank: Rank) -> tuple[Rank, tuple[Out, ...]]:
    order = order_of(rank)
    assert isinstance(order, PublishOrder)
    turn = Turn(shape, rank)
    turn.answer(ev.PublishDone(order, f"{order.directory}/iter_{order.step:07d}"))
    return turn.ended()


def work_failed(shape: Shape, rank: Rank, error: str) -> tuple[Rank, tuple[Out, ...]]:
    order = order_of(rank)
    stage = "write" if isinstance(order, WriteOrder) else "publish"
    turn = Turn(shape, replace(rank, files=rank.files + 1))
    turn.answer(ev.WorkFailed(order.freeze_id, stage, order.tmp_name, error))
    return turn.ended()


def killed(shape: Shape, rank: Rank) -> tuple[Rank, tuple[Out, ...]]:
    return _remains(shape, rank, "signal SIGKILL"), (("gone", (rank.link, "signal SIGKILL")),)


def stopped(shape: Shape, rank: Rank) -> tuple[Rank, tuple[Out, ...]]:
    return replace(rank, stopped=True, unsound=True), ()


def resumed(shape: Shape, rank: Rank) -> tuple[Rank, tuple[Out, ...]]:
    return tick(shape, replace(rank, stopped=False))


def hung(shape: Shape, rank: Rank) -> tuple[Rank, tuple[Out, ...]]:
    return replace(rank, hung=True, unsound=True), ()
