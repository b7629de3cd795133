"""What each event and message means to a processor: one table (PURE).

Owns `TRANSITIONS`, from (standing, kind of event or message) to the function that handles it. A pair that is not in the
table is a protocol error; `late` is for what may cross a change of standing on the wire or in the driver's queue.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

from ttp.errors import ProtocolError
from ttp.proto.messages import (
    Dismiss,
    Exit,
    FaultReport,
    Finished,
    Freeze,
    Heartbeat,
    Published,
    PublishOrder,
    RolledForward,
    RollForward,
    StepFailed,
    Thaw,
    Welcome,
    WriteOrder,
    Written,
)

from .events import (
    ApplyUpdate,
    CloseGate,
    Connect,
    Connected,
    Disconnected,
    Effect,
    ExitProcess,
    GateClosed,
    LocalFault,
    Log,
    OpenGate,
    PublishCheckpoint,
    PublishDone,
    Release,
    RollForwardDone,
    Send,
    Tick,
    TrainReturned,
    WorkFailed,
    WriteDone,
    WriteShare,
)
from .state import Link, Order, ProcessorState, Standing

Handler = Callable[[ProcessorState, Any, float, list[Effect]], ProcessorState]

_OPEN = (Standing.TRAINING,)
_SHUT = (Standing.CLOSING, Standing.FROZEN)
_LIVE = (*_OPEN, *_SHUT)
_GONE = (Standing.LEAVING,)


# --- the stream ---


def connected(state: ProcessorState, event: Connected, now: float, out: list[Effect]) -> ProcessorState:
    """Register, and say again what an earlier stream may have lost."""
    if state.link is Link.UP:
        raise ProtocolError(f"rank {state.settings.rank}: connected twice; the driver must say Disconnected first")
    out.append(Send(event.registration))
    out.extend(Send(fault) for fault in state.faults)
    if state.finished:
        out.append(Send(Finished(state.settings.rank)))
    return replace(state, link=Link.UP, lost_since=inf, loss_logged=False)


def disconnected(state: ProcessorState, event: Disconnected, now: float, out: list[Effect]) -> ProcessorState:
    """Try again after a pause. Training goes on, and the gate stays as it is."""
    if state.link is Link.UP:
        out.append(Log(f"lost the controller: {event.reason}"))
        state = replace(state, lost_since=now)
    return replace(state, link=Link.DOWN, reconnect_at=now + state.settings.reconnect_s, heartbeat_at=inf)


def welcome(state: ProcessorState, message: Welcome, now: float, out: list[Effect]) -> ProcessorState:
    """The job has assembled, or this controller knows this rank already: heartbeats begin.

    A new term's freezes are counted from 1 again: what an older controller froze, any thaw of this one may open.
    """
    if state.term != message.term:
        out.append(Log(f"controller of term {message.term}; the job survives {message.survives}"))
        state = replace(state, term=message.term, freeze_id=0, orders=())
    return replace(state, heartbeat_at=now, heartbeat_s=message.heartbeat_s)


def tick(state: ProcessorState, event: Tick, now: float, out: list[Effect]) -> ProcessorState:
    """Do what is due: reconnect, beat, or give up."""
    rank = state.settings.rank
    if state.link is Link.DOWN and now >= state.reconnect_at:
        out.append(Connect())
        state = replace(state, link=Link.CONNECTING)
    if now >= state.heartbeat_at:
        out.append(Send(Heartbeat(rank, event.phase, event.step)))
        state = replace(state, heartbeat_at=now + state.heartbeat_s)
    return give_up(state, now, out) if now >= give_up_at(state) else state


def give_up_at(state: ProcessorState) -> float:
    """Return when the missing controller has consequences; inf: never."""
    lost = state.lost_since + state.settings.controller_lost_s
    if state.standing is Standing.LEAVING:
        return inf
    if state.faults or state.standing is not Standing.TRAINING or state.finished or not state.loss_logged:
        return min(lost, state.answer_by)
    return inf


def give_up(state: ProcessorState, now: float, out: list[Effect]) -> ProcessorState:
    """No controller for too long. Only a rank that cannot go on by itself leaves."""
    waited = f"no controller answered for {state.settings.controller_lost_s:g} s"
    if state.faults:
        return _exit(state, 1, f"{waited} after: {state.faults[0].cause.text}", out)
    if state.standing is not Standing.TRAINING:
        return _exit(state, 75, f"{waited} while this rank was frozen", out)
    if state.finished:
        out += [Log(f"{waited}; training has finished, leaving without its word"), Release()]
        return replace(state, standing=Standing.LEAVING)
    out.append(Log(f"{waited}: training goes on without protection"))
    return replace(state, loss_logged=True)


# --- this rank's own news ---


def local_fault(state: ProcessorState, event: LocalFault, now: float, out: list[Effect]) -> ProcessorState:
    report = FaultReport(state.settings.rank, event.cause, event.detail)
    if state.link is Link.UP:
        out.append(Send(report))
    if state.standing is Standing.TRAINING and state.answer_by == inf:
        state = replace(state, answer_by=now + state.settings.controller_lost_s)
    if state.link is not Link.UP:  # a controller that is long gone gets its time from the fault on
        state = replace(state, lost_since=now)
    return replace(state, faults=(*state.faults, report))


def train_returned(state: ProcessorState, event: TrainReturned, now: float, out: list[Effect]) -> ProcessorState:
    if state.finished:
        raise ProtocolError(f"rank {state.settings.rank}: training returned twice")
    if state.link is Link.UP:
        out.append(Send(Finished(state.settings.rank)))
    return replace(state, finished=True)


# --- freeze and thaw ---


def freeze(state: ProcessorState, message: Freeze, now: float, out: list[Effect]) -> ProcessorState:
    """Close the gate, or ask again what stands behind the closed gate: the answer is always fresh."""
    if state.standing is Standing.TRAINING:
        out.append(Log(f"freeze {message.freeze_id}: {message.cause.kind.value}: {message.cause.text}"))
    if state.freeze_id != message.freeze_id:
        state = replace(state, freeze_id=message.freeze_id, orders=())
    out.append(CloseGate(message.freeze_id))
    standing = Standing.FROZEN if state.standing is Standing.FROZEN else Standing.CLOSING
    return replace(state, standing=standing, answer_by=inf)


def gate_closed(state: ProcessorState, event: GateClosed, now: float, out: list[Effect]) -> ProcessorState:
    """Report what this rank holds."""
    report = event.report
    if report.freeze_id != state.freeze_id:
        return state  # asked again meanwhile, under a newer number
    if state.applying is not None:
        return state  # taken before the roll-forward's end: its end asks again
    if report.closed:
        state = replace(state, closed=True, torn=report.torn, state_step=report.state_step)
    if state.link is Link.UP:
        out.append(Send(report))
    return replace(state, standing=Standing.FROZEN)


def thaw(state: ProcessorState, message: Thaw, now: float, out: list[Effect]) -> ProcessorState:
    """A false alarm: open the gate. A thaw also ends every older freeze, whose own thaw was lost."""
    if message.freeze_id < state.freeze_id:
        return state
    if state.rolled:
        out.append(Log(f"thaw {message.freeze_id} ignored: this rank was rolled forward, its gate cannot open again"))
        return state
    out += [OpenGate(state.freeze_id), Log(f"freeze {state.freeze_id} was a false alarm, training goes on")]
    return replace(state, standing=Standing.TRAINING, closed=False, torn=False, orders=())


# --- orders ---


def roll_forward(state: ProcessorState, message: RollForward, now: float, out: list[Effect]) -> ProcessorState:
    """Do one update alone; doing it twice answers the same."""
    if message.freeze_id != state.freeze_id:
        return state
    wanted = message.record.step
    if state.applying is not None and state.applying.step == wanted:
        return state  # the answer will come, under the newest freeze's number
    if state.closed and not state.torn and state.state_step == wanted:
        out.append(Send(RolledForward(state.settings.rank, state.freeze_id, wanted)))
        return state
    if not state.closed or state.torn or state.applying is not None or state.state_step + 1 != wanted:
        error = (
            f"the state is of step {state.state_step}, closed {state.closed}, torn {state.torn}; wanted step {wanted}"
        )
        out.append(Send(StepFailed(state.settings.rank, state.freeze_id, "roll_forward", "", error)))
        return state
    out.append(ApplyUpdate(state.freeze_id, message.record))
    return replace(state, applying=message.record, rolled=True)


def roll_forward_done(state: ProcessorState, event: RollForwardDone, now: float, out: list[Effect]) -> ProcessorState:
    if state.applying is None:
        raise ProtocolError(f"rank {state.settings.rank}: rolled forward to {event.state_step} without an order")
    state = replace(state, applying=None, state_step=event.state_step)
    if event.freeze_id != state.freeze_id:
        out.append(CloseGate(state.freeze_id))  # the report that was held back
        return state
    out.append(Send(RolledForward(state.settings.rank, state.freeze_id, event.state_step)))
    return state


def write(state: ProcessorState, message: WriteOrder, now: float, out: list[Effect]) -> ProcessorState:
    return _take_order(state, message, WriteShare(message), out)


def publish(state: ProcessorState, message: PublishOrder, now: float, out: list[Effect]) -> ProcessorState:
    return _take_order(state, message, PublishCheckpoint(message), out)


def _take_order(
    state: ProcessorState, message: WriteOrder | PublishOrder, effect: Effect, out: list[Effect]
) -> ProcessorState:
    """Begin a new order; answer one that was done already from memory; leave one alone that is being done."""
    if message.freeze_id != state.freeze_id:
        return state
    for known in state.orders:
        if known.order == message:
            if known.answer is not None:
                out.append(Send(known.answer))
            return state
    out.append(effect)
    return replace(state, orders=(*state.orders, Order(message)))


def write_done(state: ProcessorState, event: WriteDone, now: float, out: list[Effect]) -> ProcessorState:
    order = event.order
    answer = Written(state.settings.rank, order.freeze_id, order.tmp_name, order.parts, event.result)
    return _answer(state, order, answer, out)


def publish_done(state: ProcessorState, event: PublishDone, now: float, out: list[Effect]) -> ProcessorState:
    order = event.order
    answer = Published(state.settings.rank, order.freeze_id, order.step, event.path)
    return _answer(state, order, answer, out)


def _answer(
    state: ProcessorState, order: WriteOrder | PublishOrder, answer: Written | Published, out: list[Effect]
) -> ProcessorState:
    if order.freeze_id != state.freeze_id:
        return state  # the controller has asked afresh since
    if not any(known.order == order and known.answer is None for known in state.orders):
        raise ProtocolError(
            f"rank {state.settings.rank}: {type(answer).__name__} for {order.tmp_name}, which was not ordered or was "
            "answered already"
        )
    out.append(Send(answer))
    orders = tuple(Order(order, answer) if known.order == order else known for known in state.orders)
    return replace(state, orders=orders)


def work_failed(state: ProcessorState, event: WorkFailed, now: float, out: list[Effect]) -> ProcessorState:
    """An order raised. Whether a failed roll-forward tore the state, the next report says."""
    out.append(Log(f"{event.stage} failed: {event.error}"))
    failure = StepFailed(state.settings.rank, event.freeze_id, event.stage, event.tmp_name, event.error)
    if event.stage == "roll_forward":
        if state.applying is None:
            raise ProtocolError(f"rank {state.settings.rank}: a roll-forward failed that was not ordered")
        out.append(Send(failure) if event.freeze_id == state.freeze_id else CloseGate(state.freeze_id))
        return replace(state, applying=None, torn=True)
    if event.freeze_id != state.freeze_id:
        return state
    kind = WriteOrder if event.stage == "write" else PublishOrder
    for index, known in enumerate(state.orders):
        if isinstance(known.order, kind) and known.order.tmp_name == event.tmp_name and known.answer is None:
            out.append(Send(failure))
            orders = (*state.orders[:index], Order(known.order, failure), *state.orders[index + 1 :])
            return replace(state, orders=orders)
    raise ProtocolError(f"rank {state.settings.rank}: {event.stage} of {event.tmp_name} failed without being ordered")


# --- the end ---


def leave(state: ProcessorState, message: Exit, now: float, out: list[Effect]) -> ProcessorState:
    return _exit(state, message.code, message.reason, out)


def _exit(state: ProcessorState, code: int, reason: str, out: list[Effect]) -> ProcessorState:
    out.append(ExitProcess(code, reason))
    return replace(state, standing=Standing.LEAVING, heartbeat_at=inf)


def dismissed(state: ProcessorState, message: Dismiss, now: float, out: list[Effect]) -> ProcessorState:
    if not state.finished:
        out.append(Log("dismissed although training has not returned here; ignored"))
        return state
    out.append(Release())
    return replace(state, standing=Standing.LEAVING, heartbeat_at=inf)


def late(state: ProcessorState, event: object, now: float, out: list[Effect]) -> ProcessorState:
    """It crossed a change of standing."""
    return state


_ROWS: tuple[tuple[tuple[Standing, ...], type, Handler], ...] = (
    (_LIVE, Tick, tick),
    (_LIVE, Connected, connected),
    (_LIVE, Disconnected, disconnected),
    (_LIVE, Welcome, welcome),
    (_LIVE, LocalFault, local_fault),
    (_LIVE, TrainReturned, train_returned),
    (_LIVE, Freeze, freeze),
    (_SHUT, GateClosed, gate_closed),
    (_SHUT, Thaw, thaw),
    (_SHUT, RollForward, roll_forward),
    (_SHUT, RollForwardDone, roll_forward_done),
    (_SHUT, WriteOrder, write),
    (_SHUT, WriteDone, write_done),
    (_SHUT, PublishOrder, publish),
    (_SHUT, PublishDone, publish_done),
    (_SHUT, WorkFailed, work_failed),
    (_LIVE, Exit, leave),
    (_LIVE, Dismiss, dismissed),
    # Crossed a thaw.
    (_OPEN, GateClosed, late),
    (_OPEN, Thaw, late),
    (_OPEN, RollForward, late),
    (_OPEN, WriteOrder, late),
    (_OPEN, PublishOrder, late),
    *(
        (_GONE, kind, late)
        for kind in (
            Tick, Connected, Disconnected, Welcome, LocalFault, TrainReturned, Freeze, GateClosed, Thaw, RollForward,
            RollForwardDone, WriteOrder, WriteDone, PublishOrder, PublishDone, WorkFailed, Exit, Dismiss,
        )
    ),
)  # fmt: skip

TRANSITIONS: dict[tuple[Standing, type], Handler] = {
    (standing, kind): handler for standings, kind, handler in _ROWS for standing in standings
}
