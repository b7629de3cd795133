"""One rank of the exhaustive model: the shipped processor machine between a gate, a training thread and a work thread.

Owns what a rank can do by itself, as pure functions from a node to its next nodes. Never looks at another rank: what a
rank must know of the others (has everybody entered the collective?) the caller has checked before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from tests.model.disk import Disk, DiskError, Piece
from tests.simulation.training import Training
from ttp.processor import events as ev
from ttp.processor import machine
from ttp.processor.transitions import give_up_at
from ttp.processor.state import Link, ProcessorState, Standing
from ttp.proto.messages import (
    Cause,
    CauseKind,
    FileEntry,
    Heartbeat,
    Phase,
    PublishOrder,
    Registration,
    ShardGroup,
    ShareResult,
    StateReport,
    Thaw,
    Upward,
    Welcome,
    WriteOrder,
)

SETTINGS_S = {"heartbeat_s": 1.0, "reconnect_s": 0.0, "controller_lost_s": 15.0}
ROOTS = ("/a", "/b")
GROUP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Settle:
    """Work thread: report once the update in progress has ended."""

    freeze_id: int


@dataclass(frozen=True, slots=True)
class Reopen:
    """Work thread: open the gate. Dropped when the gate is shut again before (its ticket is old then)."""


Task = Settle | Reopen | ev.ApplyUpdate | ev.WriteShare | ev.PublishCheckpoint


@dataclass(frozen=True, slots=True)
class Node:
    """A rank. `main` is its training thread: waiting (for the welcome), training, raised or returned."""

    rank: int
    machine: ProcessorState | None
    """None: the process has ended."""
    main: str = "waiting"
    phase: Phase = Phase.COMPUTE
    step: int = 1
    state_step: int = 0
    gathered: int = 0
    """The last step whose gather this rank entered."""
    records: tuple[int, ...] = ()
    """Steps of the commit records it has; newest last."""
    barred: bool = False
    final: bool = False
    torn: bool = False
    tainted: bool = False
    """Its state is not what a fault-free run has at `state_step`."""
    tasks: tuple[Task, ...] = ()
    moment: int = 0
    """How far the work thread is in tasks[0]."""
    news: tuple[ev.Event, ...] = ()
    """Events in the driver's queue: the gate's, the work thread's and the training thread's."""
    acknowledged: int = -1
    thawed: int = -1
    ended: str = ""
    """killed, left (on the controller's word, or finished), gave up."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What came of one action. `up`: what the driver sent; `broken`: a violated invariant."""

    node: Node
    up: tuple[Upward, ...] = ()
    disk: Disk | None = None
    broken: str = ""


def start(training: Training, rank: int) -> Node:
    """A process that has just begun; its first Tick looks for a controller."""
    return Node(rank, canonical(machine.initial(ev.ProcessorSettings(rank, **SETTINGS_S), 0.0)))


def canonical(state: ProcessorState, passed_s: float = 0.0) -> ProcessorState:
    """Return the state with times counted from now; `passed_s` is how far now has moved.

    When the next heartbeat or the next attempt to connect is due is left out: the former are dropped, the latter comes at
    any time.
    """
    return replace(
        state,
        reconnect_at=0.0,
        lost_since=state.lost_since - passed_s,
        answer_by=state.answer_by - passed_s,
        heartbeat_at=inf if state.heartbeat_at == inf else 0.0,
    )


def registration(training: Training, node: Node) -> Registration:
    groups = tuple(ShardGroup(group, f"shard {group}", GROUP_BYTES) for group in training.groups_of(node.rank))
    layout = training.layout
    host = f"host{layout.hosts[node.rank]}"
    return Registration(node.rank, layout.world_size, host, 100 + node.rank, groups, node.state_step, ROOTS, "{}")


# --- the driver ---


def step(node: Node, event: ev.Event, training: Training) -> Moved:
    """Give the machine one event, at time 0, and carry its effects out."""
    assert node.machine is not None
    state, effects = machine.transition(node.machine, event, 0.0)
    node = replace(node, machine=canonical(state))
    up: list[Upward] = []
    for effect in effects:
        if node.machine is None:
            break
        match effect:
            case ev.Send(message):
                if not isinstance(message, Heartbeat):
                    up.append(message)
            case ev.CloseGate(freeze_id):
                node = _close_gate(node, freeze_id, training)
            case ev.OpenGate():
                node = replace(node, tasks=(*node.tasks, Reopen()))
            case ev.ApplyUpdate() | ev.WriteShare() | ev.PublishCheckpoint():
                node = replace(node, tasks=(*node.tasks, effect))
            case ev.ExitProcess(code, _):
                node = end(node, "left" if code == 75 else "gave up")
            case ev.Release():
                node = end(node, "left")
            case ev.Connect() | ev.Log():
                pass
    return Moved(node, tuple(up))


def end(node: Node, how: str) -> Node:
    """The process is gone; what others must still know of it stays: collectives entered, records that it had."""
    return Node(
        node.rank, None, "gone", node.phase, node.step, node.state_step, node.gathered, node.records[-1:], ended=how,
        torn=node.torn,
    )  # fmt: skip


def receive(node: Node, message: object, training: Training) -> Moved:
    """A message of the controller arrives."""
    if isinstance(message, Thaw):
        node = replace(node, thawed=max(node.thawed, message.freeze_id))
    if isinstance(message, Welcome) and node.main == "waiting":
        node = replace(node, main="training")
    return step(node, ev.Received(message), training)  # type: ignore[arg-type]


def think(node: Node, training: Training) -> Moved:
    """The driver takes the first event of its own queue."""
    return step(replace(node, news=node.news[1:]), node.news[0], training)


def connect(node: Node, training: Training) -> Moved:
    """The driver's Tick asks for a stream, and gets one."""
    node = step(node, ev.Tick(node.phase, node.step), training).node
    return step(node, ev.Connected(registration(training, node)), training)


def lose_stream(node: Node, training: Training) -> Moved:
    return step(node, ev.Disconnected("stream broke"), training)


# --- the gate ---


def busy(node: Node) -> bool:
    """An update or a roll-forward holds the gate's lock."""
    return node.phase is Phase.UPDATING and not node.torn


def _close_gate(node: Node, freeze_id: int, training: Training) -> Node:
    running, waiting = node.tasks[: bool(node.moment)], node.tasks[bool(node.moment) :]
    tasks = (*running, *(task for task in waiting if not isinstance(task, Reopen)))
    node = replace(node, barred=True, tasks=tasks)
    if busy(node):
        return replace(node, tasks=(*node.tasks, Settle(freeze_id)))
    return _report(node, freeze_id, training)


def _report(node: Node, freeze_id: int, training: Training) -> Node:
    closed = node.barred
    report = StateReport(
        rank=node.rank,
        freeze_id=freeze_id,
        closed=closed,
        phase=node.phase if closed else Phase.UPDATING,
        step=node.step if closed else node.state_step,
        state_step=node.state_step,
        torn=node.torn,
        backup_step=-1,
        records=tuple(training.record(done) for done in node.records),
    )
    acknowledged = max(node.acknowledged, freeze_id) if closed else node.acknowledged
    return replace(node, acknowledged=acknowledged, news=(*node.news, ev.GateClosed(report)))


# --- the training thread ---


def go_on(node: Node, training: Training) -> Moved:
    """The training thread's next move. The caller has checked that nothing holds it up: see `wants`."""
    match node.phase:
        case Phase.COMPUTE:
            return Moved(replace(node, phase=Phase.READY))
        case Phase.READY:
            broken = ""
            if node.acknowledged > node.thawed:
                broken = f"I7: rank {node.rank} began update {node.step} after acknowledging freeze {node.acknowledged}"
            records = (*node.records, node.step)[-2:]
            return Moved(replace(node, phase=Phase.UPDATING, records=records), broken=broken)
        case Phase.UPDATING:
            return Moved(replace(node, phase=Phase.DONE, state_step=node.step, gathered=node.step))
    if node.step == training.steps:
        return Moved(replace(node, main="returned", news=(*node.news, ev.TrainReturned())))
    return Moved(replace(node, phase=Phase.COMPUTE, step=node.step + 1))


def wants(node: Node) -> str:
    """What the training thread's next move needs: welcome, nothing, gate, norm or gather (with the gate), or never."""
    if node.main == "waiting":
        return "welcome"
    if node.main != "training" or node.torn or (node.final and node.phase is not Phase.UPDATING):
        return "never"
    if node.phase is Phase.UPDATING:
        return "never" if node.final else "nothing"
    return {Phase.COMPUTE: "gate", Phase.READY: "norm", Phase.DONE: "gather"}[node.phase]


def raise_out(node: Node, kind: CauseKind) -> Moved:
    """The training thread raises; in the middle of an update that tears the state."""
    text = "connection closed by peer" if kind is CauseKind.PEER_ERROR else "ValueError: bad batch"
    news = (*node.news, ev.LocalFault(Cause(kind, (node.rank,), text), ""))
    return Moved(replace(node, main="raised", torn=node.torn or (busy(node) and not node.final), news=news))


# --- the work thread ---


def can_work(node: Node) -> bool:
    """The work thread has something to do that nothing holds up."""
    if not node.tasks:
        return False
    return not (isinstance(node.tasks[0], Settle) and busy(node))


def touches_disk(node: Node) -> str:
    """What the next move of the work thread does to the disk: nothing, write, publish."""
    if not node.tasks:
        return "nothing"
    match node.tasks[0]:
        case ev.WriteShare():
            return "write" if node.moment else "nothing"
        case ev.PublishCheckpoint():
            return "publish"
    return "nothing"


def work(node: Node, disk: Disk, training: Training, fails: bool) -> Moved:
    """One moment of the work thread. `fails`: the disk refuses what it does now."""
    task = node.tasks[0]
    match task:
        case Settle(freeze_id):
            return Moved(_report(replace(node, tasks=node.tasks[1:]), freeze_id, training))
        case Reopen():
            return Moved(replace(node, tasks=node.tasks[1:], barred=node.barred and node.final))
        case ev.ApplyUpdate(freeze_id, record):
            return Moved(_roll(node, freeze_id, record.step))
        case ev.WriteShare(order):
            return _write(node, order, disk, fails)
        case ev.PublishCheckpoint(order):
            return _publish(node, order, disk, fails)


def _done(node: Node, answer: ev.Event) -> Node:
    return replace(node, tasks=node.tasks[1:], moment=0, news=(*node.news, answer))


def _roll(node: Node, freeze_id: int, wanted: int) -> Node:
    if node.moment:
        done = replace(node, state_step=wanted, phase=Phase.DONE)
        return _done(done, ev.RollForwardDone(freeze_id, wanted))
    if node.barred and not busy(node) and not node.torn and node.state_step == wanted:
        return _done(node, ev.RollForwardDone(freeze_id, wanted))
    if not may_roll(node, wanted):
        return _done(node, ev.WorkFailed(freeze_id, "roll_forward", "", f"not READY({wanted})"))
    tainted = node.tainted or node.phase is not Phase.READY or node.step != wanted
    return replace(
        node, moment=1, final=True, phase=Phase.UPDATING, records=(*node.records, wanted)[-2:], tainted=tainted
    )


def may_roll(node: Node, wanted: int) -> bool:
    """The gate's own condition for a roll-forward."""
    ready = node.phase is Phase.READY and node.step == wanted and node.state_step == wanted - 1
    return node.barred and not node.torn and ready


def _write(node: Node, order: WriteOrder, disk: Disk, fails: bool) -> Moved:
    if not node.moment:
        if not node.barred or busy(node) or node.torn or node.state_step != order.step:
            error = f"not closed at step {order.step}"
            return Moved(_done(node, ev.WorkFailed(order.freeze_id, "write", order.tmp_name, error)))
        return Moved(replace(node, moment=1 + order.step))
    broken = "" if node.moment == 1 + node.state_step and not busy(node) else (
        f"I5: rank {node.rank}'s state changed while it was written"
    )  # fmt: skip
    pieces = tuple(Piece(part.group_id, part.index, part.count, node.state_step, node.tainted) for part in order.parts)
    name = f"r{node.rank}_" + "_".join(f"{part.group_id}.{part.index}of{part.count}" for part in order.parts)
    try:
        if fails:
            raise DiskError("no space left on device")
        disk = disk.write(order.directory, order.tmp_name, name, pieces)
    except DiskError as error:
        failed = _done(node, ev.WorkFailed(order.freeze_id, "write", order.tmp_name, str(error)))
        return Moved(failed, broken=broken)
    entry = FileEntry(name, 10 * len(pieces), "0", node.rank)
    return Moved(_done(node, ev.WriteDone(order, ShareResult((entry,)))), disk=disk, broken=broken)


def _publish(node: Node, order: PublishOrder, disk: Disk, fails: bool) -> Moved:
    """Manifest, rename, tracker: each a moment of its own."""
    try:
        if fails:
            raise DiskError("no space left on device")
        match node.moment:
            case 0:
                files = tuple(file.name for result in order.results for file in result.files)
                disk = disk.put_manifest(order.directory, order.tmp_name, order.step, files)
            case 1:
                disk = disk.rename(order.directory, order.tmp_name, order.step)
            case _:
                disk = disk.track(order.directory, order.step)
                path = f"{order.directory}/iter_{order.step:07d}"
                return Moved(_done(node, ev.PublishDone(order, path)), disk=disk)
    except DiskError as error:
        return Moved(_done(node, ev.WorkFailed(order.freeze_id, "publish", order.tmp_name, str(error))))
    return Moved(replace(node, moment=node.moment + 1), disk=disk)


def is_connected(node: Node) -> bool:
    return node.machine is not None and node.machine.link is Link.UP


def is_down(node: Node) -> bool:
    """Its next Tick asks for a stream."""
    return node.machine is not None and node.machine.link is Link.DOWN and node.machine.standing is not Standing.LEAVING




def wait(node: Node, seconds: float, training: Training) -> Moved:
    """Time passes; a deadline that is reached has its consequences."""
    assert node.machine is not None
    state, tick = canonical(node.machine, seconds), ev.Tick(node.phase, node.step)
    node = replace(node, machine=state)
    if give_up_at(state) > 0:
        return Moved(node)
    if node.main == "waiting":
        return Moved(end(node, "gave up"))  # its start does not wait for ever for the others
    moved = step(node, tick, training)
    if moved.node.machine is None or moved.node.machine.link is not Link.CONNECTING:
        return moved
    return lose_stream(moved.node, training)  # it looked for a controller and found none
