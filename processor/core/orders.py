"""Orders to a frozen rank, and the answers to them (PURE).

Owns that every order is carried out once and answered as often as it is said: a controller repeats an order whenever its
answer may have been lost. Never decides whether an order is wise.
"""

from __future__ import annotations

from ttp.errors import ProtocolError
from ttp.proto.frozen import replace
from ttp.proto.messages import (
    CauseKind,
    Published,
    PublishOrder,
    Regroup,
    Regrouped,
    RolledForward,
    RollForward,
    StepFailed,
    WriteOrder,
    Written,
)

from .events import (
    ApplyUpdate,
    CloseGate,
    Effect,
    Log,
    PublishCheckpoint,
    PublishDone,
    RegroupDone,
    RegroupTraining,
    RollForwardDone,
    Send,
    WorkFailed,
    WriteDone,
    WriteShare,
)
from .refusals import why_no_order, why_no_regroup, why_no_roll_forward
from .state import OpenOrder, ProcessorState, RankMode


def roll_forward(state: ProcessorState, message: RollForward, now: float, out: list[Effect]) -> ProcessorState:
    """Do one update alone; doing it twice answers the same."""
    if message.freeze_id != state.freeze_id:
        return state
    expected = message.record.step
    if state.regrouping is not None:
        error = "the training thread has left the step, to make its groups again"
        out.append(Send(StepFailed(state.settings.rank, state.freeze_id, "roll_forward", "", error)))
        return state
    if state.applying is not None and state.applying.step == expected:
        return state  # the answer will come, under the newest freeze's number
    if state.closed and not state.torn and state.state_step == expected:
        out.append(Send(RolledForward(state.settings.rank, state.freeze_id, expected)))
        return state
    if not state.closed or state.torn or state.state_step + 1 != expected:
        error = f"the state: got step {state.state_step}, closed {state.closed}, torn {state.torn}, expected step {expected}"
        out.append(Send(StepFailed(state.settings.rank, state.freeze_id, "roll_forward", "", error)))
        return state
    if error := why_no_roll_forward(state, message.record):
        out.append(Send(StepFailed(state.settings.rank, state.freeze_id, "roll_forward", "", error)))
        return state
    out.append(ApplyUpdate(state.freeze_id, message.record))
    return replace(state, applying=message.record, rolled=True)


def roll_forward_done(state: ProcessorState, event: RollForwardDone, now: float, out: list[Effect]) -> ProcessorState:
    """The update is finished: answer, or report afresh when a newer freeze has asked since."""
    if state.applying is None:
        raise ProtocolError(f"rank {state.settings.rank}: rolled forward to {event.state_step} without an order")
    state = replace(state, applying=None, state_step=event.state_step)
    if event.freeze_id != state.freeze_id:
        out.append(CloseGate(state.freeze_id))  # the report that was held back
        return state
    out.append(Send(RolledForward(state.settings.rank, state.freeze_id, event.state_step)))
    return state


def regroup(state: ProcessorState, message: Regroup, now: float, out: list[Effect]) -> ProcessorState:
    """Have the training thread make its groups again; done already, it answers the same."""
    if message.freeze_id != state.freeze_id:
        return state
    if state.regrouping is not None:  # this order, or another one before it, is being done, or has failed
        if state.regrouping == message and state.regroup_error:
            out.append(_not_regrouped(state, message, state.regroup_error))
        return state
    if state.regrouped == message.freeze_id:
        out.append(Send(Regrouped(state.settings.rank, state.freeze_id)))
        return state
    if error := why_no_regroup(state, message):
        out.append(Log(f"regroup refused: {error}"))
        out.append(_not_regrouped(state, message, error))
        return state
    out.append(RegroupTraining(message))
    return replace(state, regrouping=message, ordered=0)  # all of them are answered; a later order counts again


def generation(state: ProcessorState) -> int:
    """Return the newest freeze under which this process has made its groups, or has begun to; 0: it has those of the attempt's start, or none."""
    return state.regrouping.freeze_id if state.regrouping is not None else state.regrouped


def _not_regrouped(state: ProcessorState, order: Regroup, error: str) -> Send:
    return Send(StepFailed(state.settings.rank, order.freeze_id, "regroup", "", error))


def regroup_done(state: ProcessorState, event: RegroupDone, now: float, out: list[Effect]) -> ProcessorState:
    """The training thread waits at the gate before `train`. What was reported of the abandoned step means nothing any more; what else was
    reported, a preemption notice or a lost agent, does."""
    order = event.order
    if state.regrouping != order:
        raise ProtocolError(f"rank {state.settings.rank}: regrouped for freeze {order.freeze_id} without an order")
    if state.finished:
        raise ProtocolError(
            f"rank {state.settings.rank}: regrouped for freeze {order.freeze_id}, but its training has returned"
        )
    left_behind = (CauseKind.PEER_ERROR, CauseKind.EXCEPTION)
    others = tuple(fault for fault in state.faults if fault.cause.kind not in left_behind)
    state = replace(
        state, regrouping=None, regrouped=order.freeze_id, vacant=False, rolled=False, torn=False, state_step=order.step,
        faults=others,
        parked=False,
    )  # fmt: skip
    if order.freeze_id != state.freeze_id:
        out.append(CloseGate(state.freeze_id))  # what was reported since is no longer so
        return state
    out.append(Send(Regrouped(state.settings.rank, order.freeze_id)))
    return state


def write(state: ProcessorState, message: WriteOrder, now: float, out: list[Effect]) -> ProcessorState:
    """Write the ordered parts; one that was written already is answered from memory."""
    return _take_order(state, message, WriteShare(message), out)


def publish(state: ProcessorState, message: PublishOrder, now: float, out: list[Effect]) -> ProcessorState:
    """Publish the staging directory; one that was published already is answered from memory."""
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
    if error := why_no_order(state, message):
        stage = "write" if isinstance(message, WriteOrder) else "publish"
        out.append(Log(f"{stage} refused: {error}"))
        out.append(Send(StepFailed(state.settings.rank, state.freeze_id, stage, message.tmp_name, error)))
        return state
    out.append(effect)
    return replace(state, orders=(*state.orders, OpenOrder(message)), ordered=state.ordered or state.freeze_id)


def write_done(state: ProcessorState, event: WriteDone, now: float, out: list[Effect]) -> ProcessorState:
    """Say that the parts are durable, unless the controller has asked afresh since."""
    order = event.order
    answer = Written(state.settings.rank, order.freeze_id, order.tmp_name, order.parts, event.result)
    return _answer(state, order, answer, out)


def publish_done(state: ProcessorState, event: PublishDone, now: float, out: list[Effect]) -> ProcessorState:
    """Say that the checkpoint is visible, unless the controller has asked afresh since."""
    order = event.order
    answer = Published(state.settings.rank, order.freeze_id, order.step, event.path)
    return _answer(state, order, answer, out)


def owes_answer(state: ProcessorState) -> bool:
    """True while an order is being carried out, or waits for its turn, or an update keeps the gate from closing."""
    closing = state.standing is RankMode.FROZEN and not state.closed
    return closing or state.applying is not None or any(known.answer is None for known in state.orders)


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
    orders = tuple(OpenOrder(order, answer) if known.order == order else known for known in state.orders)
    return replace(state, orders=orders)


def outlived(
    state: ProcessorState, event: WriteDone | PublishDone | WorkFailed, now: float, out: list[Effect]
) -> ProcessorState:
    """The gate is open: only an order of an earlier controller can still have been under way when a later one opened it."""
    freeze_id = event.freeze_id if isinstance(event, WorkFailed) else event.order.freeze_id
    if freeze_id >= state.freeze_id:
        raise ProtocolError(
            f"rank {state.settings.rank}: {type(event).__name__} of freeze {freeze_id} with an open gate"
        )
    return state


def work_failed(state: ProcessorState, event: WorkFailed, now: float, out: list[Effect]) -> ProcessorState:
    """An order raised. Whether a failed roll-forward tore the state, the next report says."""
    out.append(Log(f"{event.stage} failed: {event.error}"))
    failure = StepFailed(state.settings.rank, event.freeze_id, event.stage, event.tmp_name, event.error, event.torn)
    if event.stage == "roll_forward":
        if state.applying is None:
            raise ProtocolError(f"rank {state.settings.rank}: a roll-forward failed that was not ordered")
        out.append(Send(failure) if event.freeze_id == state.freeze_id else CloseGate(state.freeze_id))
        return replace(state, applying=None, torn=True)
    if event.stage == "regroup":  # the groups are gone: this gate cannot open in this process any more
        out.append(Send(failure))
        return replace(state, regroup_error=event.error)
    if event.freeze_id != state.freeze_id:
        return state
    kind = WriteOrder if event.stage == "write" else PublishOrder
    for index, known in enumerate(state.orders):
        if isinstance(known.order, kind) and known.order.tmp_name == event.tmp_name and known.answer is None:
            out.append(Send(failure))
            orders = (*state.orders[:index], OpenOrder(known.order, failure), *state.orders[index + 1 :])
            return replace(state, orders=orders)
    raise ProtocolError(f"rank {state.settings.rank}: {event.stage} of {event.tmp_name} failed without being ordered")
